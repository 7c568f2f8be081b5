// A package's engine with its state on the GPU: prefill in pieces, greedy decode by replaying a CUDA graph.
#pragma once

#include "../core/driver.h"
#include "../core/json.h"
#include "states.h"

#include <NvInfer.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace still
{

class Engine
{
public:
    // Opens the package's engine and plugin. Throws still::Error if something is missing or does not fit this machine.
    // `trust`: the user trusts the package's engine and plugin, even if this machine did not build them.
    Engine(std::string const& folder, std::string const& plugin, int device, bool trust);

    // Resets the state, with room for `tokens` tokens. Throws if the package's capacity is smaller.
    void start(int64_t tokens);

    // Feeds a prompt in pieces and returns the next greedy token.
    int32_t prefill(std::vector<int32_t> const& prompt);

    // Returns the greedy token after the last one.
    int32_t step();

    size_t state_bytes() const;
    Json const& manifest() const { return mManifest; }

private:
    enum Profile { kPrefill, kDecode };

    std::unique_ptr<ZeroedMemory> memory(size_t bytes) const;
    void open_tensorrt(std::string const& plugin);
    void make_contexts();
    static nvinfer1::Dims dims(State const& state);
    void bind(Profile profile, int64_t tokens);
    void run(Profile profile, int64_t tokens);
    void write(std::string const& name, std::vector<int32_t> const& values);
    int32_t next_token();
    size_t most_rows() const; // most logits rows of a call
    void capture();

    std::string mFolder;
    bool mTrust;
    Json mManifest;
    Json mEntry;
    Driver& mDriver;
    CuStream mStream{};
    std::unique_ptr<nvinfer1::IRuntime> mRuntime;
    std::unique_ptr<nvinfer1::ICudaEngine> mEngine;
    std::unique_ptr<ZeroedMemory> mScratch;
    std::unique_ptr<nvinfer1::IExecutionContext> mContexts[2];
    int64_t mBound[2]{-1, -1};
    std::map<std::string, std::unique_ptr<ZeroedMemory>> mBuffers; // by tensor, states by name
    std::vector<State> mStates;
    int32_t mLength{};
    CuGraphExec mGraph{};
};

} // namespace still
