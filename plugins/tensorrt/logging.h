// Where what goes wrong in a plugin is said: plugins throw nothing.
#pragma once

#include <NvInfer.h>

#include <cstdio>
#include <exception>
#include <string>

namespace still
{

// Set through setLoggerFinder by a host that loads the library as a plugin library.
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

} // namespace still
