"""The builder of TensorRT 8.6."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from still_export.engines.builder import EngineBuilder
from still_export.graph.quantization.policy import PLUGIN
from still_export.targets.target import BuildError
from still_export.targets.trt.options import QUANTIZED_MAJOR, WORKAROUND


class Trt8Builder(EngineBuilder):
    """Builds with types as constraints, because 8.6 has no strongly typed networks."""

    def _prepare(self, plugin: Path | None) -> None:
        manifest, version = self.package.manifest, self.module.__version__
        major, quantization = version.split(".")[0], manifest.get("quantization")
        if quantization and quantization.get("nodes") != PLUGIN:
            raise BuildError(
                f"the weights of {self.package.path} are {quantization['scheme']}, which TensorRT {version} does not read; "
                f"build with TensorRT {QUANTIZED_MAJOR} or later, or export with --tensorrt-include of TensorRT {major}."
            )
        if WORKAROUND not in manifest["trt"]["passes"]:
            raise BuildError(
                f"the graph of {self.package.path} is for TensorRT {QUANTIZED_MAJOR} and later, without what {version} needs. "
                f"Export again with --tensorrt-include of the headers of TensorRT {major}."
            )
        super()._prepare(plugin)

    def _network_flags(self) -> int:
        return 1 << int(self.module.NetworkDefinitionCreationFlag.EXPLICIT_BATCH)

    def _set_device(self, config: Any) -> None:
        super()._set_device(config)
        flags = self.module.BuilderFlag
        if self.trt.version_compatible:
            # The build loads the variant that registers itself; the engine contains the other.
            config.plugins_to_serialize = [str(self.plugin.resolve()).replace("_static.so", ".so")]
        else:
            # 8.6 rearranges weights for every kernel that it tries, on one core, but not weights that can be refitted. On an H200 the first
            # layer of a Llama-3.1-8B took 36 s instead of 3, and the kernels are as fast.
            config.set_flag(flags.REFIT)
        if self.package.manifest["model"]["dtype"] == "float16":
            config.set_flag(flags.FP16)
            config.set_flag(flags.OBEY_PRECISION_CONSTRAINTS)
        config.set_tactic_sources(0)  # cuBLAS and cuDNN do not speed up these graphs, and may be absent

    def _adjust(self, network: Any) -> None:
        """Force the graph's types on all layers."""
        # Before TensorRT 10 types are hints, and norms would run in half precision. The parsed network lacks types of inner tensors, so the
        # package lists them.
        module, types = self.module, self.package.manifest["value_types"]
        kinds = {"float32": module.float32, "float16": module.float16}
        free = {getattr(module.LayerType, n) for n in ("CONSTANT", "CAST", "PLUGIN_V2", "SHAPE", "IDENTITY")}
        for index in range(network.num_layers):
            layer = network.get_layer(index)
            names = [layer.get_output(i).name for i in range(layer.num_outputs)]
            if layer.type in free or not names or any(types.get(name) not in kinds for name in names):
                continue
            layer.precision = kinds[types[names[0]]]
            for i, name in enumerate(names):
                layer.set_output_type(i, kinds[types[name]])
        for index in range(network.num_outputs):
            output = network.get_output(index)
            if types.get(output.name) in kinds:
                output.dtype = kinds[types[output.name]]
