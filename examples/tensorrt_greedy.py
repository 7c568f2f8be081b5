# Token ids from a TensorRT package by plain TensorRT: greedy, one row, state in place, nothing of this project.
#   python examples/tensorrt_greedy.py TRT 20 5 6 7 8
import ctypes
import json
import sys
from pathlib import Path

import numpy as np
import tensorrt

folder, wanted, ids = Path(sys.argv[1]).resolve(), int(sys.argv[2]), [int(word) for word in sys.argv[3:]]
manifest, cuda = json.loads((folder / "manifest.json").read_text()), ctypes.CDLL("libcuda.so.1")


def check(status: int) -> None:
    if status:
        sys.exit(f"the CUDA driver failed with status {status}")


def zeros(shape: list[int], dtype: type) -> np.ndarray:  # in managed memory, whose address holds for host and GPU
    size, address = int(np.prod(shape)) * np.dtype(dtype).itemsize, ctypes.c_uint64()
    check(cuda.cuMemAllocManaged(ctypes.byref(address), ctypes.c_size_t(size), 1))
    ctypes.memset(address.value, 0, size)  # all zero is an empty state
    return np.frombuffer((ctypes.c_char * size).from_address(address.value), dtype).reshape(shape)


primary = ctypes.c_void_p()
check(cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(primary), 0) or cuda.cuCtxSetCurrent(primary))
plugin = manifest["plugins"][tensorrt.__version__.split(".")[0]].replace(".so", "_static.so")
ctypes.CDLL(str(folder / plugin))  # registers its plugins itself
runtime = tensorrt.Runtime(tensorrt.Logger(tensorrt.Logger.ERROR))
engine = runtime.deserialize_cuda_engine((folder / manifest["engines"][0]["file"]).read_bytes())
buffers, contexts = {}, [engine.create_execution_context(), engine.create_execution_context()]
for profile, context in enumerate(contexts):  # 0 is for prompts, 1 for one token
    context.set_optimization_profile_async(profile, 0)
for name in sorted(engine.get_tensor_name(i) for i in range(engine.num_io_tensors)):
    given = engine.get_tensor_mode(name) == tensorrt.TensorIOMode.INPUT
    place = name if name == "present_length" else name.replace("present_", "past_")  # a state is written where it lies
    if place not in buffers:  # one row; in what grows, room for every token, which is more than it needs
        shape = engine.get_tensor_shape(name)
        most = engine.get_tensor_profile_shape(name if given else "input_ids", 0)[2]
        shape = [1, *(min(most[i], len(ids) + wanted) if shape[i] < 0 else shape[i] for i in range(1, len(shape)))]
        buffers[name] = zeros(shape, tensorrt.nptype(engine.get_tensor_dtype(name)))
    for context in contexts:
        context.set_tensor_address(name, buffers[place].ctypes.data)
        if given and name != "input_ids":
            context.set_input_shape(name, buffers[name].shape)
answer, piece = [], buffers["input_ids"].shape[1]
while len(answer) < wanted:
    now, ids, context = ids[:piece], ids[piece:], contexts[len(ids) == 1]
    buffers["input_ids"][0, : len(now)], buffers["new_tokens"][0] = now, len(now)
    if not context.set_input_shape("input_ids", (1, len(now))) or not context.execute_async_v3(0):
        sys.exit("TensorRT could not run the call; its reason stands above")
    check(cuda.cuCtxSynchronize())
    buffers["past_length"][:] = buffers["present_length"]
    if not ids:
        rows = len(now) if manifest["model"]["all_logits"] else min(len(now), 1 + manifest.get("speculate", 0))
        answer += (ids := [int(buffers["next_token"].flat[rows - 1])])
print(*answer)
