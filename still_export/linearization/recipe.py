"""Recipe: all options of a linearization, from a YAML file and flags."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from still_export.discovery import Registry, systems
from still_export.errors import ConfigError, unknown
from still_export.linearization.budget import Budget
from still_export.mixers.layers import HYBRID, SELECTED, WINDOWED, Finder, Found, Linearizer
from still_export.options import check_options, flag_of, option

if TYPE_CHECKING:
    from still_export.mixers.config import StillConfig

STILL_FIELDS = (
    *("chunk_size", "salient_per_chunk", "salient_by_layer", "select_scope", "feature_map", "capacity_tokens"),
    "layer_types",
)
LINEARIZERS: Registry[Linearizer] = Registry(
    (
        Linearizer("still", HYBRID),
        Linearizer("gla", "linearized_gla"),
        Linearizer("gdn", "linearized_gdn"),
        Linearizer("blocks", SELECTED, trained=False),
    ),
    "recipe",
    "LINEARIZERS",
)
"""Conversions by the recipe's mixer."""
FINDERS: Registry[Finder] = Registry((), "finder", "FINDERS")
"""Measurements of layers before training, by the recipe's option for their result."""
MADE = ", ".join(("full_attention", *(made.layer for made in LINEARIZERS.values())))
OF_STILL = (
    *(name for name in STILL_FIELDS if name not in ("capacity_tokens", "layer_types")),
    *("window_factors", "window_factor_scale", "learn_window_factors", "low_rank_gates", "finetune_maps"),
    *("selection_weight", "selection_target"),
)
"""Options of the mixer still only."""
OF_BLOCKS = ("block_size", "top_blocks", "local_blocks", "dense_length", "reuse")
"""Options of the mixer blocks only."""

ROW_TOKENS = 1024
"""Default tokens of a row, if the model's context is long enough."""
NO_LINEAR_PART = "none"
"""Feature map of layers that attend to the window and salient tokens only."""
NO_FEATURES = {"feature_map": "relu", "feature_dim": 16, "gate": "none"}
"""Their settings: with weights of zero, the fewest features that kernels have are all zero."""
DEFAULT_PRESETS = {mixer: "exact" if mixer == "still" else mixer for mixer in LINEARIZERS}
"""Default recipe by mixer."""


@dataclass(frozen=True)
class Recipe:
    """Settings of a linearization; learning rates and rank are those of the released recipe.

    Every field is an option in recipe files and, with dashes, a flag.
    """

    base: str = option("", "Softmax model: Hugging Face folder, hub id, or GGUF file.")
    budget: str = option(
        "",
        'Limits for the result, as "loss 2%, state 40%, found 85%, everyday 98%, time 15": softmax layers, salient tokens and steps are '
        "then chosen by trials, and the result is measured.",
    )
    texts: tuple[str, ...] = option(
        (), "Text files; the end of each is held out for validation. Without one: Python's own documentation."
    )
    tokenizer: str | None = option(None, "Folder of the tokenizer, if it is not next to the model.")
    mixer: str = option("still", f"What softmax layers become: {', '.join(LINEARIZERS)}.", choices=tuple(LINEARIZERS))
    start: str | None = option(None, "Adapter folder of the same base to continue from, for example with longer rows.")
    chunk_size: int = option(64, "Tokens per chunk.")
    salient_per_chunk: int = option(4, "Tokens per chunk that stay in softmax.")
    salient_by_layer: tuple[int, ...] | None = option(None, "Salient tokens per chunk, one number for each layer.")
    select_scope: str = option("q_head", "q_head, kv_group_max or kv_group_mean.")
    feature_map: str = option("np_softmax_pm", "Feature map of the linear part; none: there is no linear part.")
    capacity_tokens: int | None = option(None, "Longest sequence; default: the model's own.")
    window_factors: tuple[float, ...] | None = option(
        None, "Weight of the softmax terms against the linear ones, one for all layers or one each."
    )
    window_factor_scale: float = option(
        1.0, "Factor on the initial window factors; those of adapters grow with the length they will read.", above=0
    )
    learn_window_factors: bool = option(
        False, "Train window factors in both stages, one per query head, at stage 1's rate."
    )
    low_rank_gates: bool = option(
        False,
        "Train only the gates' biases in stage 1, and their weights with LoRA's rank in stage 2: a small adapter.",
    )
    finetune_maps: bool = option(
        False, "Also train feature maps and gates' biases in stage 2; few steps of stage 1 leave them half trained."
    )
    layer_types: tuple[str, ...] | None = option(
        None,
        f"Per layer full_attention or the mixer's type; all of them: {MADE}.",
    )
    block_size: int = option(64, "Tokens of a block with mixer=blocks; 1: single tokens are chosen.")
    top_blocks: int = option(96, "Blocks that a token reads.")
    local_blocks: int = option(32, "How many of them are the latest before the token's own.")
    dense_length: int = option(8192, "Context up to which all blocks are read.")
    reuse: str | None = option(
        None,
        "File of linearize --find-reuse: layers that read an earlier layer's blocks, and layers that stay softmax.",
    )
    transfer_steps: int = option(500, "Steps of stage 1, attention transfer; 0 = none.", least=0)
    transfer_rate: float = option(1e-2, "Learning rate of stage 1.")
    finetune_steps: int = option(1000, "Steps of stage 2, LoRA; 0 = none.", least=0)
    finetune_rate: float = option(
        1e-4, "Learning rate of stage 2. With a budget for more than 40 steps it is lower: half for 400."
    )
    sequence_length: int | None = option(
        None, "Tokens of a row; default: 1,024, or the model's context if shorter.", least=1
    )
    row_lengths: tuple[int, ...] | None = option(
        None,
        "Row lengths to use in turn instead of one; lengths may repeat. A step has batch_size x sequence_length tokens.",
    )
    batch_size: int = option(8, "Rows of a step over all processes.", least=1)
    micro_batch_size: int | None = option(
        None,
        "Rows of one pass on one process (or as many tokens in rows of other lengths), gradients add up; default: all.",
        least=1,
    )
    lora_rank: int = option(8, "Rank of LoRA.", least=1)
    lora_alpha: float = option(16.0, "Scale of LoRA times its rank.")
    loss: str = option(
        "ce", "Loss of stage 2: ce = next token, kl = divergence from the teacher.", choices=("ce", "kl")
    )
    selection_weight: float = option(
        0.0, "Weight of stage 2's loss that makes tokens salient to which far queries attend; 0 = off.", least=0
    )
    selection_target: str = option(
        "student",
        "Attention to use there: the student's own, or base, the teacher's, which does not change.",
        choices=("student", "base"),
    )
    retrieval: float = option(0.0, "Share of the rows that are synthetic retrieval tasks.", least=0, below=1)
    natural: float = option(
        0.0, "Share of them in natural forms (prose, code, tables, dialogue), many asked in chat.", least=0, most=1
    )
    answer_weight: float = option(10.0, "Loss weight of their answer tokens.", least=0)
    answer_share: float = option(
        0.0,
        "Loss weight of all answers of a row relative to its tokens; 0 = use answer_weight.",
        least=0,
    )
    answer_loss: str = option(
        "same", "Loss of answers in stage 2: same = as other tokens, ce = the token itself.", choices=("same", "ce")
    )
    chat_file: str | None = option(None, "File of conversations, one JSON list of messages per line.")
    chat: float = option(0.0, "Share of the rows that are conversations.", least=0, below=1)
    warmup: float = option(
        0.05, "Share of a stage's steps with a rising rate; it then falls to a tenth.", least=0, below=1
    )
    precision: str = option(
        "fp32", "Precision of products outside the attention: fp32 or bf16.", choices=("fp32", "bf16")
    )
    adapter_dtype: str = option(
        "float16",
        "Type in the adapter's file: float16, int8 rows (half the size), or int6 (int8, with square maps in 6 bits).",
        choices=("float16", "int8", "int6"),
    )
    gradient_checkpointing: bool = option(False, "Recompute activations: less memory, more time.")
    seed: int = option(0, "Seed of data and LoRA.")
    held_out: float = option(0.02, "Share of each text that is held out.", least=0, below=1)
    validate_every: int = option(100, "Steps between validations.", least=1)
    validation_rows: int = option(8, "Rows of a validation.", least=1)
    patience: int = option(3, "Validations without improvement that end a stage; 0 = never.", least=0)
    checkpoint_every: int = option(100, "Steps between checkpoints.", least=1)
    everyday_questions: int | None = option(
        None, "Everyday questions to ask base and model; default: as many as the time allows.", least=0
    )
    device: str = option("auto", "auto or cpu.", choices=("auto", "cpu"))

    def __post_init__(self) -> None:
        for name in ("texts", "layer_types", "salient_by_layer", "window_factors", "row_lengths"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, (value,) if isinstance(value, str | float | int) else tuple(value))
        check_options(self)
        if self.retrieval + self.chat > 1:
            raise ConfigError(f"--retrieval {self.retrieval} --chat {self.chat}: together they must be at most 1.")
        if self.chat and not self.chat_file:
            raise ConfigError(f"--chat {self.chat} needs conversations: name their file with --chat-file.")
        for length in self.row_lengths or ():
            if length < 2 or self.batch_size * self.row_tokens % length:
                raise ConfigError(
                    f"--row-lengths {length}: {self.batch_size} x {self.row_tokens} tokens of a step are not whole "
                    "rows of it."
                )
        self._check_mixer()
        self._check_budget()
        shortest = min(self.row_lengths or (self.row_tokens,))
        if self.mixer == "still" and self.transfer_steps and shortest <= 2 * self.chunk_size:
            raise ConfigError(
                f"--sequence-length {shortest}: rows of at most two chunks ({2 * self.chunk_size} tokens) are softmax "
                "throughout, so stage 1 has nothing to train. Use longer rows or a smaller --chunk-size."
            )
        if self.micro_batch_size is not None and self.micro_batch_size > self.batch_size:
            raise ConfigError(
                f"--micro-batch-size {self.micro_batch_size} is more than --batch-size {self.batch_size}."
            )

    def _check_budget(self) -> None:
        """Raise ConfigError if the budget is invalid, or the recipe sets an option that it chooses."""
        if not self.budget:
            return
        Budget.read(self.budget)
        chosen = ("layer_types", "salient_per_chunk", "salient_by_layer", "start", "mixer")
        own = [flag_of(Recipe, f.name) for f in fields(self) if f.name in chosen and getattr(self, f.name) != f.default]
        if own:
            raise ConfigError(
                f"{', '.join(own)} beside --budget {self.budget!r}: a budget is for layers of STILL, from the base, and chooses which they "
                'are and how many tokens stay salient. Leave it out, or give another --recipe or --budget "".'
            )

    def _check_mixer(self) -> None:
        """Raise ConfigError for options of another mixer."""
        for owner, own in {"STILL": OF_STILL, "blocks": OF_BLOCKS}.items():
            others = set(own) - set(LINEARIZERS[self.mixer].options)
            foreign = [f.name for f in fields(self) if f.name in others and getattr(self, f.name) != f.default]
            if foreign and owner.lower() != self.mixer:
                flags = ", ".join(flag_of(type(self), name) for name in foreign)
                raise ConfigError(f"{flags}: options of {owner}; layers of --mixer {self.mixer} have none.")
        if self.layer_types is not None:
            for name in FINDERS:
                if (file := getattr(self, name)) is not None:
                    raise ConfigError(f"--{name} {file} defines which layers stay softmax: leave out --layer-types.")
        if self.feature_map == NO_LINEAR_PART:
            trained = ("transfer_steps", "window_factors", "learn_window_factors", "low_rank_gates", "finetune_maps")
            both = [flag_of(type(self), name) for name in trained if getattr(self, name) not in (None, False, 0)]
            if both:
                raise ConfigError(
                    f"{', '.join(both)} beside --feature-map none: there is no linear part to train or to weigh."
                )
        if self.mixer == "still":
            return
        if not LINEARIZERS[self.mixer].trained and self.transfer_steps:
            raise ConfigError(
                f"--transfer-steps {self.transfer_steps}: {self.mixer} has no parameters of its own, so there is no stage 1. Set it to 0."
            )
        foreign = sorted(set(self.layer_types or ()) - {"full_attention", WINDOWED, self.layer})
        if foreign:
            raise ConfigError(
                f"--layer-types names {', '.join(foreign)}; with --mixer {self.mixer} layers are full_attention or {self.layer}."
            )

    @property
    def layer(self) -> str:
        """Type of the layers that the mixer makes."""
        return LINEARIZERS[self.mixer].layer

    @property
    def lora_in_transfer(self) -> bool:
        """Whether stage 1 also trains LoRA: the rule does not use exponentials of queries and keys, which the base was trained for."""
        return self.mixer in ("gla", "gdn")

    @property
    def maps_in_finetune(self) -> bool:
        """Whether stage 2 also trains stage 1's parameters."""
        return self.lora_in_transfer or self.finetune_maps

    @property
    def row_tokens(self) -> int:
        """Tokens of a row; with row_lengths, a step's tokens divided by batch_size."""
        return ROW_TOKENS if self.sequence_length is None else self.sequence_length

    def rows_of_a_pass(self, length: int) -> int:
        """Most rows of `length` tokens in one pass on one process: equal numbers of tokens for all row lengths."""
        return max(1, (self.micro_batch_size or self.batch_size) * self.row_tokens // length)

    def fitted(self, context: int) -> Recipe:
        """This recipe for a model with at most `context` tokens: rows of unset length are limited to it.

        Raises:
            ConfigError: Requested rows are longer, or the limited rows are too short to train on.
        """
        if self.sequence_length is None and not self.row_lengths:
            return replace(self, sequence_length=min(ROW_TOKENS, context))
        longest = max(self.row_lengths or (self.row_tokens,))
        if longest > context:
            name = "row_lengths has" if self.row_lengths else "sequence_length is"
            raise ConfigError(
                f"{name} {longest}, and the model has room for {context} tokens. Use shorter rows, or raise --capacity-tokens."
            )
        return self

    def still_config(self, layers: int, heads: int) -> StillConfig:
        """The STILL configuration for a model with so many layers and query heads.

        Raises:
            ConfigError: window_factors has neither one value nor one per layer.
        """
        from still_export.mixers.block_attention.settings import means_of
        from still_export.mixers.config import StillConfig  # imports torch, which help texts do not need

        factors = self.window_factors
        if factors is not None:
            if len(factors) not in (1, layers):
                raise ConfigError(
                    f"--window-factors has {len(factors)} values; give one, or one for each of {layers} layers."
                )
            factors = factors * (layers // len(factors))
        rows = None if factors is None else tuple((float(factor),) * heads for factor in factors)
        values = {name: getattr(self, name) for name in (*STILL_FIELDS, *OF_BLOCKS)} | means_of(self.block_size)
        values |= NO_FEATURES if self.feature_map == NO_LINEAR_PART else {}
        if self.layer_types is None and self.mixer != "still":
            values["layer_types"] = (self.layer,) * layers
        for _, found in self.found(layers):
            values |= found.fields()
        return StillConfig.from_dict({"window_factors": rows, **values}, "recipe")

    def found(self, layers: int) -> Iterator[tuple[str, Found]]:
        """Measurements of layers that the recipe names, with their file.

        Raises:
            ConfigError: A file is invalid, or for a model with another number of layers.
        """
        for name, finder in FINDERS.items():
            if (file := getattr(self, name)) is not None:
                yield file, finder.read(Path(file), layers)

    def to_dict(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def presets() -> dict[str, Path]:
    """Recipes in this package, by name."""
    folders = [files("still_export.linearization").joinpath("recipes"), *map(files, systems())]
    found = {path.stem: path for folder in folders for path in Path(str(folder)).glob("*.yaml")}
    return dict(sorted(found.items()))


def preset(name: str) -> Path:
    """The file of a recipe in this package.

    Raises:
        ConfigError: The name is unknown.
    """
    known = presets()
    if name not in known:
        raise unknown(name, sorted(known), f"the recipe {name!r}")
    return known[name]


def read_recipe(path: Path | None, overrides: Mapping[str, Any]) -> Recipe:
    """The recipe in a YAML file (None: the defaults), with the options in `overrides` replaced.

    Relative paths of base, texts and tokenizer refer to the file's folder if they exist there.

    Raises:
        ConfigError: The file is not a recipe, or a value is invalid.
    """
    known = [f.name for f in fields(Recipe)]
    values: Any = {}
    if path is not None:
        import yaml

        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"{path} is not a YAML recipe: {error}. Fix the file.") from error
        if not isinstance(values, dict):
            raise ConfigError(
                f"{path} contains a {type(values).__name__}; a recipe is a mapping of options. "
                "Write them as in still_export/linearization/recipes."
            )
        for name in values:
            if name not in known:
                raise unknown(name, known, f"{path}: the option {name!r}")
        for name in ("base", "tokenizer", "start", "chat_file"):
            if isinstance(values.get(name), str):
                values[name] = _from_recipe_folder(path, values[name])
        if isinstance(values.get("texts"), list):
            values["texts"] = [_from_recipe_folder(path, str(text)) for text in values["texts"]]
    try:
        return Recipe(**{**values, **overrides})
    except TypeError as error:
        raise ConfigError(f"{path or 'the options'}: a value has the wrong type: {error}.") from error


def _from_recipe_folder(path: Path, name: str) -> str:
    there = path.parent / name
    return str(there) if there.exists() else name
