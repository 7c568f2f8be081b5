/* C ABI of the core: what tests and hosts without C++ call. Functions return 0, or 1 after setting still_last_error(). */
#ifndef STILL_CORE_H
#define STILL_CORE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define STILL_API __attribute__((visibility("default")))

/* type: 0 none, 1 float32, 2 float16, 3 bfloat16, 4 int32, 5 int64 */
typedef struct still_tensor
{
    int32_t type;
    int32_t rank;
    int64_t dims[8];
} still_tensor;

/* kind: 0 integer, 1 float, 2 string */
typedef struct still_attribute
{
    char const* name;
    int32_t kind;
    int64_t integer;
    double real;
    char const* text;
} still_attribute;

typedef struct still_op still_op;

/* Text of this thread's last error; valid until its next call. */
STILL_API char const* still_last_error(void);

/* Opens `path` in place of libcuda.so.1; forgets all that was loaded. For tests. */
STILL_API int still_set_driver(char const* path);

/* Adds the kernels of a file to the embedded ones. */
STILL_API int still_add_archive(char const* path);
STILL_API int still_clear_archive(void);
STILL_API int still_variant_count(void);

/* absent_inputs: bit i set = the op's input i is not passed. Destroy with still_op_destroy. */
STILL_API int still_op_create(
    char const* name, still_attribute const* attributes, int count, uint64_t absent_inputs, still_op** op);

STILL_API void still_op_destroy(still_op* op);

/* Names of the inputs and outputs that exist, in order; null past the end. */
STILL_API char const* still_op_input_name(still_op const* op, int index);
STILL_API char const* still_op_output_name(still_op const* op, int index);

/* Checks the inputs and writes the outputs' types and shapes. */
STILL_API int still_op_infer(still_op const* op, still_tensor const* inputs, int input_count, still_tensor* outputs, int output_count);

/* Workspace of any call with at most these sizes. Needs no GPU. */
STILL_API int still_op_workspace(still_op const* op, still_tensor const* largest, int input_count, size_t* bytes);

/* Plans for these shapes and loads the modules into the current context. */
STILL_API int still_op_prepare(still_op* op, still_tensor const* inputs, int input_count);

/* Launches what was prepared on `stream`. */
STILL_API int still_op_launch(
    still_op const* op, void const* const* inputs, void* const* outputs, void* workspace, void* stream);

#ifdef __cplusplus
}
#endif

#endif
