// Token ids from a package by plain ONNX Runtime: greedy, state by value, with the package's kernels. Text: genai_text.cpp.
//   g++ -std=c++17 -O2 examples/onnxruntime_greedy.cpp $(still-export kernels flags) -o greedy
//   ./greedy DIR 20 5 6 7 8
#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

int main(int argc, char** argv) {
    if (argc < 4) return std::fprintf(stderr, "usage: greedy PACKAGE TOKENS ID...\n"), 2;
    int64_t const wanted = std::stoll(argv[2]), room = wanted + argc;
    std::vector<int64_t> ids;
    for (int i = 3; i < argc; ++i) ids.push_back(std::stoll(argv[i]));

    setenv("ORT_DISABLE_TELEMETRY", "1", 0);
    Ort::Env env;
    Ort::SessionOptions options;
    std::string const folder = argv[1], kernels = std::filesystem::absolute(folder + "/libstill_onnxruntime.so");
    options.AddConfigEntry("still.provider", "cpu");
    if (std::filesystem::exists(kernels)) options.RegisterCustomOpsLibrary(kernels.c_str());  // without it function bodies run
    Ort::Session session(env, (folder + "/model.onnx").c_str(), options);
    Ort::AllocatorWithDefaultOptions allocator;
    std::vector<std::string> inputs, outputs;
    std::vector<Ort::Value> feed;
    size_t tokens = 0, count = 0;  // where input_ids and new_tokens are among the inputs
    for (size_t i = 0; i < session.GetInputCount(); ++i) {
        inputs.push_back(session.GetInputNameAllocated(i, allocator).get());
        if (inputs[i] == "input_ids") tokens = i;
        if (inputs[i] == "new_tokens") count = i;
        Ort::TypeInfo const info = session.GetInputTypeInfo(i);
        auto const type = info.GetTensorTypeAndShapeInfo();
        auto shape = type.GetShape();
        // One row of the batch; what grows has room for every token, more than it needs. All zero is empty.
        for (size_t axis = 0; axis < shape.size(); ++axis)
            if (shape[axis] < 0) shape[axis] = axis == 0 ? 1 : room;
        auto const kind = type.GetElementType();
        size_t const bytes = kind == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 ? 8 : kind == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT ? 4 : 2;
        feed.push_back(Ort::Value::CreateTensor(allocator, shape.data(), shape.size(), kind));
        std::memset(feed[i].GetTensorMutableRawData(), 0, bytes * feed[i].GetTensorTypeAndShapeInfo().GetElementCount());
    }
    for (size_t i = 0; i < session.GetOutputCount(); ++i) outputs.push_back(session.GetOutputNameAllocated(i, allocator).get());
    std::vector<char const*> in, out;
    for (auto const& name : inputs) in.push_back(name.c_str());
    for (auto const& name : outputs) out.push_back(name.c_str());

    // Its last key of this name is the package's; an option's of the export stands before it, in config.
    std::ifstream file(folder + "/manifest.json");
    std::string const manifest(std::istreambuf_iterator<char>(file), {}), key = "\"prefill_tokens\":";
    int64_t const most = std::stoll(manifest.substr(manifest.rfind(key) + key.size()));

    for (int64_t made = 0, begin = 0; made < wanted;) {  // a prompt longer than prefill_tokens goes in pieces
        int64_t const shape[] = {1, std::min<int64_t>(most, ids.size() - begin)};
        feed[tokens] = Ort::Value::CreateTensor<int64_t>(allocator, shape, 2);
        std::copy_n(ids.begin() + begin, shape[1], feed[tokens].GetTensorMutableData<int64_t>());
        *feed[count].GetTensorMutableData<int64_t>() = shape[1];
        int64_t next = 0;
        auto found = session.Run(Ort::RunOptions{}, in.data(), feed.data(), feed.size(), out.data(), out.size());
        for (size_t o = 0; o < outputs.size(); ++o) {
            if (outputs[o] == "logits") {  // [1, 1, vocabulary], float32
                auto const* logits = found[o].GetTensorData<float>();
                next = std::max_element(logits, logits + found[o].GetTensorTypeAndShapeInfo().GetElementCount()) - logits;
            } else if (auto at = std::find(inputs.begin(), inputs.end(), "past_" + outputs[o].substr(8)); at != inputs.end())
                feed[at - inputs.begin()] = std::move(found[o]);  // present_X is the next call's past_X
        }
        begin += shape[1];
        if (begin < static_cast<int64_t>(ids.size())) continue;
        ids.push_back(next);
        std::printf("%lld%c", static_cast<long long>(next), ++made < wanted ? ' ' : '\n');
    }
}
