// Text from a package of `still-export --to genai`: onnxruntime-genai tokenizes, feeds the states and loads the package's kernels.
//   g++ -std=c++17 -O2 examples/genai_text.cpp $(still-export kernels flags --genai) -o text
//   ./text GENAI 20 "The capital of France is"
#include <cstdio>
#include <cstdlib>

// Of ort_genai_c.h, which the wheel of onnxruntime-genai does not bring.
struct Result;
struct Model;
struct Tokenizer;
struct Stream;
struct Sequences;
struct Params;
struct Generator;
extern "C" {
char const* OgaResultGetError(Result const*);
Result* OgaCreateModel(char const* folder, Model**);
Result* OgaCreateTokenizer(Model const*, Tokenizer**);
Result* OgaCreateTokenizerStream(Tokenizer const*, Stream**);
Result* OgaCreateSequences(Sequences**);
Result* OgaTokenizerEncode(Tokenizer const*, char const* text, Sequences*);
size_t OgaSequencesGetSequenceCount(Sequences const*, size_t sequence);
Result* OgaCreateGeneratorParams(Model const*, Params**);
Result* OgaGeneratorParamsSetSearchNumber(Params*, char const* name, double);
Result* OgaCreateGenerator(Model const*, Params const*, Generator**);
Result* OgaGenerator_AppendTokenSequences(Generator*, Sequences const*);
bool OgaGenerator_IsDone(Generator*);
Result* OgaGenerator_GenerateNextToken(Generator*);
Result* OgaGenerator_GetNextTokens(Generator const*, int const** tokens, size_t* count);
Result* OgaTokenizerStreamDecode(Stream*, int token, char const** text);
}

void check(Result* failed) {
    if (failed) std::fprintf(stderr, "%s\n", OgaResultGetError(failed)), std::exit(1);
}

int main(int argc, char** argv) {
    if (argc != 4) return std::fprintf(stderr, "usage: text PACKAGE TOKENS PROMPT\n"), 2;
    setenv("ORT_DISABLE_TELEMETRY", "1", 0);
    Model* model;
    Tokenizer* tokenizer;
    Stream* stream;
    Sequences* prompt;
    Params* params;
    Generator* generator;
    check(OgaCreateModel(argv[1], &model));
    check(OgaCreateTokenizer(model, &tokenizer));
    check(OgaCreateTokenizerStream(tokenizer, &stream));
    check(OgaCreateSequences(&prompt));
    check(OgaTokenizerEncode(tokenizer, argv[3], prompt));
    check(OgaCreateGeneratorParams(model, &params));
    check(OgaGeneratorParamsSetSearchNumber(params, "max_length", OgaSequencesGetSequenceCount(prompt, 0) + std::atof(argv[2])));
    check(OgaCreateGenerator(model, params, &generator));
    check(OgaGenerator_AppendTokenSequences(generator, prompt));
    while (!OgaGenerator_IsDone(generator)) {
        int const* tokens;
        size_t count;
        char const* text;
        check(OgaGenerator_GenerateNextToken(generator));
        check(OgaGenerator_GetNextTokens(generator, &tokens, &count));
        check(OgaTokenizerStreamDecode(stream, tokens[0], &text));
        std::printf("%s", text), std::fflush(stdout);
    }
    std::printf("\n");  // what was made lives as long as the program
}
