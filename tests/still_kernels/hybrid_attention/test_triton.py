"""The Triton kernels against the chunked form: in the interpreter here, compiled on a GPU."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest
import torch

from still_kernels.hybrid_attention.meaning.inputs import Inputs
from tests.still_kernels.interpreted import run_cases
from tests.tolerances import NARROW_NORM, REFERENCE

pytest.importorskip("triton")
from tests.still_kernels import interpreter16
from tests.still_kernels.hybrid_attention import triton_cases

SCRIPT = Path(__file__).with_name("triton_cases.py")
interpreted = functools.partial(run_cases, SCRIPT, kind="float32")


FAST = ("crossing", "group max")
"""Cases of the fast run: every kernel, both kinds of heads."""
EVERY_KIND = (
    "promoting",
    "codes, group max",
    "fold oldest",
    "packed, folding",
    "paged from the first token",
    "released decode",
    "relu",
    "tied keys",
)
"""With them every kind of promotion, every way into the state."""


SIZES = tuple(name for name in triton_cases.CASES if name.startswith("head size"))
"""Head sizes that the kernels name; other cases have sizes between them."""

ROWS = ("window_key", "window_value", "salient_key", "salient_value")
EXACT = (*ROWS, *(f"{name}_scale" for name in ROWS), "length")


def check(errors: dict[str, float], dtype: torch.dtype) -> None:
    """States that are copied or counted are exact; the rest is within tolerance."""
    assert {name: error for name, error in errors.items() if name in EXACT and error} == {}
    limit = REFERENCE[dtype]
    assert {name: error for name, error in errors.items() if error > limit} == {}


@pytest.mark.parametrize("name", FAST)
def test_interpreter(name: str) -> None:
    check(interpreted(FAST)[name], torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY_KIND)
def test_interpreter_of_every_kind(name: str) -> None:
    check(interpreted(EVERY_KIND)[name], torch.float32)


WITH_REST = tuple(triton_cases.WITH_REST)
REST_LIMIT, READ_LIMIT = 2 * 2.0**-16, 2.0**-10
"""Of a sum: as many roundings of the rest as a case has promotions. Of an output: what a step reads of S is rounded to bfloat16."""


def check_rest(errors: dict[str, float]) -> None:
    """As of `check`; S with its rest is as near as the rest is fine, which it would be 200 times less without."""
    limits = dict.fromkeys(errors, REFERENCE[torch.float32]) | {"kv_state": REST_LIMIT, "output": READ_LIMIT}
    limits |= {"output norm": READ_LIMIT, **dict.fromkeys(EXACT, 0.0)}
    assert {what: error for what, error in errors.items() if not error <= limits[what]} == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_REST)
def test_interpreter_of_sums_in_bfloat16(name: str) -> None:
    check_rest(interpreted(WITH_REST, kind="rest")[name])


@pytest.mark.gpu
@pytest.mark.parametrize("name", WITH_REST)
def test_compiled_sums_in_bfloat16(name: str) -> None:
    check_rest(triton_cases.run_case(name, "cuda"))


ANY_ORDER = ("promoting", "half of a group", "paged, many rows")


@pytest.mark.slow
@pytest.mark.parametrize("name", ANY_ORDER)
def test_programs_may_run_in_any_order(name: str) -> None:
    """What one program replaces, as the score that a promotion ranks, none that runs later may still need."""
    check(interpreted(ANY_ORDER, kind="shuffled")[name], torch.float32)


NARROW = {
    "bfloat16": ("promoting", "many parts, group", "packed", "released", "wide heads", "codes, fold oldest"),
    "float16": ("promoting", "no salient", "softmax decode", "fold everything"),
}
"""In 16 bits first: both forms of decode, a promotion, packed rows, every kernel."""


def check_narrow(name: str, dtype: str) -> None:
    """Closer than on hardware, whose sums and exponentials differ: a coarse limit would hide a sum in 16 bits."""
    together = next(names for names in (NARROW[dtype], rest_in_16_bits(dtype), LONG) if name in names)
    errors = interpreted(together, kind=dtype)[name]
    limits = dict.fromkeys(EXACT, 0.0)
    limits["output"], limits["output norm"] = REFERENCE[getattr(torch, dtype)] / 2, NARROW_NORM
    limits["window_score"] = REFERENCE[torch.float32]  # fp32, from exact products
    limits |= dict.fromkeys(("kv_state", "z_state"), REFERENCE[torch.bfloat16] / 4)  # operands in bf16 with fp16 too
    assert {what: error for what, error in errors.items() if not error <= limits[what]} == {}


LONG = ("head size 256",)
"""Takes as long as the ten before it in 16 bits."""


def rest_in_16_bits(dtype: str) -> tuple[str, ...]:
    """The cases that `NARROW` leaves out, without the long one."""
    return tuple(name for name in triton_cases.CASES if name not in (*NARROW[dtype], *LONG))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        # float16 differs from bfloat16 in how the interpreter's host rounds: not in the kernels
        pytest.param(dtype, name, marks=[pytest.mark.long] if dtype == "float16" else [])
        for dtype, names in NARROW.items()
        for name in names
    ],
)
def test_interpreter_in_16_bits(dtype: str, name: str) -> None:
    check_narrow(name, dtype)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        *((dtype, name) for dtype in NARROW for name in rest_in_16_bits(dtype)),
        *((dtype, name) for dtype in NARROW for name in LONG),
    ],
)
def test_interpreter_rest_in_16_bits(dtype: str, name: str) -> None:
    """What float32's rest and the cases in 16 bits above do not show together is rounding, which is the same everywhere: for --all."""
    check_narrow(name, dtype)


def test_the_interpreter_rounds_to_bfloat16_and_refuses_to_compute_in_it() -> None:
    values = torch.cat(
        [torch.randn(4096) * 10.0 ** torch.randint(-38, 38, (4096,)), torch.tensor([0.0, 1e-40, 3.4e38])]
    )
    halves = torch.arange(1, 64).to(torch.bfloat16).float() * (1 + 2**-8)  # ties
    for x in (values, -values, halves, torch.tensor([torch.inf, -torch.inf])):
        bits = interpreter16.bfloat16_bits(x.numpy())
        assert bits.tolist() == x.bfloat16().view(torch.uint16).tolist()
        assert interpreter16.widened(bits, interpreter16.tl.bfloat16).tolist() == x.bfloat16().float().tolist()
    one = interpreter16.interpreter.TensorHandle(interpreter16.bfloat16_bits(values.numpy()), interpreter16.tl.bfloat16)
    with pytest.raises(TypeError, match="fadd of 16-bit floats"):
        interpreter16.refusing("fadd", lambda *_: None)(None, one, one)


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    [
        ("garbage",),
        pytest.param(
            ("unused", "promoting", "many parts, group", "released decode", "fold oldest"), marks=pytest.mark.long
        ),
    ],
    ids=lambda what: what[0],
)
def test_what_memory_holds_elsewhere_changes_nothing(what: tuple[str, ...]) -> None:
    """Lengths that make no sense stay within the buffers; slots that nothing was written to may hold NaN."""
    kind, *names = what
    assert run_cases(SCRIPT, tuple(names), kind) == {}


REST = tuple(name for name in triton_cases.CASES if name not in (*FAST, *EVERY_KIND))


OTHERS_SHOW_IT = (
    *(f"head size {size}" for size in (80, 96, 256)),
    "few splits, group",
    "chunk 256",
    "wide blocks",
    "half of a group",
    "group mean",
    "fold decode",
)
"""Of the rest, cases that take long and are each between two others."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in REST if name not in OTHERS_SHOW_IT])
def test_interpreter_rest(name: str) -> None:
    check(interpreted(tuple(name for name in REST if name not in OTHERS_SHOW_IT))[name], torch.float32)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS_SHOW_IT)
def test_interpreter_others_show_it(name: str) -> None:
    check(interpreted(OTHERS_SHOW_IT)[name], torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("name", triton_cases.CASES)
def test_compiled(name: str) -> None:
    check(triton_cases.run_case(name, "cuda"), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["no salient", "all salient"])
def test_low_precision_without_a_choice(name: str, dtype: torch.dtype) -> None:
    """Where nothing is selected near ties cannot flip; the state is compared through the outputs that it makes."""
    assert triton_cases.run_case(name, "cuda", dtype)["output"] <= REFERENCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["promoting", "many parts, group", "packed, folding", "codes, paged", "many features", *SIZES]
)
def test_low_precision_with_a_choice(name: str) -> None:
    """Scores are fp32 sums of exact products: in these cases, as the interpreter shows, no choice is near a tie."""
    errors = triton_cases.run_case(name, "cuda", torch.bfloat16)
    assert {what: error for what, error in errors.items() if what in EXACT and error} == {}
    assert errors["output"] <= REFERENCE[torch.bfloat16]


def llama_layer(tokens: int, **changes: object) -> tuple:
    """A Llama-3.1-8B layer in bf16 on the GPU: (config, inputs of `tokens` tokens)."""
    base = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "capacity_tokens": 2 * tokens}
    config = triton_cases.HybridAttentionConfig(**{**base, **changes})
    shapes = [(1, tokens, heads, 128) for heads in (32, 8, 8, 32)]
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    inputs += [(torch.randn(32, 128, 128, device="cuda") * 128**-0.5).bfloat16() for _ in "qk"]
    return config, triton_cases.Inputs(*inputs, torch.full((1,), tokens, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 127, 128, 129, 193, 4096, 4097])
def test_full_size_repeats_and_agrees(tokens: int) -> None:
    from still_kernels.hybrid_attention.call import hybrid_attention
    from still_kernels.hybrid_attention.meaning.chunked import chunked_hybrid_attention

    torch.manual_seed(tokens)
    config, inputs = llama_layer(tokens)
    empty = triton_cases.HybridAttentionState.empty(config, 1, torch.bfloat16, "cuda")
    runs = [hybrid_attention(inputs, config, empty) for _ in range(2)]
    assert torch.equal(runs[0][0], runs[1][0])
    assert all(torch.equal(a, b) for a, b in zip(*(run[1].tensors().values() for run in runs), strict=True))
    expected, _ = chunked_hybrid_attention(inputs, config, empty)
    got = runs[0][0]
    assert ((got.double() - expected.double()).norm() / expected.double().norm()).item() < 1e-2


def chained_steps(dependent: bool, layers: int, steps: int, device: str, **changes: object) -> list[torch.Tensor]:
    """Outputs and last states of steps through layers, each of which takes the output before it: decode launches and no others.

    On a GPU from a graph: launched one by one, each kernel would have ended before the next arrives.
    """
    from still_kernels.hybrid_attention import launch
    from still_kernels.tile import changed

    base = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "capacity_tokens": 512}
    config = triton_cases.HybridAttentionConfig(**{**base, **changes})
    heads, dim, dtype = config.num_heads, config.head_dim, torch.bfloat16
    table = launch.device_table(config, torch.device(device), wide=False)
    table = changed(table, "decode", {"dependent": dependent, "PDL": int(dependent)})
    generator = torch.Generator().manual_seed(0)
    query, key, value, gate, *weights = (
        torch.randn(shape, generator=generator).to(device, dtype)
        for shape in [(1, steps, n, dim) for n in (heads, config.num_kv_heads, config.num_kv_heads, heads)]
        + [(heads, config.projection_dim, dim)] * 2
    )
    query, key, value, gate = (x.transpose(0, 1).contiguous() for x in (query, key, value, gate))
    states = [triton_cases.HybridAttentionState.empty(config, 1, dtype, device) for _ in range(layers)]
    lengths = [(state.length, torch.zeros_like(state.length)) for state in states]
    one, outputs = torch.ones(1, dtype=torch.int64, device=device), [torch.empty_like(query) for _ in range(layers)]

    def run() -> None:
        for t in range(steps):
            x = query[t : t + 1]
            for layer, output in enumerate(outputs):
                past, present = lengths[layer][t % 2], lengths[layer][1 - t % 2]
                state = dataclasses.replace(states[layer], length=past)
                given = Inputs(x, key[t : t + 1], value[t : t + 1], gate[t : t + 1], *weights, one)
                x = output[t : t + 1]
                launch.launch_hybrid_attention(given, config, state, x, table=table, present_length=present)

    run()
    tensors = [tensor for state in states for tensor in state.tensors().values()]
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        for tensor in tensors:
            tensor.zero_()
        graph.replay()
        torch.cuda.synchronize()
    return outputs + tensors


@pytest.mark.gpu
@pytest.mark.parametrize("scope", ["q_head", "kv_group_max"])
def test_dependent_launches_change_nothing(scope: str) -> None:
    """Each launch reads what the one before wrote, and reuses its workspace and counters: too early would be seen."""
    plain = chained_steps(False, 8, 300, "cuda", select_scope=scope)
    assert plain[7].isfinite().all()
    for _ in range(3):
        early = chained_steps(True, 8, 300, "cuda", select_scope=scope)
        assert all(torch.equal(a, b) for a, b in zip(plain, early, strict=True))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("scope", ["q_head", "kv_group_max"])
def test_long_decode_in_a_graph_equals_prefill(scope: str) -> None:
    """65,536 replayed steps, in place, against one prefill of the same tokens: outputs of the last chunk and S."""
    from still_kernels.hybrid_attention.call import hybrid_attention

    torch.manual_seed(0)
    tokens, tail = 65_536, 64
    config, inputs = llama_layer(tokens, num_heads=4, num_kv_heads=1, select_scope=scope)
    heads = {"query": 4, "key": 1, "value": 1, "gate": 4}
    whole = [getattr(inputs, name)[:, :, :count].contiguous() for name, count in heads.items()]
    weights = [x[:4].contiguous() for x in (inputs.feature_q_weight, inputs.feature_k_weight)]
    empty = triton_cases.HybridAttentionState.empty(config, 1, torch.bfloat16, "cuda")
    expected, wanted = hybrid_attention(Inputs(*whole, *weights, inputs.new_tokens), config, empty)
    state = triton_cases.HybridAttentionState.empty(config, 1, torch.bfloat16, "cuda")
    step, one = [x[:, :1].clone() for x in whole], torch.ones(1, dtype=torch.int64, device="cuda")

    def decode() -> torch.Tensor:
        output, _ = hybrid_attention(Inputs(*step, *weights, one), config, state, in_place=True)
        state.length.add_(1)
        return output

    decode()
    for tensor in state.tensors().values():
        tensor.zero_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = decode()
    outputs = []
    for t in range(tokens):
        for mine, every in zip(step, whole, strict=True):
            mine.copy_(every[:, t : t + 1])
        graph.replay()
        if t >= tokens - tail:
            outputs.append(output.clone())
    got = torch.cat(outputs, dim=1)
    assert state.length.item() == tokens
    torch.testing.assert_close(got, expected[:, -tail:], atol=REFERENCE[torch.bfloat16], rtol=REFERENCE[torch.bfloat16])
    torch.testing.assert_close(state.z_state, wanted.z_state, rtol=1e-3, atol=1e-2)
