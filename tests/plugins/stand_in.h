// The call that stand-ins for hosts make, from the command line: LIBRARY OP FIRST_STATE ARGUMENT...
//
//   input=h:2.T.6.64     the inputs in order: h float16, f float32, i counts, w words of 32 bits; T: the call's tokens. States begin at FIRST_STATE
//   name=i:4 name=f:0.5 name=s:text     attributes
//   kernel=SYMBOL:pif    what a kernel takes (recording_driver.cpp)
//
// LD_LIBRARY_PATH names the stand-in for libcuda.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

inline void require(bool condition, char const* what)
{
    if (!condition)
    {
        std::printf("FAILED %s\n", what);
        std::exit(1);
    }
}

struct Shape
{
    char type;
    std::vector<int> dims;
};

struct Attribute
{
    std::string name;
    char kind;
    std::string value;
};

struct StandIn
{
    std::string op;
    size_t first_state = 0; // its place among the inputs
    std::vector<Shape> inputs;
    std::vector<Shape> outputs; // none: one like the first input, and one for each state
    std::vector<Attribute> attributes;

    void read(int argc, char** argv)
    {
        driver = dlopen("libcuda.so.1", RTLD_NOW);
        require(driver != nullptr, "the stand-in for libcuda");
        op = argv[2];
        first_state = static_cast<size_t>(std::atoi(argv[3]));
        for (int i = 4; i < argc; ++i)
        {
            std::string const argument = argv[i], name = argument.substr(0, argument.find('='));
            std::string const value = argument.substr(name.size() + 1), tail = value.substr(value.find(':') + 1);
            if (name == "input")
                inputs.push_back(read_shape(value[0], tail));
            else if (name == "output")
                outputs.push_back(read_shape(value[0], tail));
            else if (name == "kernel")
                reinterpret_cast<void (*)(char const*, char const*)>(dlsym(driver, "recording_arguments"))(
                    value.substr(0, value.find(':')).c_str(), tail.c_str());
            else
                attributes.push_back({name, value[0], tail});
        }
    }

    std::vector<Shape> inputs_of(int tokens) const { return with_tokens(inputs, tokens); }

    std::vector<Shape> outputs_of(int tokens) const
    {
        if (!outputs.empty())
            return with_tokens(outputs, tokens);
        auto const shapes = inputs_of(tokens);
        std::vector<Shape> result{shapes[0]};
        result.insert(result.end(), shapes.begin() + static_cast<std::ptrdiff_t>(first_state), shapes.end());
        return result;
    }

    Attribute const* attribute(std::string const& name) const
    {
        auto const found = std::find_if(attributes.begin(), attributes.end(), [&](Attribute const& a) { return a.name == name; });
        return found == attributes.end() ? nullptr : &*found;
    }

    void print_log() const { std::printf("%s", reinterpret_cast<char const* (*)()>(dlsym(driver, "recording_log"))()); }

private:
    static constexpr int kTokens = -1; // in the place of a dimension that is the call's tokens

    static std::vector<Shape> with_tokens(std::vector<Shape> shapes, int tokens)
    {
        for (auto& shape : shapes)
            std::replace(shape.dims.begin(), shape.dims.end(), kTokens, tokens);
        return shapes;
    }

    static Shape read_shape(char type, std::string const& text)
    {
        Shape shape{type, {}};
        for (size_t at = 0; at < text.size(); at = std::min(text.find('.', at), text.size() - 1) + 1)
            shape.dims.push_back(text[at] == 'T' ? kTokens : std::atoi(text.c_str() + at));
        return shape;
    }

    void* driver = nullptr;
};
