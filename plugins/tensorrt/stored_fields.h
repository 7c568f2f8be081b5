// Plugin fields as bytes of an engine, for TensorRT 8.6: IPluginV2 serializes itself.
#pragma once

#include "../core/error.h"

#include <NvInfer.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace still
{

constexpr uint32_t kFormat = 0x53544c31; // "STL1": changes with the layout below

// The fields as bytes: format, count, then name, type, length and value of each; everything aligned to 4 bytes.
inline std::string to_bytes(nvinfer1::PluginFieldCollection const& fields)
{
    std::string bytes;
    auto const number = [&](uint32_t value) { bytes.append(reinterpret_cast<char const*>(&value), sizeof(value)); };
    auto const block = [&](void const* data, size_t size) {
        number(static_cast<uint32_t>(size));
        bytes.append(static_cast<char const*>(data), size);
        bytes.resize((bytes.size() + 3) / 4 * 4);
    };
    number(kFormat);
    number(static_cast<uint32_t>(fields.nbFields));
    for (int i = 0; i < fields.nbFields; ++i)
    {
        nvinfer1::PluginField const& field = fields.fields[i];
        bool const text = field.type == nvinfer1::PluginFieldType::kCHAR;
        block(field.name, std::strlen(field.name) + 1);
        number(static_cast<uint32_t>(field.type));
        block(field.data, text ? static_cast<size_t>(field.length) : sizeof(uint32_t));
    }
    return bytes;
}

// Fields that point into a copy of the bytes.
class StoredFields
{
public:
    StoredFields(void const* data, size_t size) : mBytes(static_cast<char const*>(data), size)
    {
        if (number() != kFormat)
            fail("the engine holds this plugin in another format. Rebuild the engine with this plugin library.");
        uint32_t const count = number();
        for (uint32_t i = 0; i < count; ++i)
        {
            auto const [name, name_size] = block();
            if (name_size == 0 || name[name_size - 1] != '\0')
                truncated();
            auto const type = static_cast<nvinfer1::PluginFieldType>(number());
            auto const [value, value_size] = block();
            mFields.emplace_back(name, value, type, type == nvinfer1::PluginFieldType::kCHAR ? static_cast<int32_t>(value_size) : 1);
        }
    }

    nvinfer1::PluginFieldCollection collection() const { return {static_cast<int32_t>(mFields.size()), mFields.data()}; }

private:
    [[noreturn]] static void truncated() { fail("the engine's plugin data is truncated. Rebuild the engine."); }

    uint32_t number()
    {
        uint32_t value = 0;
        if (mBytes.size() - mAt < sizeof(value))
            truncated();
        std::memcpy(&value, mBytes.data() + mAt, sizeof(value));
        mAt += sizeof(value);
        return value;
    }

    std::pair<char const*, size_t> block()
    {
        size_t const size = number();
        size_t const padded = (size + 3) / 4 * 4;
        if (mBytes.size() - mAt < padded)
            truncated();
        char const* const start = mBytes.data() + mAt;
        mAt += padded;
        return {start, size};
    }

    std::string mBytes;
    size_t mAt{};
    std::vector<nvinfer1::PluginField> mFields;
};

} // namespace still
