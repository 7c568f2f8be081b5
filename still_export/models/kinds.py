"""The kinds of checkpoints, in one table: how each is recognised, and how its layers are configured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from still_export.errors import CheckpointError, ConfigError, NotLinearizedError
from still_export.mixers.config import LayersConfig, StillConfig
from still_export.models.build import family_of
from still_export.models.families.linear_names import published_names
from still_export.models.read import convert
from still_export.models.read.weights import Weight


@dataclass
class Checkpoint:
    """The content of the files, before it becomes a model. Its kind renames the tensors.

    source, overlays: Names from the user. still: Configuration of an adapter's training, from the file `configured`. added: Files of the
    overlays' tensors. own_embedding: A PEFT adapter with a trained embedding and no head. sight: config.json of a model with a vision
    encoder. others: Unused tensors, by purpose.
    """

    source: str
    model_type: str
    config: dict[str, Any]
    tensors: dict[str, Weight]
    adapter: dict[str, Any] | None = None
    generation: dict[str, Any] = field(default_factory=dict)
    still: StillConfig | None = None
    configured: Path | None = None
    overlays: Sequence[str] = ()
    added: list[Path] = field(default_factory=list)
    own_embedding: Path | None = None
    sight: dict[str, Any] | None = None
    others: dict[str, dict[str, Weight]] = field(default_factory=dict)

    @property
    def layers(self) -> int:
        """num_hidden_layers; required in checkpoints of other projects."""
        if self.config.get("num_hidden_layers") is None:
            raise CheckpointError(f"config.json of {self.source} has no num_hidden_layers. Fetch the model again.")
        return int(self.config["num_hidden_layers"])

    def take_published_names(self) -> None:
        self.tensors, self.others = published_names(self.model_type, self.tensors, self.config)


@dataclass(frozen=True)
class UserChoice:
    """The user's choices: whether to attach untrained STILL attention, and its configuration."""

    attach_untrained: bool
    still_config: StillConfig | None

    def refuse_config(self, what: str) -> None:
        """Raise ConfigError if a configuration was given for a checkpoint trained with its own."""
        if self.still_config is not None:
            raise ConfigError(
                f"{what} has a configuration of its own, which fixes what was trained (chunk size, salient tokens, scope, maps). Leave out "
                "those options; --capacity-tokens and --overflow may be given."
            )


@dataclass(frozen=True)
class Kind:
    """A kind of checkpoint.

    recognises: Whether a checkpoint is of this kind; called in the order of KINDS.
    configure: Renames the tensors and returns the configuration of the layers.
    linearized: It has feature maps.
    fresh: STILL attention without tensors starts untrained.
    """

    name: str
    recognises: Callable[[Checkpoint], bool]
    configure: Callable[[Checkpoint, UserChoice], LayersConfig]
    linearized: bool = False
    fresh: bool = False


def _still(found: Checkpoint, wanted: UserChoice) -> LayersConfig:
    wanted.refuse_config(f"{found.source} is a STILL model")
    if not isinstance(found.config.get("still_config"), dict):
        raise ConfigError(
            f"config.json of {found.source} has no still_config. Save the model again with save_pretrained."
        )
    return StillConfig.from_dict(found.config["still_config"], f"config.json of {found.source}: still_config")


def _released(found: Checkpoint, wanted: UserChoice) -> LayersConfig:
    if found.model_type == "still":
        found.model_type = convert.released_family(found.config, found.tensors)
    found.tensors = convert.convert_released(found.tensors)
    still = convert.released_config(found.config, wanted.still_config)
    types = convert.layers_with_maps(found.tensors, found.layers)
    return replace(still, layer_types=types) if still.layer_types is None and types is not None else still


def _lolcats(found: Checkpoint, wanted: UserChoice) -> LayersConfig:
    family_of(found.model_type)
    found.tensors, still = convert.convert_lolcats(found.tensors, wanted.still_config, found.layers)
    return still


def _linear(found: Checkpoint, wanted: UserChoice) -> LayersConfig:
    if wanted.attach_untrained or wanted.still_config is not None or found.still is not None:
        raise ConfigError(
            f"{found.source} is a {found.model_type} model, whose layers are linear already: it is exported as it is. Leave out "
            "--attach-untrained, adapters and options of STILL; --capacity-tokens may be given."
        )
    found.take_published_names()
    return LayersConfig()


def _softmax(found: Checkpoint, wanted: UserChoice) -> LayersConfig:
    if not wanted.attach_untrained and found.still is None:
        what = f"{found.source} is a plain softmax {found.model_type} model"
        if found.overlays:
            raise NotLinearizedError(
                f"{what}, and adapter_config.json of {' and '.join(map(str, found.overlays))} has no still_config: no adapter that "
                "linearize wrote. Give one, or pass --attach-untrained."
            )
        raise NotLinearizedError(
            f"{what}: it is not linearized, it has no feature maps and gates. Linearize it first, or pass --attach-untrained to give it "
            "untrained STILL attention, whose answers are the base model's only within the first two chunks (128 tokens)."
        )
    if found.still is not None:
        wanted.refuse_config("the adapter")
    found.take_published_names()
    return found.still or wanted.still_config or StillConfig()


KINDS = (
    Kind("STILL", lambda found: found.model_type.startswith("still_"), _still, linearized=True),
    Kind(
        "released STILL",
        lambda found: found.model_type == "still" or convert.is_released(found.tensors),
        _released,
        linearized=True,
    ),
    Kind("LoLCATs", lambda found: convert.is_lolcats(found.tensors), _lolcats, linearized=True),
    Kind("linear", lambda found: family_of(found.model_type).linear, _linear),
    Kind("softmax", lambda found: True, _softmax, fresh=True),
)


def kind_of(found: Checkpoint) -> Kind:
    """The kind of a checkpoint.

    Raises:
        UnsupportedModelError: It is of a family that is not covered.
    """
    return next(kind for kind in KINDS if kind.recognises(found))
