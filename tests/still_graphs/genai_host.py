"""What onnxruntime-genai does with a graph, by plain ONNX Runtime: it keeps the states and grows the mask."""

from pathlib import Path

import numpy as np
import onnxruntime as ort

TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int32)": np.int32}


class GenaiHost:
    """Rows of a batch over one graph; the states begin as zeros, past and present in one buffer, or `apart` in two that change places."""

    def __init__(self, graph: bytes | Path, rows: int, library: str = "", apart: bool = False) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        if library:
            options.register_custom_ops_library(library)
        given = graph if isinstance(graph, bytes) else str(graph)
        self.session = ort.InferenceSession(given, options, providers=["CPUExecutionProvider"])
        self.apart, self.mask = apart, np.zeros((rows, 0), np.int64)
        self.pasts, self.presents = {}, {}
        for info in self.session.get_inputs():
            if info.name.startswith("past_key_values."):
                shape = [rows, *info.shape[1:]]
                self.pasts[info.name] = ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, TYPES[info.type]))
                other = np.full(shape, np.nan if TYPES[info.type] != np.int32 else -1, TYPES[info.type])
                self.presents[info.name] = ort.OrtValue.ortvalue_from_numpy(other) if apart else self.pasts[info.name]

    def feed(self, ids: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
        """Logits of a call on tokens [B, T]; padding beyond `counts` [B] may be in the first call alone."""
        new = (
            np.ones(ids.shape, np.int64)
            if counts is None
            else (np.arange(ids.shape[1]) < counts[:, None]).astype(np.int64)
        )
        self.mask = np.concatenate([self.mask, new], axis=1)
        binding = self.session.io_binding()
        binding.bind_cpu_input("input_ids", np.ascontiguousarray(ids, np.int64))
        binding.bind_cpu_input("attention_mask", self.mask)
        binding.bind_output("logits", "cpu")
        for name, past in self.pasts.items():
            binding.bind_ortvalue_input(name, past)
            binding.bind_ortvalue_output(name.replace("past_key_values.", "present."), self.presents[name])
        self.session.run_with_iobinding(binding)
        if self.apart:
            self.pasts, self.presents = self.presents, self.pasts
        return np.array(binding.get_outputs()[0].numpy())
