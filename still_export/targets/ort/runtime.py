"""ONNX Runtime, as packages are run with it here."""

from __future__ import annotations

from still_export.package.files import MODEL
from still_export.runtime.base import Runner
from still_export.targets.runtime import Opening, Runtime


def open_ort(asked: Opening) -> Runner:
    """As of Runtime."""
    from still_export.runtime.ort import OrtModel

    watched = _watched(asked) if asked.watch or asked.tensors or asked.graph != MODEL else None
    return OrtModel(
        asked.folder, asked.threads, asked.provider, check=asked.check, watched=watched, bodies=asked.bodies
    )


def _watched(asked: Opening) -> tuple[bytes, list[str]]:
    """The graph with the first output, int32, of each node that is asked for and the tensors that are, and the names of both."""
    import onnx

    from still_export.graph.weights_file import resolve_weights

    path = asked.folder / asked.graph
    model = onnx.load(path, load_external_data=False)
    resolve_weights(model, path)
    names = [node.output[0] for node in model.graph.node if node.op_type in asked.watch]
    model.graph.output.extend(onnx.helper.make_tensor_value_info(n, onnx.TensorProto.INT32, None) for n in names)
    # Of what type these are ONNX Runtime finds: Mamba's residual is float32 in half precision.
    model.graph.output.extend(onnx.ValueInfoProto(name=n) for n in asked.tensors)
    return model.SerializeToString(), [*names, *asked.tensors]


def repeat(asked: Opening) -> list[str]:
    """Polygraphy's command. It loads no custom op library: it runs the bodies."""
    providers = ["--providers", "cuda"] if asked.provider == "cuda" else []
    return ["polygraphy", "run", str(asked.folder / MODEL), "--onnxrt", *providers]


ORT = Runtime(
    "ort", "ONNX Runtime", open_ort, repeat, "onnxrt", modules=("onnxruntime",), providers=("cuda",), graphs=True
)
