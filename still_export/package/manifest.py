"""manifest.json as a model: every field that a verb reads, with its type and range."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from still_export.errors import PackageError
from still_export.fields import Record, check_record
from still_export.package.checked import CHAT, FORMAT_VERSION, MOST_ROWS, MOST_TOKENS, WHOLE, other_format
from still_export.package.files import check_name

Whole = Annotated[int, Field(ge=0, le=WHOLE)]
Count = Annotated[int, Field(ge=1, le=WHOLE)]
Size = Annotated[int, Field(ge=0, le=1 << 62)]
Dtype = Literal["float32", "float16", "bfloat16"]


class File(Record):
    """A file of the package."""

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    size_bytes: Size


class Model(Record):
    """What was exported."""

    family: str
    dtype: Dtype
    parameters: Size
    layers: Annotated[int, Field(ge=1, le=1 << 16)]
    hidden_size: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    vocab_size: Count
    layer_types: list[Annotated[str, Field(min_length=1)]]
    linearized: bool
    all_logits: bool

    @model_validator(mode="after")
    def _one_type_a_layer(self) -> Model:
        if len(self.layer_types) != self.layers:
            raise ValueError(f"layer_types has {len(self.layer_types)} entries for layers={self.layers}")
        return self


class Capacity(Record):
    """How many tokens the states are meant to hold, and whether more are refused."""

    capacity_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)]
    bounded: bool


class Growth(Record):
    """How many rows a state has after how many tokens (still_graphs/states.py)."""

    dimension: Annotated[str, Field(min_length=1)]
    axis: Annotated[int, Field(ge=1, le=7)]
    rows: Annotated[int, Field(ge=0, le=MOST_ROWS)]
    per: Annotated[int, Field(ge=1, le=MOST_ROWS)]
    lag: Annotated[int, Field(ge=0, le=MOST_ROWS)]
    fixed: bool


class State(Record):
    """One state tensor."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(min_length=1)]
    layer: Whole
    op: str
    shape: Annotated[list[Annotated[int, Field(ge=1, le=MOST_ROWS)] | str], Field(min_length=2, max_length=8)]
    dtype: Dtype | Literal["int32", "int64"]
    in_place: bool
    growth: Growth | None

    @model_validator(mode="after")
    def _agrees(self) -> State:
        named = {0: "batch"} | ({self.growth.axis: self.growth.dimension} if self.growth else {})
        for axis, size in enumerate(self.shape):
            if (named.get(axis) if isinstance(size, str) else None) != (
                size if isinstance(size, str) else named.get(axis)
            ):
                raise ValueError(f"shape[{axis}] is {size!r}, expected {named.get(axis, 'a number')!r}")
        if self.growth and self.growth.axis >= len(self.shape):
            raise ValueError(f"growth.axis={self.growth.axis} is no axis of the shape")
        return self


class Native(Record):
    """The native kernels, and the machines that they are for; `archs`: GPUs with kernels in it."""

    library: str
    system: str
    machine: str
    archs: list[str] = Field(default_factory=list)


class QuantizedRole(Record):
    """Weights of one role and form: bits (null: not quantized), who rounded them, how many there are."""

    bits: Literal[4, 8, 16] | None
    method: str | None
    weights: Whole


class AdapterPlace(Record):
    """A product that takes LoRA pairs while it runs: its weights and their outputs, side by side, and the inputs of them all."""

    weights: Annotated[list[str], Field(min_length=1)]
    inputs: Count
    outputs: list[Count]

    @model_validator(mode="after")
    def _outputs_of_each(self) -> AdapterPlace:
        if len(self.outputs) != len(self.weights):
            raise ValueError(f"outputs has {len(self.outputs)} entries for {len(self.weights)} weights")
        return self


class Quantization(Record):
    """Weights in few bits; `block_size` null: a scale for each output. `nodes`: what computes with them (quantization/policy.py)."""

    scheme: Literal["int8", "int4"]
    nodes: str | None = None
    block_size: Annotated[int, Field(ge=16, le=256)] | None
    lora: Literal["apart", "merged"]
    roles: dict[str, list[QuantizedRole]]
    adapters: list[AdapterPlace] = Field(default_factory=list)


class Engine(Record):
    """An engine that was built."""

    file: str
    size_bytes: Size
    tensorrt: str
    archs: Annotated[list[str], Field(min_length=1)]
    batch: Count
    prefill_tokens: Count
    stripped: bool = False


class Manifest(Record):
    """manifest.json, docs/reference/package.md field by field."""

    format_version: Annotated[int, Field(ge=1)]
    target: Literal["onnx", "genai", "trt", "trt-rtx"]
    command: str
    config: dict[str, Any]
    ops: dict[str, Count]
    model: Model
    still: dict[str, Any]
    capacity: Capacity
    prefill_tokens: Annotated[int, Field(ge=1, le=1 << 24)]
    states: list[State]
    eos_token_ids: list[Whole]
    chat: dict[str, str] | None = None
    native: Native | None = None
    quantization: Quantization | None = None
    trt: dict[str, Any] | None = None
    engines: list[Engine] = Field(default_factory=list)
    plugins: dict[str, str] = Field(default_factory=dict)
    plugin_layers: dict[str, Whole] = Field(default_factory=dict)
    value_types: dict[str, Dtype] = Field(default_factory=dict)
    versions: dict[str, str]
    files: dict[str, File]

    @model_validator(mode="after")
    def _agrees(self) -> Manifest:
        if self.chat is not None and not set(CHAT) <= set(self.chat):
            raise ValueError(f"chat lacks {', '.join(sorted(set(CHAT) - set(self.chat)))}")
        if self.target.startswith("trt") and self.trt is None:
            raise ValueError("trt is missing")
        rules: dict[str, Growth] = {}
        for state in self.states:
            if state.layer >= self.model.layers:
                raise ValueError(f"states: {state.name} is of layer {state.layer}; model.layers is {self.model.layers}")
            if state.op not in self.ops:
                raise ValueError(f"states: {state.name} is of the op {state.op!r:.40}, which ops does not have")
            if state.growth and rules.setdefault(state.growth.dimension, state.growth) != state.growth:
                raise ValueError(
                    f"states: {state.name} grows by another rule than others of {state.growth.dimension!r:.40}"
                )
        if len({state.name for state in self.states}) < len(self.states):
            raise ValueError("states has a name twice")
        for name in self.files:
            check_name(name, "files")
        for field, name in self.named_files():
            if name not in self.files:
                raise ValueError(f"{field} is {name!r}, which files does not list")
        return self

    def named_files(self) -> list[tuple[str, str]]:
        """Fields that name a file of the package, with what they name."""
        named = [(f"engines[{i}].file", engine.file) for i, engine in enumerate(self.engines)]
        named += [(f"plugins.{major}", name) for major, name in self.plugins.items()]
        return named + ([("native.library", self.native.library)] if self.native else [])


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest in the file `path`, every field checked.

    Raises:
        PackageError: It is no manifest of a format that this version reads, or a field is not what it must be.
    """
    again = "Copy the package again, or export the model again."
    try:
        values = json.loads(path.read_bytes().decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise PackageError(f"{path} is not readable ({error}). {again}") from error
    version = values.get("format_version") if isinstance(values, dict) else None
    if isinstance(version, int) and not isinstance(version, bool) and version != FORMAT_VERSION:
        raise PackageError(other_format(path, values))
    check_record(Manifest, values, path, PackageError, again)
    return dict(values)
