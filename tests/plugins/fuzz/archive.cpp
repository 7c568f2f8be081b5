// An archive of kernels: bytes as a file has them, or an index alone, which is wrapped so that damage reaches what reads it. Calls of the
// archive's ops follow, with the driver STILL_FUZZ_DRIVER where that is set: a damaged launch plan is an error of the call at most.
#include "core/archive.h"
#include "core/driver.h"
#include "core/error.h"
#include "core/op.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

namespace
{

// Inputs of a call in which every dimension of an op is another number, but those that a call needs to be equal.
std::vector<still::Tensor> inputs(still::Op const& op, int64_t batch, int64_t tokens)
{
    std::map<std::string, int64_t> const sizes{{"B", batch}, {"T", tokens}, {"H", 6}, {"HK", 3}, {"HS", 6}, {"D", 64}, {"P", 48}, {"F", 96},
        {"C", 32}, {"2*C", 64}, {"N", 80}};
    std::vector<still::Tensor> result;
    // Further symbols are those of ops without launch plans.
    auto const size_of = [&](std::string const& symbol) {
        auto const known = sizes.find(symbol);
        return known == sizes.end() ? int64_t{8} : known->second;
    };
    for (still::TensorSpec const* spec : op.inputs())
    {
        still::Tensor tensor;
        tensor.type = spec->type == still::ElementType::kActivation ? still::Type::kFloat16
            : spec->type == still::ElementType::kFloat32            ? still::Type::kFloat32
                                                                    : still::Type::kInt32;
        tensor.rank = static_cast<int32_t>(spec->shape.size());
        for (size_t axis = 0; axis < spec->shape.size(); ++axis)
            tensor.dims[axis] = size_of(spec->shape[axis]);
        result.push_back(tensor);
    }
    return result;
}

template <typename Body>
void attempt(Body const& body)
{
    try
    {
        body();
    }
    catch (still::Error const&)
    {
    }
}

void call(still::OpSpec const& spec)
{
    std::map<std::string, still::AttributeValue> attributes;
    for (still::AttributeSpec const& attribute : spec.attributes)
        if (attribute.name == "chunk_size")
            attributes[attribute.name] = {attribute.kind, 32, 0.0, {}};
    uint64_t absent = 0;
    for (size_t i = 0; i < spec.inputs.size(); ++i)
        if (spec.inputs[i].optional && spec.inputs[i].name != "gate")
            absent |= uint64_t{1} << i;
    still::Op op(spec, attributes, absent);
    for (auto const& [batch, tokens] : {std::pair<int64_t, int64_t>{2, 150}, {3, 1}, {1, 0}})
    {
        auto const given = inputs(op, batch, tokens);
        attempt([&] { op.infer(given); });
        attempt([&] { op.workspace_bytes(given); });
        attempt([&] { op.prepare(given); });
    }
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(uint8_t const* data, size_t size)
{
    std::string bytes(reinterpret_cast<char const*>(data), size);
    if (bytes.rfind("STILLAR1", 0) != 0)
    {
        uint64_t const length = bytes.size();
        std::string head = "STILLAR1" + std::string(sizeof length, '\0');
        std::memcpy(&head[8], &length, sizeof length);
        bytes = head + bytes;
        bytes.resize((bytes.size() + 15) / 16 * 16 + 64, 'x');
    }
    // Of exactly this size, so that the sanitizer sees a step over the end.
    std::vector<char> const exact(bytes.begin(), bytes.end());
    static bool const driver = [] {
        if (char const* const path = std::getenv("STILL_FUZZ_DRIVER"))
            still::Driver::replace(path);
        return true;
    }();
    static_cast<void>(driver);
    still::forget_functions(); // they go by addresses of cubins
    still::Archive& archive = still::Archive::get();
    archive.clear();
    try
    {
        archive.add({exact.data(), exact.size()}, "input");
    }
    catch (still::Error const&)
    {
        return 0;
    }
    for (still::Variant const& variant : archive.variants())
    {
        for (auto const& [name, kernel] : variant.kernels)
        {
            // What the driver would be given must lie in the file.
            volatile char last = kernel.cubin.empty() ? '\0' : kernel.cubin.back();
            static_cast<void>(last);
            if (kernel.threads == 0 || kernel.threads > 1024 || kernel.trailing_nulls > 64)
                __builtin_trap();
        }
        try
        {
            archive.find(variant.op, variant.op_version, 90, variant.key);
        }
        catch (still::Error const&)
        {
        }
    }
    for (still::OpSpec const& spec : still::op_specs())
        call(spec);
    archive.clear(); // the bytes go
    return 0;
}
