"""Files of models and adapters, opened once; JSON files with types and ranges checked before use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from still_export.errors import CheckpointError, StillExportError
from still_export.fields import Record, check_record
from still_export.package.files import begins_another, stand_in
from still_export.package.refusals import CheckError
from still_export.package.tokenizer_bounds import check_described

LINKED = (".safetensors", ".json", ".jinja", ".model")
"""Suffixes of files that are read of a model's folder."""
MOST_HEADER = 100 << 20
"""Bytes of a safetensors header, by its format."""
AGAIN = "Fix the named value, or fetch the model again."
Count = Annotated[int, Field(ge=1, le=1 << 24)]
Whole = Annotated[int, Field(ge=0, le=1 << 31)]
Positive = Annotated[float, Field(gt=0, le=1e12)]
Token = Annotated[int, Field(ge=-1, le=1 << 31)]
Tokens = Token | list[Token] | None


class Generation(Record):
    """generation_config.json, and the same fields of config.json."""

    bos_token_id: Tokens = None
    eos_token_id: Tokens = None
    pad_token_id: Tokens = None


class Rope(Record):
    """Rotary embedding, from rope_parameters or rope_scaling; families refuse variants."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Count | None = None
    attention_factor: Positive | None = None
    partial_rotary_factor: Positive | None = None
    short_factor: list[Positive] | None = None
    long_factor: list[Positive] | None = None


class Config(Generation):
    """config.json, the fields that supported families read; families have defaults for missing ones."""

    model_type: Annotated[str, Field(min_length=1)]
    hidden_size: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    intermediate_size: Count | None = None
    num_hidden_layers: Annotated[int, Field(ge=1, le=1 << 12)] | None = None
    num_attention_heads: Annotated[int, Field(ge=1, le=1 << 16)] | None = None
    num_key_value_heads: Annotated[int, Field(ge=1, le=1 << 16)] | None = None
    head_dim: Annotated[int, Field(ge=1, le=1 << 16)] | None = None
    vocab_size: Count | None = None
    max_position_embeddings: Annotated[int, Field(ge=1, le=1 << 40)] | None = None
    rms_norm_eps: Annotated[float, Field(ge=0, le=1)] | None = None
    initializer_range: Annotated[float, Field(ge=0, le=1e3)] | None = None
    attention_dropout: Annotated[float, Field(ge=0, le=1)] | None = None
    hidden_act: str | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    rope_theta: Positive | None = None
    rope_parameters: Rope | None = None
    rope_scaling: Rope | None = None
    sliding_window: Count | None = None
    use_sliding_window: bool | None = None
    layer_types: list[str] | None = None
    no_rope_layers: list[Whole] | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    logits_scaling: float = 1.0
    time_step_limit: Annotated[list[Any], Field(min_length=2, max_length=2)] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    architectures: list[str] | None = None
    quantization_config: dict[str, Any] | None = None
    still_config: dict[str, Any] | None = None
    chunk_size: Count | None = None
    salient_per_chunk: Whole | None = None

    @field_validator("hidden_act")
    @classmethod
    def _known_activation(cls, name: str | None) -> str | None:
        from transformers.activations import ACT2FN

        if name is not None and name not in ACT2FN and name != "sqrelu":  # flash-linear-attention's name of RWKV-7's
            raise ValueError(f"{name!r:.40} is not an activation of transformers")
        return name

    @field_validator("dtype", "torch_dtype")
    @classmethod
    def _known_dtype(cls, name: str | None) -> str | None:
        if name is not None and name.removeprefix("torch.") not in (
            "auto",
            "float32",
            "float16",
            "bfloat16",
            "float64",
        ):
            raise ValueError(f"{name!r:.40} is none of float32, float16, bfloat16, float64")
        return name


class Optimizer(Record):
    """hf_quant_config.json of NVIDIA's Model Optimizer."""

    quantization: dict[str, Any]


class Adapter(Record):
    """adapter_config.json: PEFT's fields and the STILL configuration."""

    r: Annotated[int, Field(ge=1, le=1 << 16)] | None = None
    lora_alpha: Annotated[float, Field(ge=0, le=1e6)] | None = None
    use_rslora: bool | None = None
    use_dora: bool | None = None
    fan_in_fan_out: bool | None = None
    rank_pattern: dict[str, Any] | None = None
    alpha_pattern: dict[str, Any] | None = None
    still_config: dict[str, Any] | None = None


class AddedToken(Record):
    """A token outside the base vocabulary."""

    id: Whole
    content: str


class TokenizerModel(Record):
    """Vocabulary of a tokenizer; a unigram one is a list."""

    vocab: dict[str, Whole] | list[Any] | None = None


class Tokenizer(Record):
    """tokenizer.json, the fields common to all kinds; the library checks the rest."""

    model: TokenizerModel
    added_tokens: list[AddedToken] | None = None
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    post_processor: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None
    truncation: dict[str, Any] | None = None
    padding: dict[str, Any] | None = None


class TokenizerConfig(Record):
    tokenizer_class: str | None = None
    chat_template: str | list[dict[str, str]] | None = None
    add_prefix_space: bool | None = None
    clean_up_tokenization_spaces: bool | None = None
    model_max_length: float | None = None
    bos_token: str | dict[str, Any] | None = None
    eos_token: str | dict[str, Any] | None = None
    pad_token: str | dict[str, Any] | None = None
    unk_token: str | dict[str, Any] | None = None
    extra_special_tokens: list[str] | dict[str, Any] | None = None
    additional_special_tokens: list[str | dict[str, Any]] | None = None


class StandInError(CheckpointError):
    """A pointer of Git LFS or a web page lies where a file of the model should be."""


class Files:
    """The files of a model's or an adapter's folder. Each is opened once; what was read of it is kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._objects: dict[str, dict[str, Any]] = {}
        self._headers: dict[Path, dict[str, Any]] = {}

    def has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def content(self, name: str) -> bytes:
        """The bytes of a file.

        Raises:
            CheckpointError: It cannot be read, or holds a pointer of Git LFS or a web page instead of its content.
        """
        path = self.path / name
        try:
            content = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}. Fetch the model again.") from error
        if instead := begins_another(content[:1024]):
            raise StandInError(f"{path} is {instead}.")
        return content

    def text(self, name: str) -> str:
        """The text of a file; errors: those of `content`, or it is no UTF-8."""
        content = self.content(name)
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path / name} cannot be read: {error}. Fetch the model again.") from error

    def json(
        self, name: str, kind: type[Record] | None = None, fail: type[StillExportError] = CheckpointError
    ) -> dict[str, Any]:
        """The object in a JSON file, its fields checked by `kind`; {} if the folder has no such file.

        Raises:
            CheckpointError: The file does not contain a JSON object.
            fail: A field has a wrong type or value; one line with file and field.
        """
        path = self.path / name
        if name not in self._objects and (path.is_symlink() or path.exists()):
            self._objects[name] = _object(path, self.text(name))
        values = self._objects.get(name)
        if values is None:
            return {}
        if kind is not None:
            check_record(kind, values, path, fail, AGAIN)
        return values

    def forget(self, name: str) -> None:
        """Free what was read of a large JSON file."""
        self._objects.pop(name, None)

    def known(self, name: str) -> dict[str, Any]:
        """As `json`, and {} for a damaged file, which its reader reports.

        Raises:
            CheckpointError: The file holds a pointer of Git LFS or a web page.
        """
        try:
            return self.json(name)
        except StandInError:
            raise
        except CheckpointError:
            return {}

    def header(self, path: Path) -> dict[str, Any]:
        """The header of a safetensors file.

        Raises:
            CheckpointError: The file is damaged or truncated.
        """
        if path not in self._headers:
            self._headers[path] = _header(path)
        return self._headers[path]

    def check_tokenizer(self) -> None:
        """Raise CheckpointError if a tokenizer file is damaged."""
        for name in (
            "tokenizer.model",
            "tiktoken.model",
            "vocab.json",
            "merges.txt",
            "vocab.txt",
            "chat_template.jinja",
        ):
            if self.has(name) and (instead := stand_in(self.path / name)):
                raise StandInError(f"{self.path / name} is {instead}.")
        described = self.json("tokenizer.json", Tokenizer)
        try:
            check_described(described, str(self.path / "tokenizer.json"))
        except CheckError as error:
            raise CheckpointError(str(error)) from None
        self.forget("tokenizer.json")
        self.json("tokenizer_config.json", TokenizerConfig)
        for name in ("special_tokens_map.json", "added_tokens.json"):
            self.json(name)

    def check_links(self) -> None:
        """Raise CheckpointError if a file that is read is a link to one that is gone, as in a hub cache that was cleaned."""
        for path in sorted(self.path.iterdir()):
            if path.is_symlink() and path.suffix in LINKED and not path.exists():
                raise CheckpointError(
                    f"{path} is a link to {path.readlink()}, which is not there. Fetch the model again."
                )


def _object(path: Path, text: str) -> dict[str, Any]:
    if text.startswith("\ufeff"):
        raise CheckpointError(
            f"{path} begins with a byte order mark, which transformers does not read. Save it as UTF-8 without one."
        )
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}. Fetch the model again.") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} contains a {type(values).__name__}, not an object. Fetch the model again.")
    return values


def _header(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            size, length = int.from_bytes(file.read(8), "little"), path.stat().st_size - 8
            if size > min(length, MOST_HEADER):
                raise ValueError("its header is longer than the file")
            header = dict(json.loads(file.read(size)))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        if max(ends, default=0) != length - size:
            raise ValueError(
                f"its tensors have {max(ends, default=0):,} bytes, and the file {length - size:,} for them"
            )
        return header
    except (OSError, ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise damaged(path, error) from error


def damaged(path: Path, error: Exception) -> CheckpointError:
    if instead := stand_in(path):
        return CheckpointError(f"{path} is {instead}.")
    return CheckpointError(
        f"{path} ({path.stat().st_size:,} bytes) is not an intact safetensors file: {error}. "
        "It is truncated or damaged; fetch it again."
    )
