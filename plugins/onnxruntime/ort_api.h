// What of ONNX Runtime's C API the ops use, with exceptions for statuses.
#pragma once

#include <exception>
#include <stdexcept>
#include <string>

#include "../core/error.h"
#include "onnxruntime_c_api.h"

static_assert(ORT_API_VERSION >= 18, "the headers are older than ONNX Runtime 1.18");

namespace still_ort
{

// The oldest API with everything that is called here; later runtimes serve it too.
constexpr uint32_t kApiVersion = 18;

// Of ONNX Runtime 1.x; see LEAST_VERSION in still_export/runtime/ort_session.py.
constexpr int kLeastMinor = 25;

inline OrtApi const* g_api = nullptr;

// A failed call of ONNX Runtime; its message.
struct Failed : std::runtime_error
{
    using std::runtime_error::runtime_error;
};

inline void check(OrtStatus* status)
{
    if (!status)
        return;
    std::string const message = g_api->GetErrorMessage(status);
    g_api->ReleaseStatus(status);
    throw Failed(message);
}

// Runs fn; an exception becomes the status that it is to the host.
template <typename Function>
OrtStatus* guarded(Function fn) noexcept
{
    try
    {
        fn();
        return nullptr;
    }
    catch (still::Error const& error)
    {
        return g_api->CreateStatus(ORT_INVALID_ARGUMENT, error.what());
    }
    catch (std::exception const& error)
    {
        return g_api->CreateStatus(ORT_FAIL, error.what());
    }
}

inline void* data_of(OrtValue const* value)
{
    void* data;
    check(g_api->GetTensorMutableData(const_cast<OrtValue*>(value), &data));
    return data;
}

} // namespace still_ort
