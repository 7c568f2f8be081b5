"""Router, experts and the modules around them, replacing a family's block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from still_export.errors import ConfigError, UnsupportedModelError
from still_export.mixers.roles import FEED_FORWARD, GATE, ROUTER
from still_kernels.experts.meaning import Inputs, experts
from still_kernels.experts.spec import EXPERTS
from still_kernels.route.meaning import Inputs as RouteInputs
from still_kernels.route.meaning import margins, naive_route, route
from still_kernels.route.spec import ROUTE

BIAS = "e_score_correction_bias"
"""Added to scores when experts are chosen; float32 in any model."""


@dataclass(frozen=True)
class Routing:
    """Attributes of the router's op."""

    k: int
    score: str = "softmax"
    normalize: int = 1
    epsilon: float = 0.0
    scaling: float = 1.0
    groups: int = 1
    top_groups: int = 1


def _softmax(base: Any) -> Routing:
    return Routing(base.top_k, normalize=int(getattr(base, "norm_topk_prob", True)))


def _sigmoid(base: Any) -> Routing:
    return Routing(base.top_k, "sigmoid", int(base.norm_topk_prob), 1e-6, float(base.routed_scaling_factor))


def _groups(base: Any) -> Routing:
    scaling = float(base.routed_scaling_factor)
    return Routing(base.top_k, "sigmoid", int(base.norm_topk_prob), 1e-20, scaling, base.num_group, base.topk_group)


ROUTERS: dict[str, Callable[[Any], Routing]] = {
    "Qwen3_5MoeTopKRouter": _softmax,
    "Qwen3NextTopKRouter": _softmax,
    "LaraMiniTopKRouter": _softmax,
    "Qwen3MoeTopKRouter": _softmax,
    "GraniteMoeHybridTopKRouter": _softmax,  # equal to a softmax over the logits of the chosen
    "MiniMaxTopKRouter": _softmax,
    "JambaTopKRouter": lambda base: Routing(base.top_k, normalize=0),
    "Lfm2MoeTopKRouter": _sigmoid,
    "KimiLinearTopkRouter": _groups,
    "BailingHybridTopkRouter": _groups,
    "NemotronHTopkRouter": _groups,
}
ACTIVATIONS = {"SiLU": "swiglu", "SiLUActivation": "swiglu", "silu": "swiglu", "ReLUSquaredActivation": "relu2"}
"""The op's activations by names of classes and functions."""
SCORES = ("moe_router_activation_func", "scoring_func", "score_function", "topk_method")
"""Fields of published configurations that name the router; the last is one with a correction bias."""
SHARED, SHARED_GATE = ("shared_expert", "shared_experts"), "shared_expert_gate"
NARROW, WIDEN = "fc1_latent_proj", "fc2_latent_proj"


class Router(nn.Module):
    """The router of a block: `weight` [E, I], optionally `e_score_correction_bias` [E].

    Raises:
        UnsupportedModelError: Another kind of router.
        ConfigError: Numbers of experts, groups and chosen ones contradict each other.
    """

    def __init__(self, base: Any, bias: Tensor | None) -> None:
        super().__init__()
        kind = type(base).__name__
        if kind not in ROUTERS:
            raise UnsupportedModelError(f"{kind} is no router that is covered: {', '.join(ROUTERS)}.")
        self.weight: nn.Parameter = base.weight
        bias = getattr(base, BIAS, bias)
        setattr(self, BIAS, None if bias is None else nn.Parameter(torch.empty_like(bias), requires_grad=False))
        self.routing = ROUTERS[kind](base)
        number, at = len(self.weight), self.routing
        if at.groups < 1 or number % at.groups or not 1 <= at.top_groups <= at.groups:
            raise ConfigError(
                f"{at.groups} groups, of which a token takes {at.top_groups}, do not fit {number} experts: groups must divide them, and no "
                "more than there are can be taken."
            )
        candidates = number // at.groups * at.top_groups
        if not 1 <= at.k <= candidates:
            raise ConfigError(f"a token goes to {at.k} experts and has {candidates} of {number} to choose from.")

        self.watch: Callable[[Tensor], Tensor | None] | None = None
        """Called with the margins of a call's choices; returns experts to use instead; see `naive_route`."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        inputs = RouteInputs(hidden, self.weight, getattr(self, BIAS), **asdict(self.routing))
        return route(inputs) if self.watch is None else naive_route(inputs, self.watch(margins(inputs)))


class Stacked(nn.Module):
    """The matrices of a block's experts: `gate_up`, with interleaved rows, and `down`; see the op.

    Raises:
        UnsupportedModelError: Another activation.
    """

    def __init__(self, base: Any) -> None:
        super().__init__()
        name = getattr(base.act_fn, "__name__", type(base.act_fn).__name__)
        gated = hasattr(base, "gate_up_proj")
        self.activation = ACTIVATIONS.get(name, name)
        if self.activation != ("swiglu" if gated else "relu2"):
            kind = "with" if gated else "without"
            raise UnsupportedModelError(
                f"the experts have the activation {name} {kind} a gate; covered are silu with a gate and relu2 without."
            )
        self.gate_up: nn.Parameter = base.gate_up_proj if gated else base.up_proj
        self.down: nn.Parameter = base.down_proj
        self.rounded: Callable[[Tensor], Tensor] | None = None
        """Applied to all inputs of the matrices, to imitate a runtime's rounding."""

    def forward(self, hidden: Tensor, expert: Tensor, weight: Tensor) -> Tensor:
        return experts(Inputs(hidden, expert, weight, self.gate_up, self.down, self.activation, self.rounded))[0]


class RoutedExperts(nn.Module):
    """A feed-forward block of experts; its other parts (shared experts and their gate, projections) are the family's.

    Args:
        base: The family's block; its submodules are reused, not copied.

    Raises:
        UnsupportedModelError, ConfigError: See `Router` and `Stacked`; or the block has unknown parts.
    """

    specs = (ROUTE, EXPERTS)

    def __init__(self, base: Any) -> None:
        super().__init__()
        children = dict(base.named_children())
        router = "gate" if "gate" in children else "router"
        known = {router, "experts", *SHARED, SHARED_GATE, NARROW, WIDEN}
        if extra := sorted(children.keys() - known) + sorted({router, "experts"} - children.keys()):
            raise UnsupportedModelError(
                f"{type(base).__name__} is no block of experts that is covered: {', '.join(extra)}."
            )
        self.gate, self.experts = (
            Router(children.pop(router), getattr(base, "expert_bias", None)),
            Stacked(children.pop("experts")),
        )
        for name, child in children.items():
            self.add_module(name, child)
        self.shared = next((name for name in SHARED if name in children), None)
        special = {"gate.weight": ROUTER, f"{SHARED_GATE}.weight": GATE}
        self.weight_roles = {
            name: special.get(name, FEED_FORWARD) for name, x in self.named_parameters() if x.dim() > 1
        }

    def forward(self, hidden: Tensor) -> Tensor:
        expert, weight = self.gate(hidden)
        around = hasattr(self, NARROW)
        mixed: Tensor = self.experts(getattr(self, NARROW)(hidden) if around else hidden, expert, weight)
        if around:
            mixed = getattr(self, WIDEN)(mixed)
        if self.shared is None:
            return mixed
        shared_output = getattr(self, self.shared)(hidden)
        return mixed + (
            getattr(self, SHARED_GATE)(hidden).sigmoid() * shared_output
            if hasattr(self, SHARED_GATE)
            else shared_output
        )


def swap_experts(layer: nn.Module, config: Any) -> None:
    """Replace the expert blocks of a family's layer, in place; errors: see RoutedExperts.

    Raises:
        UnsupportedModelError: The configuration names another router than the one of the family's class.
    """
    for name, block in list(layer.named_children()):
        if not hasattr(block, "experts"):
            continue
        made = RoutedExperts(block)
        setattr(layer, name, made)
        score = made.gate.routing.score
        for field in SCORES if score == "sigmoid" else SCORES[:-1]:
            known = "noaux_tc" if field == SCORES[-1] else score
            if (value := getattr(config, field, None)) not in (None, known):
                raise UnsupportedModelError(
                    f"{field}={value!r} in config.json is no router that is covered for "
                    f"{config.model_type.removeprefix('still_')}: {known!r}."
                )
