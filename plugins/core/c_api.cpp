#include "still_core.h"

#include "archive.h"
#include "error.h"
#include "op.h"

#include <exception>
#include <new>

struct still_op
{
    still::Op op;
};

namespace
{

thread_local std::string tError;

template <typename Body>
int guarded(Body const& body) noexcept
{
    try
    {
        body();
        return 0;
    }
    catch (std::exception const& error)
    {
        tError = error.what();
    }
    catch (...)
    {
        tError = "unknown exception";
    }
    return 1;
}

std::vector<still::Tensor> tensors(still_tensor const* given, int count)
{
    std::vector<still::Tensor> result;
    for (int i = 0; i < count; ++i)
        result.push_back(
            still::make_tensor(static_cast<still::Type>(given[i].type), given[i].dims, given[i].rank, "tensor " + std::to_string(i)));
    return result;
}

char const* name_of(std::vector<still::TensorSpec const*> const& tensors, int index)
{
    return index >= 0 && static_cast<size_t>(index) < tensors.size() ? tensors[static_cast<size_t>(index)]->name.c_str() : nullptr;
}

} // namespace

char const* still_last_error(void)
{
    return tError.c_str();
}

int still_set_driver(char const* path)
{
    return guarded([&] {
        still::forget_functions();
        still::Driver::replace(path);
    });
}

int still_add_archive(char const* path)
{
    return guarded([&] { still::Archive::get().add_file(path); });
}

int still_clear_archive(void)
{
    return guarded([&] { still::Archive::get().clear(); });
}

int still_variant_count(void)
{
    return static_cast<int>(still::Archive::get().variants().size());
}

int still_op_create(char const* name, still_attribute const* attributes, int count, uint64_t absent_inputs, still_op** op)
{
    return guarded([&] {
        std::map<std::string, still::AttributeValue> values;
        for (int i = 0; i < count; ++i)
            values[attributes[i].name] = {static_cast<still::AttributeKind>(attributes[i].kind), attributes[i].integer,
                attributes[i].real, attributes[i].text ? attributes[i].text : ""};
        *op = new still_op{still::Op(still::op_spec(name), values, absent_inputs)};
    });
}

void still_op_destroy(still_op* op)
{
    delete op;
}

char const* still_op_input_name(still_op const* op, int index)
{
    return name_of(op->op.inputs(), index);
}

char const* still_op_output_name(still_op const* op, int index)
{
    return name_of(op->op.outputs(), index);
}

int still_op_infer(still_op const* op, still_tensor const* inputs, int input_count, still_tensor* outputs, int output_count)
{
    return guarded([&] {
        auto const result = op->op.infer(tensors(inputs, input_count));
        if (result.size() != static_cast<size_t>(output_count))
            still::fail(op->op.spec().name, ": has ", result.size(), " outputs, the caller has room for ", output_count, ".");
        for (size_t i = 0; i < result.size(); ++i)
        {
            outputs[i] = {static_cast<int32_t>(result[i].type), result[i].rank, {}};
            for (int axis = 0; axis < result[i].rank; ++axis)
                outputs[i].dims[axis] = result[i].dims[axis];
        }
    });
}

int still_op_workspace(still_op const* op, still_tensor const* largest, int input_count, size_t* bytes)
{
    return guarded([&] { *bytes = op->op.workspace_bytes(tensors(largest, input_count)); });
}

int still_op_prepare(still_op* op, still_tensor const* inputs, int input_count)
{
    return guarded([&] { op->op.prepare(tensors(inputs, input_count)); });
}

int still_op_launch(still_op const* op, void const* const* inputs, void* const* outputs, void* workspace, void* stream)
{
    return guarded([&] { op->op.launch(inputs, outputs, workspace, stream); });
}
