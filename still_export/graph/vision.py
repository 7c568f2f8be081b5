"""The image encoder as a graph of standard ops, separate from the language model's."""

from __future__ import annotations

import onnx_ir as ir
import torch

from still_export.graph.lower import give_weights, onnx_of
from still_export.graph.trace import tracing
from still_export.models.families.vision import Vision
from still_export.models.read.weights import stand_ins

IMAGES, SQUARES = 3, 5
"""Example sizes of the trace, all different."""
INPUTS, OUTPUT = ("pixel_values", "grid"), "image_embeds"


def vision_graph(vision: Vision) -> ir.Model:
    """The graph of a `VisionEncoder`: inputs `pixel_values` float32 [images, patches, values] and `grid` int64 [2], output `image_embeds`
    float32. Weights are read lazily."""
    encoder = vision.encoder(stand_ins(vision.weights))
    square = vision.settings["merge"] ** 2
    squares = torch.export.Dim("squares", min=1, max=1 << 20)
    sizes = {0: torch.export.Dim("images", min=1, max=1 << 16), 1: square * squares}
    pixels = torch.zeros(IMAGES, SQUARES * square, vision.settings["patch_values"])
    grid = torch.tensor([vision.settings["merge"], SQUARES * vision.settings["merge"]])
    with tracing():
        program = torch.export.export(encoder, (pixels, grid), dynamic_shapes=(sizes, None), strict=False)
    names = {name: name.removeprefix("visual.") for name, _ in encoder.named_parameters()}
    model = onnx_of(program, INPUTS, [OUTPUT], names, {})
    model.graph.inputs[0].shape = ir.Shape(["images", "patches", pixels.shape[2]])
    model.graph.outputs[0].shape = ir.Shape(["images", "embeddings", int(vision.config.out_hidden_size)])
    give_weights(model, names, vision.weights)
    return model
