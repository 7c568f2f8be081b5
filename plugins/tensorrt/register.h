// Exported symbols, the creators of all ops, and registration at load for hosts that only dlopen a plugin library.
#pragma once

#include "node_op.h"

#include <NvInfer.h>

#include <dlfcn.h>

#include <cstdio>
#include <string>
#include <vector>

#define STILL_EXPORT __attribute__((visibility("default")))

namespace still
{

// A creator for each op, as TensorRT's interface. They are made once and never freed: its registry keeps their addresses.
template <class Interface, class Creator> std::vector<Interface*> const& creators_of_ops()
{
    static auto const* const made = [] {
        auto* const list = new std::vector<Interface*>;
        for (OpSpec const& spec : op_specs())
            list->push_back(new Creator(spec));
        return list;
    }();
    return *made;
}

#ifdef STILL_STATIC_REGISTRATION
#define STILL_REGISTER_AT_LOAD(creators) \
    __attribute__((constructor)) static void register_at_load() \
    { \
        still::register_all(creators()); \
    }

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

template <class Interface> void register_all(std::vector<Interface*> const& creators)
{
    if (auto* const registry = plugin_registry())
        for (auto* const creator : creators)
            registry->registerCreator(*creator, "still");
}
#else
#define STILL_REGISTER_AT_LOAD(creators)
#endif

} // namespace still
