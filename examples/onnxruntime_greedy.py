# Token ids from a package by plain ONNX Runtime: greedy, one row, with the package's kernels, nothing of this project. State by value, or
# with --in-place in one buffer, which saves its copies.
#   python examples/onnxruntime_greedy.py DIR 20 5 6 7 8 --in-place
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read when it is imported

import numpy as np
import onnxruntime

folder, wanted, *ids = [word for word in sys.argv[1:] if word != "--in-place"]
folder, wanted, ids = Path(folder), int(wanted), [int(word) for word in ids]
manifest, options = json.loads((folder / "manifest.json").read_text()), onnxruntime.SessionOptions()
if "native" in manifest:  # and this is such a machine; else function bodies run
    options.add_session_config_entry(
        "still.provider", "cpu"
    )  # beside a GPU: nodes that only it has kernels for run by bodies
    options.register_custom_ops_library(str(folder / manifest["native"]["library"]))
session = onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
outputs = [output.name for output in session.get_outputs()]
capacity, room = manifest["capacity"]["capacity_tokens"], len(ids) + wanted


def rows(growth: dict) -> int:  # of a state that holds `room` tokens
    return growth["rows"] * max(0, -(-(capacity if growth["fixed"] else room) // growth["per"]) - growth["lag"])


past = {"past_length": np.zeros(1, np.int64)}  # all zero is an empty state
for state in manifest["states"]:
    shape = [rows(state["growth"]) if isinstance(size, str) else size for size in state["shape"][1:]]
    past[f"past_{state['name']}"] = np.zeros([1, *shape], state["dtype"])


def by_value(feed: dict) -> np.ndarray:
    found = dict(zip(outputs, session.run(None, {**feed, **past}), strict=True))
    past.update({name: found[name.replace("past_", "present_", 1)] for name in past})
    return found["logits"]


binding = session.io_binding()
binding.bind_output("logits")
for name in past.keys() - {"past_length"}:  # the lengths are no state in place: every layer reads them
    value = onnxruntime.OrtValue.ortvalue_from_numpy(past[name])
    binding.bind_ortvalue_input(name, value)
    binding.bind_ortvalue_output(name.replace("past_", "present_", 1), value)


def in_place(feed: dict) -> np.ndarray:
    for name, array in {**feed, "past_length": past["past_length"]}.items():
        binding.bind_cpu_input(name, array)
    session.run_with_iobinding(binding)
    past["past_length"] += feed["new_tokens"]
    return binding.get_outputs()[0].numpy()


call = in_place if "--in-place" in sys.argv else by_value
answer = []
while len(answer) < wanted:
    piece, ids = ids[: manifest["prefill_tokens"]], ids[manifest["prefill_tokens"] :]
    logits = call({"input_ids": np.array([piece], np.int64), "new_tokens": np.array([len(piece)], np.int64)})
    if not ids:
        answer += (ids := [int(logits[0, -1].argmax())])
print(*answer)
