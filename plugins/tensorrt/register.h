// Exported symbols, and registration at load for hosts that only dlopen a plugin library.
#pragma once

#include <NvInfer.h>

#include <dlfcn.h>

#include <cstdio>
#include <string>

#define STILL_EXPORT __attribute__((visibility("default")))

#ifdef STILL_STATIC_REGISTRATION
#define STILL_REGISTER_AT_LOAD __attribute__((constructor)) static void register_at_load()

namespace still
{

// TensorRT's registry in this process, found by name: linking libnvinfer would tie the library to one file name of it.
// Polygraphy opens plugins before it opens TensorRT, which is opened here then; TensorRT's own users find the same library loaded.
inline nvinfer1::IPluginRegistry* plugin_registry()
{
    constexpr char symbol[] = "getPluginRegistry";
    void* found = dlsym(RTLD_DEFAULT, symbol);
    std::string const versioned = "libnvinfer.so." + std::to_string(NV_TENSORRT_MAJOR);
    for (char const* name : {versioned.c_str(), "libnvinfer.so"})
        if (void* const library = found ? nullptr : dlopen(name, RTLD_NOW | RTLD_NOLOAD))
            found = dlsym(library, symbol);
    if (void* const library = found ? nullptr : dlopen(versioned.c_str(), RTLD_NOW | RTLD_GLOBAL))
        found = dlsym(library, symbol);
    if (!found)
    {
        std::fprintf(stderr,
            "still: %s is neither loaded in this process nor found; load TensorRT before this plugin, or name its folder in LD_LIBRARY_PATH.\n",
            versioned.c_str());
        return nullptr;
    }
    return reinterpret_cast<nvinfer1::IPluginRegistry* (*) ()>(found)();
}

} // namespace still
#endif
