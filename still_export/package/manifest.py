"""manifest.json as a model: every field that a verb reads, with its type and range.

Readers check by the JSON Schema of it (checked.py). `python -m still_export.package.manifest` writes that.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator
from pydantic.json_schema import GenerateJsonSchema

from still_export.fields import Record
from still_export.package.checked import SCHEMA, check_rules
from still_export.package.files import MANIFEST

WHOLE = (1 << 31) - 1
MOST_ROWS = 1 << 24
MOST_TOKENS = 1 << 40
Whole = Annotated[int, Field(ge=0, le=WHOLE)]
Count = Annotated[int, Field(ge=1, le=WHOLE)]
Size = Annotated[int, Field(ge=0, le=1 << 62)]
Dtype = Literal["float32", "float16", "bfloat16"]


class Inserted(Record):
    """A token `id` that is inserted after every `every` tokens."""

    every: Count
    id: Whole


class Feeding(Record):
    """Feeding rules of models that insert tokens or need a prompt in one call."""

    inserted: Inserted | None = None
    whole_prompts: bool = False


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


class Origin(Record):
    """What the model's authors state, by fields of model cards; `overlays`: the same of its overlays."""

    name: str = ""
    license: str = ""
    license_name: str = ""
    license_link: str = ""
    base_model: list[str] = Field(default_factory=list)
    overlays: list[dict[str, Any]] = Field(default_factory=list)


class Capacity(Record):
    """Number of tokens that the states are sized for, and whether more are refused."""

    capacity_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)]
    bounded: bool


class Growth(Record):
    """How many rows a state has after how many tokens: rows * max(0, ceil(tokens / per) - lag).

    counted: The state of the same layer that counts the stored groups of `per` tokens, without the newest; the rule is an upper bound.
    """

    model_config = ConfigDict(extra="forbid")

    dimension: Annotated[str, Field(min_length=1)]
    axis: Annotated[int, Field(ge=1, le=7)]
    rows: Annotated[int, Field(ge=0, le=MOST_ROWS)]
    per: Annotated[int, Field(ge=1, le=MOST_ROWS)]
    lag: Annotated[int, Field(ge=0, le=MOST_ROWS)]
    fixed: bool
    counted: str = ""


class State(Record):
    """One state tensor."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(min_length=1)]
    layer: Whole
    op: str
    shape: Annotated[list[Annotated[int, Field(ge=1, le=MOST_ROWS)] | str], Field(min_length=2, max_length=8)]
    dtype: Literal["float32", "float16", "bfloat16", "int32", "int64"]
    in_place: bool
    growth: Growth | None


class Chat(Record):
    """The model's chat templates by name (Jinja), and the special tokens that they may use as variables.

    start: What of an answer the prompt has already, such as "<think>" and a line's end.
    """

    templates: dict[str, str]
    tokens: dict[str, str]
    start: str = ""


class Native(Record):
    """Native kernels and their machines; `archs`: GPUs with kernels in the library."""

    library: str
    system: str
    machine: str
    archs: list[str] = Field(default_factory=list)


class QuantizedRole(Record):
    """Weights of one role and form: bits (null: not quantized), method, count."""

    bits: Literal[4, 6, 8, 16] | None
    method: str | None
    weights: Whole


class AdapterPlace(Record):
    """A product that accepts LoRA pairs at run time: its weights, with the sizes of outputs and inputs."""

    weights: Annotated[list[str], Field(min_length=1)]
    inputs: Count
    outputs: list[Count]


class Calibration(Record):
    """Text used for calibration, in tokens. With a budget (relative loss in bits per byte): the loss on held-out text, the loss with at
    most 4 bits, and the weights that got 8 bits."""

    tokens: Count
    budget: Annotated[float, Field(ge=0)] | None = None
    loss: float | None = None
    loss_of_four_bits: float | None = None
    eight_bits: list[str] = Field(default_factory=list)


class Quantization(Record):
    """Low-bit weights; `block_size` null: one scale for each output. `nodes`: the ops that compute with them (quantization/policy.py)."""

    scheme: Literal["int8", "int4", "fp8"]
    nodes: str | None = None
    block_size: Annotated[int, Field(ge=16, le=256)] | None
    lora: Literal["apart", "merged"]
    roles: dict[str, list[QuantizedRole]]
    adapters: list[AdapterPlace] = Field(default_factory=list)
    calibration: Calibration | None = None


class SourceCodes(Record):
    """Weights that the source stores as low-bit codes: the number that keeps its codes, the number stored as floats, and relative errors of
    those quantized again, by name."""

    exact: Whole
    floats: Whole
    rounded: dict[str, Annotated[float, Field(ge=0)]]


class TensorRt(Record):
    """How engines are built (still_export/engines/options.py)."""

    version_compatible: bool


class Engine(Record):
    """A built engine."""

    file: str
    size_bytes: Annotated[int, Field(ge=1, le=1 << 62)]
    tensorrt: str
    archs: Annotated[list[str], Field(min_length=1)]
    batch: Count
    prefill_tokens: Annotated[int, Field(ge=1, le=MOST_ROWS)]
    stripped: bool = False


class Vision(Record):
    """The image encoder, vision.onnx: one embedding for `merge` x `merge` patches of `patch_values` numbers, at tokens of these ids."""

    merge: Annotated[int, Field(ge=1, le=64)]
    patch_values: Annotated[int, Field(ge=1, le=1 << 20)]
    image_token_id: Whole
    video_token_id: Whole


class Manifest(Record):
    """manifest.json, docs/reference/manifest.md field by field."""

    format_version: Literal[2]
    target: Annotated[str, Field(pattern="^[a-z0-9-]+$")]
    command: str
    config: dict[str, Any]
    ops: dict[str, Count]
    model: Model
    still: dict[str, Any]
    capacity: Capacity
    prefill_tokens: Annotated[int, Field(ge=1, le=MOST_ROWS)]
    states: list[State]
    eos_token_ids: list[Whole]
    chat: Chat | None = None
    origin: Origin | None = None
    portable: str | None = None
    state_identity: str | None = None
    feeding: Feeding | None = None
    speculate: Annotated[int, Field(ge=0, le=MOST_ROWS)] = 0
    vision: Vision | None = None
    native: Native | None = None
    quantization: Quantization | None = None
    source_codes: SourceCodes | None = None
    trt: TensorRt | None = None
    engines: list[Engine] = Field(default_factory=list)
    plugins: dict[str, str] = Field(default_factory=dict)
    plugin_layers: dict[str, Whole] = Field(default_factory=dict)
    value_types: dict[str, Dtype] = Field(default_factory=dict)
    versions: dict[str, str]
    files: dict[str, File]

    @model_validator(mode="after")
    def _agrees(self) -> Manifest:
        check_rules(self.model_dump(), MANIFEST)
        return self


class _Untitled(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # the name of the field again


def schema_text() -> str:
    """manifest.schema.json, for readers without pydantic; one record or field a line."""
    schema = Manifest.model_json_schema(schema_generator=_Untitled)
    parts = {name: schema.pop(name) for name in ("$defs", "properties")}
    head = json.dumps({"$schema": GenerateJsonSchema.schema_dialect, **schema})[:-1]
    lists = (f'"{name}": {{\n{_lines(part)}\n}}' for name, part in parts.items())
    return ",\n".join((head, *lists)) + "}\n"


def _lines(entries: dict[str, Any]) -> str:
    return ",\n".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())


if __name__ == "__main__":
    SCHEMA.write_text(schema_text(), encoding="utf-8")
