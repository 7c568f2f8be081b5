// Device memory that frees itself, and files mapped into memory.
#pragma once

#include "../core/driver.h"

#include <cstdint>
#include <string>

namespace still
{

class Buffer
{
public:
    explicit Buffer(size_t bytes);
    ~Buffer();
    Buffer(Buffer const&) = delete;
    Buffer& operator=(Buffer const&) = delete;
    CuDevicePtr address() const { return mAddress; }
    size_t bytes() const { return mBytes; }

private:
    CuDevicePtr mAddress{};
    size_t mBytes{};
};

// A file's content without a copy of it: a plan may hold gigabytes, and some devices share one memory.
class MappedFile
{
public:
    // Throws when the file cannot be read or has not `bytes` bytes.
    MappedFile(std::string const& path, int64_t bytes);
    ~MappedFile();
    MappedFile(MappedFile const&) = delete;
    MappedFile& operator=(MappedFile const&) = delete;
    void const* data() const { return mData; }
    size_t bytes() const { return mBytes; }

private:
    void* mData;
    size_t mBytes;
};

} // namespace still
