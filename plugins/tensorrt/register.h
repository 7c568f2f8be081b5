// Shared parts of plugin libraries: logging of errors, since plugins throw nothing; the creators of all ops; exported symbols; and
// registration at load for hosts that only dlopen a library.
#pragma once

#include "../core/error.h"
#include "node_op.h"

#include <NvInfer.h>

#include <dlfcn.h>

#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#define STILL_EXPORT __attribute__((visibility("default")))

namespace still
{

// A host that loads the library as a plugin library sets it through setLoggerFinder.
inline nvinfer1::ILoggerFinder*& logger_finder()
{
    static nvinfer1::ILoggerFinder* finder = nullptr;
    return finder;
}

inline void log_error(std::string const& text) noexcept
{
    auto* const finder = logger_finder();
    auto* const logger = finder ? finder->findLogger() : nullptr;
    if (logger)
        logger->log(nvinfer1::ILogger::Severity::kERROR, ("still: " + text).c_str());
    else
        std::fprintf(stderr, "still: %s\n", text.c_str());
}

// Runs `body`; an exception becomes a log line and `failure`.
template <typename Result, typename Body>
Result logged(Result failure, Body const& body) noexcept
{
    try
    {
        return body();
    }
    catch (std::exception const& error)
    {
        log_error(error.what());
    }
    catch (...)
    {
        log_error("unknown exception");
    }
    return failure;
}

// Name, version and fields of an op, as creators of both generations report them.
template <class Interface> class CreatorOf : public Interface
{
public:
    explicit CreatorOf(OpSpec const& spec)
        : mSpec(spec), mVersion(std::to_string(spec.version)), mDeclared(declared_fields(spec)),
          mFields{static_cast<int32_t>(mDeclared.size()), mDeclared.data()}
    {
    }

    char const* getPluginName() const noexcept override { return mSpec.name.c_str(); }
    char const* getPluginVersion() const noexcept override { return mVersion.c_str(); }
    char const* getPluginNamespace() const noexcept override { return mSpec.domain.c_str(); }
    nvinfer1::PluginFieldCollection const* getFieldNames() noexcept override { return &mFields; }

protected:
    // The plugin that `make` makes from a node's fields or an engine's stored ones; null after logging an error.
    template <class Plugin, class Source, class Make> Plugin* made(char const* node, Source const& from, Make const& make) const noexcept
    {
        return logged(static_cast<Plugin*>(nullptr), [&]() -> Plugin* {
            try
            {
                return make(NodeOp(mSpec, from));
            }
            catch (Error const& error)
            {
                fail("node ", node ? node : "", ": ", error.what());
            }
        });
    }

private:
    OpSpec const& mSpec;
    std::string mVersion;
    std::vector<nvinfer1::PluginField> mDeclared;
    nvinfer1::PluginFieldCollection mFields;
};

// A creator for each op, through TensorRT's interface. They are never freed, because its registry stores their addresses.
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
// Polygraphy opens plugins before TensorRT, which is then opened here; TensorRT's own users find the same library loaded.
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

extern "C" STILL_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder)
{
    still::logger_finder() = finder;
}
