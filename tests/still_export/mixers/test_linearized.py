"""Where GLA and Gated DeltaNet start: a teacher that is such a layer is found again, part by part."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from still_export.linearization.objectives import make_students
from still_export.mixers.config import StillConfig
from still_export.mixers.layers import FULL
from still_export.mixers.linearized.fitted import MEMORIES, STEPS, Ridge
from still_export.mixers.linearized.module import gate_bias, step_bias
from still_export.models import attach_untrained
from tests.still_export.tiny import plain_model

TOKENS = 900


def layer_of(mixer: str, lora: bool = False) -> Any:
    """A fresh layer in its form that trains, the middle one of a model."""
    types = (FULL, f"linearized_{mixer}", FULL)
    model = attach_untrained(plain_model("llama"), StillConfig(layer_types=types))
    (layer,) = make_students(model)
    if lora:
        get_peft_model(model, LoraConfig(r=4, target_modules=["o_proj"], layers_to_transform=[1]))
    return layer


def inputs() -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Hidden states of two rows whose first channel is constant, as trained models have such, and positions."""
    random = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, TOKENS, 24, generator=random, dtype=torch.float64)
    hidden[..., 0] = 2.0
    angle = torch.arange(TOKENS, dtype=torch.float64)[:, None] * torch.logspace(0, -3, 5, dtype=torch.float64)
    angle = torch.cat((angle, angle), dim=-1)[None]
    return hidden, (angle.cos(), angle.sin())


@torch.no_grad()
def heads_of(layer: Any, hidden: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
    projected, weights = layer._own_outputs(hidden)
    return layer.gated(layer.mixed(hidden, projected, weights, positions, None), projected, weights)


@torch.no_grad()
def error(layer: Any, target: Tensor, hidden: Tensor, positions: tuple[Tensor, Tensor]) -> float:
    return float((heads_of(layer, hidden, positions) - target).square().sum() / target.square().sum())


@torch.no_grad()
def test_memories_and_steps_of_a_teacher_that_forgets() -> None:
    """A teacher whose heads are the rule itself with decays of 1 to 1,024 tokens is found again to the last digits."""
    teacher, student, (hidden, positions) = layer_of("gdn"), layer_of("gdn"), inputs()
    memories = torch.tensor([MEMORIES[n] for n in (0, 2, 4, 6, 8, 10)], dtype=torch.float64)
    steps = torch.tensor([STEPS[n] for n in (0, 1, 2, 3, 4, 0)], dtype=torch.float64)
    teacher.dt_bias.copy_(step_bias(memories))
    teacher.b_proj.weight[:, 0] = steps.logit() / 2.0
    teacher.output_scale.copy_(torch.linspace(0.5, 2.0, 60, dtype=torch.float64).view(6, 10))
    target = heads_of(teacher, hidden, positions)
    assert error(student, target, hidden, positions) > 0.1
    student.fit_to(target, hidden, positions)
    torch.testing.assert_close(student.dt_bias, teacher.dt_bias)
    written = student.b_proj(hidden).sigmoid()
    torch.testing.assert_close(written, steps.expand_as(written), rtol=0, atol=2e-3)
    torch.testing.assert_close(student.output_scale, teacher.output_scale, rtol=2e-3, atol=2e-3)
    assert error(student, target, hidden, positions) < 1e-4


@torch.no_grad()
def test_memories_of_channels_that_are_shorter() -> None:
    teacher, student, (hidden, positions) = layer_of("gla"), layer_of("gla"), inputs()
    factors = torch.tensor([1 / 64, 1 / 16, 1 / 4, 1.0, 4.0, 1.0], dtype=torch.float64)
    teacher.gk_proj[1].bias.copy_(gate_bias(10, factors).flatten())
    target = heads_of(teacher, hidden, positions)
    student.fit_to(target, hidden, positions)
    torch.testing.assert_close(student.gk_proj[1].bias, teacher.gk_proj[1].bias)
    assert error(student, target, hidden, positions) < 1e-8


@pytest.mark.parametrize("mixer", ["gla", "gdn"])
@torch.no_grad()
def test_gates_of_a_teacher_that_opens_and_closes_them(mixer: str) -> None:
    teacher, student, (hidden, positions) = layer_of(mixer), layer_of(mixer), inputs()
    weight = torch.randn(60, 24, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    teacher.z_proj.weight.copy_(0.05 * weight)
    if mixer == "gdn":
        teacher.dt_bias.copy_(step_bias(torch.full((6,), 16.0, dtype=torch.float64)))
    target = heads_of(teacher, hidden, positions)
    plain = layer_of(mixer)
    plain.load_state_dict({**teacher.state_dict(), "z_proj.weight": torch.zeros_like(weight)})
    without = error(plain, target, hidden, positions)
    student.fit_to(target, hidden, positions)
    assert error(student, target, hidden, positions) < 0.2 * without


@torch.no_grad()
def test_a_small_step_keeps_a_start_that_explains_little() -> None:
    """Outputs that only a gate of both signs explains, and noise: gates of scales near 0 are bounded."""
    student, (hidden, positions) = layer_of("gdn"), inputs()
    noise = torch.randn(2, TOKENS, 6, 10, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    target = 0.1 * noise + heads_of(student, hidden, positions) * hidden[..., 1:2, None]
    student.fit_to(target, hidden, positions)
    before = error(student, target, hidden, positions)
    student.output_scale += 0.01
    assert error(student, target, hidden, positions) < before + 0.1


@torch.no_grad()
def test_values_that_another_projection_mixes() -> None:
    """What no scale or gate can be, LoRA of the last projection is, as far as its rank goes; other targets leave it alone."""
    layer, (hidden, positions) = layer_of("gdn", lora=True), inputs()
    heads = heads_of(layer, hidden, positions).flatten(2)
    random = torch.Generator().manual_seed(5)
    left, right = (torch.randn(60, 4, generator=random, dtype=torch.float64) / 60**0.5 for _ in range(2))
    mixed = heads + heads @ left @ right.T
    count = TOKENS * 3 // 2
    before = layer.o_proj(heads) - layer.o_proj.base_layer(mixed)
    layer._fit_output(heads.flatten(0, 1), mixed.flatten(0, 1), count)
    after = layer.o_proj(heads) - layer.o_proj.base_layer(mixed)
    assert after.square().sum() < 1e-3 * before.square().sum()
    other = layer_of("gdn", lora=True)
    noise = heads + torch.randn(heads.shape, generator=random, dtype=torch.float64)
    other._fit_output(heads.flatten(0, 1), noise.flatten(0, 1), count)
    assert not other.o_proj.lora_B["default"].weight.any()


def test_ridge_is_least_squares_with_a_penalty() -> None:
    random = torch.Generator().manual_seed(6)
    x, y = (torch.randn(40, n, generator=random, dtype=torch.float64) for n in (7, 3))
    found = Ridge(x).solve(x.T @ y, 0.1)
    penalty = 0.1 * (x.square().sum() / 7)
    expected = torch.linalg.solve(x.T @ x + penalty * torch.eye(7, dtype=torch.float64), x.T @ y)
    torch.testing.assert_close(found, expected)
