"""What TensorRT-RTX does otherwise than TensorRT: it builds for named GPUs on any machine, without plugins and timings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from still_export.engines.builder import EngineBuilder
from still_export.errors import unknown
from still_export.targets.target import BuildError


class RtxBuilder(EngineBuilder):
    """Builds for the architectures that the export recorded."""

    def _memory_advice(self) -> str:
        return ""

    def _prepare(self, plugin: Path | None) -> None:
        pass

    def _device(self) -> dict[str, Any]:
        return {"archs": list(self.trt.architectures)}

    def _timing_cache(self, config: Any) -> Any:
        return None

    def _set_device(self, config: Any) -> None:
        module, names = self.module, self.trt.architectures
        config.num_compute_capabilities = len(names)
        for index, arch in enumerate(names):
            name = arch.upper().replace("_", "")
            if not hasattr(module.ComputeCapability, name):
                known = [n for n in dir(module.ComputeCapability) if n.startswith("SM")]
                raise unknown(arch, known, f"--arch {arch} of TensorRT-RTX {module.__version__}", BuildError)
            config.set_compute_capability(getattr(module.ComputeCapability, name), index)
