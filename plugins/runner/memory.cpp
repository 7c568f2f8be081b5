#include "memory.h"

#include "../core/error.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

namespace still
{

Buffer::Buffer(size_t bytes) : mBytes(std::max<size_t>(bytes, 16))
{
    Driver& driver = Driver::get();
    size_t free = 0;
    size_t total = 0;
    driver.memGetInfo(&free, &total);
    if (driver.memAlloc(&mAddress, mBytes) != 0)
        fail("out of device memory: ", mBytes >> 20, " MiB more were needed, ", free >> 20, " of ", total >> 20,
            " MiB are free. Use a shorter context.");
}

Buffer::~Buffer()
{
    Driver::get().memFree(mAddress);
}

MappedFile::MappedFile(std::string const& path, int64_t bytes) : mData(MAP_FAILED), mBytes(static_cast<size_t>(bytes))
{
    int const file = open(path.c_str(), O_RDONLY);
    struct stat found{};
    bool const there = file >= 0 && fstat(file, &found) == 0;
    if (there && found.st_size == bytes && bytes > 0)
        mData = mmap(nullptr, mBytes, PROT_READ, MAP_PRIVATE, file, 0);
    if (file >= 0)
        close(file);
    if (!there)
        fail(path, " cannot be opened.");
    if (mData == MAP_FAILED)
        fail(path, " has ", found.st_size, " bytes, the manifest says ", bytes, ": it is truncated or replaced. Copy it again.");
}

MappedFile::~MappedFile() { munmap(mData, mBytes); }

} // namespace still
