"""The core without a GPU: archive, checks, plans and launches against a recording stand-in for the driver."""

from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from still_graphs.spec import CACHE
from still_kernels.hybrid_attention.plan.launches import PLAN
from still_kernels.hybrid_attention.spec import HYBRID_ATTENTION
from still_kernels.plan import ELEMENTS, Call
from tests.plugins.core_abi import (
    Core,
    CoreError,
    CoreOp,
    Recorder,
    Tensor,
    absent_inputs,
    shapes_of,
    tensor_array,
    write_archive,
)

SIZES = {"B": 2, "T": 150, "H": 6, "HK": 3, "HS": 6, "D": 64, "P": 48, "F": 96, "C": 32, "N": 80}
HYBRID = HYBRID_ATTENTION.resolve({})
"""The op as graphs without caches in 8 bits have it."""
ATTRIBUTES: dict[str, int | float | str] = {a.name: a.default for a in HYBRID.attributes if a != CACHE}
ATTRIBUTES.update(chunk_size=32, salient_per_chunk=5, mix_epsilon=1e-5)
ABSENT = absent_inputs(HYBRID, ATTRIBUTES, "window_factor")
TYPES = {"ptr": "p", "i32": "i", "f32": "f"}
ARGUMENTS = {  # orders differ on purpose: the core goes by name
    "score": ["T:i32", "query:ptr", "key:ptr", "score:ptr", "past_length:ptr", "scale:f32", "R:i32"],
    "select": ["flags:ptr", "first_tile:i32", "K:i32", "window_factor:ptr"],
    "features": ["phi_k:ptr", "first_tile:i32", "n_tiles:i32"],
    "scan": ["kv_state:ptr", "prefix_kv:ptr", "prefix_z:ptr", "first_tile:i32", "n_tiles:i32", "W_HEADS:i32"],
    "linear": ["linear:ptr", "linear_sum:ptr", "first_tile:i32", "n_tiles:i32"],
    "attend": ["output:ptr", "salient_key:ptr", "epsilon:f32", "first_tile:i32", "n_tiles:i32"],
    "commit": ["window_key:ptr", "new_tokens:ptr", "H:i32", "HK:i32", "N:i32"],
    "decode": ["counters:ptr", "part_acc:ptr", "output:ptr", "NS:i32", "B:i32", "phantom:i32"],
}
CONSTANTS = {
    "segment_tiles": 4,
    "scan_programs": 3,
    "score_blocks_per_chunk": 2,
    "features_tiles": 3,
    "prefix_every": 2,
    "linear_rows": 64,
    "window_parts": 2,
    "attend_rows": 48,
    "attend_programs": 0,
    "linear_programs": 0,
    "unpack_rows": 0,
    "decode_clusters": 0,
    "scan_tma": 0,
    "value_slices": 2,
    "decode_programs": 60,
    "evicted_rows": 16,
}
KEY = {
    "dtype": "float16",
    "head_dim": 64,
    "chunk_size": 32,
    "feature_rows": 48,
    "feature_map": "np_softmax_pm",
    "gate": 1,
    "select_scope": "q_head",
    "saliency": "margin",
    "overflow": "error",
    "window_factor": 0,
    "cache": "float",
    "count_dtype": "int32",
}


def variant(arch: str = "sm_90", shared_bytes: int = 1000, **key: Any) -> dict[str, Any]:
    kernels = {
        name: {
            "symbol": f"{name}_kernel",
            "threads": 128,
            "num_warps": 4,
            "shared_bytes": shared_bytes,
            "trailing_null_pointers": 2,
            "args": [dict(zip(("name", "type"), argument.split(":"), strict=True)) for argument in arguments],
        }
        for name, arguments in ARGUMENTS.items()
    }
    return {"key": KEY | key, "arch": arch, "constants": CONSTANTS, "kernels": kernels}


def inputs(dtype: str = "float16", absent: set[str] = ABSENT, **sizes: int) -> list[Tensor]:
    return shapes_of(HYBRID, SIZES | sizes, dtype, "int32", absent)


def absent_mask(absent: set[str]) -> int:
    return sum(1 << i for i, name in enumerate(HYBRID.input_names()) if name in absent)


def add(core: Core, folder: Path, *variants: dict[str, Any], **changes: Any) -> None:
    """Give the core an archive of these variants."""
    core.call("still_add_archive", str(write_archive(folder, [*variants] or [variant()], **changes)).encode())


def made(core: Core, **changes: Any) -> CoreOp:
    """The op with other attributes."""
    return core.op("HybridAttention", ATTRIBUTES | changes, absent_mask(ABSENT))


@pytest.fixture
def op(core: Core, recorder: Recorder, tmp_path: Path) -> CoreOp:
    add(core, tmp_path, variant(), variant("sm_86"))
    for name, arguments in ARGUMENTS.items():
        recorder.arguments(f"{name}_kernel", "".join(TYPES[a.split(":")[1]] for a in arguments) + "pp")
    return made(core)


def addresses(op: CoreOp) -> tuple[list[int], list[int]]:
    inputs, outputs = (range(1, len(op.names(side)) + 1) for side in ("input", "output"))
    return [0x1000 * i for i in inputs], [0x100000 * i for i in outputs]


def values(line: dict[str, str], name: str) -> dict[str, float]:
    names = [a.split(":")[0] for a in ARGUMENTS[name]] + ["scratch0", "scratch1"]
    return dict(zip(names, map(float, line["args"].split(",")), strict=True))


def test_names_and_shapes_follow_the_op_spec(op: CoreOp) -> None:
    assert op.names("input") == [n for n in HYBRID.input_names() if n not in ABSENT]
    assert op.names("output") == list(HYBRID.output_names())
    outputs = dict(zip(op.names("output"), op.infer(inputs()), strict=True))
    assert outputs["output"] == ("float16", (2, 150, 6, 64))
    assert outputs["present_window_key"] == ("float16", (2, 3, 64, 64))
    assert outputs["present_z_state"] == ("float32", (2, 6, 96))


def test_shared_feature_weights_are_one_head(op: CoreOp, recorder: Recorder) -> None:
    given = inputs()
    position = op.names("input").index("feature_q_weight")
    for i in (position, position + 1):
        given[i] = ("float16", (1, 48, 64))
    op.prepare(given)
    op.launch(*addresses(op), 0x7000000, 5)
    assert values(recorder.launches()[3][1], "scan")["W_HEADS"] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": ("float16", (2, 150, 3, 65))}, "key: expected [B=2, T=150, HK, D=64], got [2, 150, 3, 65]"),
        ({"key": ("float32", (2, 150, 3, 64))}, "key: expected float16, got float32"),
        ({"past_length": ("int64", (2,))}, "past_length: expected int32, got int64"),
        (
            {"past_window_key": ("float16", (2, 3, 63, 64))},
            "past_window_key: expected [B=2, HK=3, 2*C, D=64], got [2, 3, 63, 64]",
        ),
        ({"past_z_state": ("float32", (2, 6))}, "past_z_state: expected [B=2, H=6, F=96], got [2, 6]"),
        ({"past_salient_key": ("float16", (2, 3, 80, 64))}, "past_salient_value: expected [B=2, HS=3"),
        ({"query": ("float16", (2, 2**40 + 1, 6, 64))}, f"got [2, {2**40 + 1}, 6, 64]; a dimension is out of range"),
        ({"query": ("float16", (2**40, 2**40, 6, 64))}, "has more bytes than 63 bits count"),
        ({"past_length": ("int32", ())}, "past_length: expected [B=2], got []"),
        ({"feature_k_weight": ("float16", (6, 48, 1))}, "feature_k_weight: expected [H=6, P=48, D=64], got [6, 48, 1]"),
        ({"feature_k_weight": ("float16", (1, 48, 64))}, "weights differ in what all heads share"),
    ],
)
def test_refuses_tensors_that_do_not_fit(op: CoreOp, change: dict[str, Tensor], message: str) -> None:
    given = [change.get(name, tensor) for name, tensor in zip(op.names("input"), inputs(), strict=True)]
    with pytest.raises(CoreError) as error:
        op.infer(given)
    assert message in str(error.value)


def test_refuses_more_dimensions_than_it_holds(op: CoreOp) -> None:
    array = tensor_array(inputs())
    array[0].rank = 9
    with pytest.raises(CoreError, match=r"tensor 0: rank 9 is outside 0\.\.8"):
        op.core.call("still_op_infer", op.handle, array, len(array), array, len(op.names("output")))


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda core: made(core, saliency="marginal"),
            'saliency="marginal" is unknown; known: margin, released_prefill',
        ),
        (lambda core: core.op("HybridAttention", {"chunk": 3}), "unknown attribute chunk"),
        (lambda core: core.op("HybridAttention", ATTRIBUTES, 1), "query is not optional"),
        (lambda core: core.op("Foo", {}), r"unknown op Foo; this library has AddRmsNorm, .*, HybridAttention, "),
        (lambda core: made(core, chunk_size=16).infer(inputs()), r"holds 2\*C=64 tokens, chunk_size is 16"),
        (lambda core: made(core, select_scope="kv_group_max").infer(inputs()), "select_scope=kv_group_max needs 3"),
        (lambda core: made(core, local="sliding").infer(inputs()), 'local="sliding" has no kernel'),
        (
            lambda core: core.op("DenseMatMul", {}, absent=0b1111110).infer([("float16", (1, 3, 8))]),
            "DenseMatMul: no input that is given has the size O",
        ),
    ],
)
def test_attributes_and_sizes_that_are_refused(
    call: Callable[[Core], Any], message: str, core: Core, op: CoreOp
) -> None:
    with pytest.raises(CoreError, match=message):
        call(core)


def test_prefill_launches(op: CoreOp, recorder: Recorder) -> None:
    given, (ins, outs) = inputs(), addresses(op)
    op.prepare(given)
    loaded = len(recorder.log("cuModuleLoadData"))
    op.launch(ins, outs, 0x7000000, 5)
    assert len(recorder.log("cuModuleLoadData")) == loaded == 7, "modules load when prepared, never at launch"
    launches = recorder.launches()
    # 150 tokens touch at most 6 chunks of 32; segments of 4
    assert [name for name, _ in launches] == [
        f"{k}_kernel" for k in ("score", "select", *("features", "scan", "linear", "attend") * 2, "commit")
    ]
    assert [fields["grid"] for _, fields in launches] == [
        *("12,3,2", "6,6,2", "2,6,2", "3,6,2", "2,6,2", "3,6,2", "1,6,2", "3,6,2", "1,6,2", "2,6,2", "6,2,1")
    ]
    assert {fields["block"] for _, fields in launches} == {"128,1,1"}
    assert {(fields["shared"], fields["stream"]) for _, fields in launches} == {("1000", "5")}
    score = values(launches[0][1], "score")
    at = dict(zip(op.names("input"), ins, strict=True)) | dict(zip(op.names("output"), outs, strict=True))
    assert (score["query"], score["key"], score["T"], score["R"]) == (at["query"], at["key"], 150, 8)
    assert score["past_length"] == at["past_length"] and score["scale"] == 0.125
    assert (score["scratch0"], score["scratch1"]) == (0, 0)
    assert values(launches[1][1], "select")["window_factor"] == 0, "an absent optional input is null"
    assert [values(f, "scan")["first_tile"] for n, f in launches if n == "scan_kernel"] == [0, 4]
    assert [values(f, "scan")["n_tiles"] for n, f in launches if n == "scan_kernel"] == [4, 2]
    linear = values(launches[4][1], "linear")
    attend = values(launches[5][1], "attend")
    assert attend["salient_key"] == at["present_salient_key"], "kernels work on the present state"
    assert attend["output"] == at["output"] and attend["epsilon"] == pytest.approx(1e-5)
    commit = values(launches[-1][1], "commit")
    assert (commit["H"], commit["HK"], commit["N"]) == (6, 3, 80)
    # regions of the workspace: distinct, 256-aligned, in bounds
    scan = values(launches[3][1], "scan")
    regions = [
        score["score"],
        values(launches[2][1], "features")["phi_k"],
        values(launches[1][1], "select")["flags"],
        scan["prefix_kv"],
        scan["prefix_z"],
        linear["linear"],
        linear["linear_sum"],
    ]
    assert len(set(regions)) == 7 and all(r % 256 == 0 and r >= 0x7000000 for r in regions)
    assert max(regions) < 0x7000000 + op.workspace(given)


def test_decode_is_one_launch_with_its_own_counters(core: Core, op: CoreOp, recorder: Recorder) -> None:
    given = inputs(T=1)
    op.prepare(given)
    assert recorder.log("cuMemAlloc") == ["cuMemAlloc 256"]  # B * 2H int32, rounded up
    assert recorder.log("cuMemsetD8Async") == ["cuMemsetD8Async 0 256"] and recorder.log("cuCtxSynchronize")
    ins, outs = addresses(op)
    op.launch(ins, outs, 0x7000000, 0)
    ((name, fields),) = recorder.launches()
    # 3 splits of 32 slots, 2 slices and 2 parts of the ring and 1 for 1 head
    assert name == "decode_kernel" and fields["grid"] == "8,6,2"
    assert values(fields, "decode")["NS"] == 3
    other = made(core)
    other.prepare(given)
    other.launch(ins, outs, 0x7000000, 0)
    counters = [values(f, "decode")["counters"] for _, f in recorder.launches()]
    assert counters[0] != counters[1] != 0, "two instances may run on two streams"


def test_state_is_copied_only_where_the_buffers_differ(op: CoreOp, recorder: Recorder) -> None:
    op.prepare(inputs(T=1))
    ins, outs = addresses(op)
    op.launch(ins, outs, 0x7000000, 9)
    copies = recorder.log("cuMemcpyDtoDAsync")
    states = [n for n in op.names("output") if n.startswith("present_")]
    assert len(copies) == len(states) == 7
    by_target = {int(line.split()[1]): line.split()[2:] for line in copies}
    at = dict(zip(op.names("output"), outs, strict=True)), dict(zip(op.names("input"), ins, strict=True))
    assert by_target[at[0]["present_kv_state"]] == [str(at[1]["past_kv_state"]), str(2 * 6 * 96 * 64 * 4), "stream=9"]
    recorder.reset()
    op.prepare(inputs(T=1))
    shared = [at[0][n] if n == "output" else at[1][n.replace("present_", "past_")] for n in op.names("output")]
    op.launch(ins, shared, 0x7000000, 9)
    assert not recorder.log("cuMemcpyDtoDAsync") and len(recorder.launches()) == 1


def test_workspace_covers_every_smaller_call(op: CoreOp) -> None:
    bound = op.workspace(inputs(B=4, T=300))
    for batch in (1, 2, 3, 4):
        for tokens in (1, 2, 31, 64, 299, 300):
            given = inputs(B=batch, T=tokens)
            assert op.workspace(given) <= bound
            shapes = dict(zip(op.names("input"), (t[1] for t in given), strict=True))
            call = Call.of(HYBRID_ATTENTION, shapes, {CACHE.name: CACHE.default, **ATTRIBUTES}, "float16", "int32")
            buffers = PLAN.evaluate(replace(call, constants=CONSTANTS)).workspace
            assert sum(-(-prod(b.shape) * ELEMENTS[b.element] // 256) * 256 for b in buffers) <= bound
    assert op.workspace(inputs(B=4, T=1)) < bound


def test_empty_calls_only_hand_the_state_on(op: CoreOp, recorder: Recorder) -> None:
    op.prepare(inputs(T=0))
    op.launch(*addresses(op), 0x7000000, 0)
    assert not recorder.launches() and len(recorder.log("cuMemcpyDtoDAsync")) == 7


def test_picks_the_architecture(core: Core, op: CoreOp, recorder: Recorder) -> None:
    for architecture, cubin in ((90, "sm_90"), (89, "sm_86"), (86, "sm_86")):
        recorder.reset(architecture)
        op.prepare(inputs(T=1))
        assert recorder.log("cuModuleLoadData")[0].startswith(f"cuModuleLoadData {cubin} decode")
    recorder.reset(100)
    with pytest.raises(
        CoreError, match=r"the archive has sm_86, sm_90, the GPU is sm_100\. Compile the archive for sm_100"
    ):
        op.prepare(inputs(T=1))


def test_says_which_choice_has_no_kernel(core: Core, op: CoreOp) -> None:
    with pytest.raises(CoreError, match="no kernel for head_dim=96, the archive has 64"):
        op.prepare(inputs(D=96))
    with pytest.raises(CoreError, match="no kernel for dtype=bfloat16, the archive has float16"):
        op.prepare(inputs("bfloat16"))
    core.call("still_clear_archive")
    with pytest.raises(CoreError, match="built without kernels"):
        op.prepare(inputs())


def test_large_shared_memory_is_asked_for(core: Core, recorder: Recorder, tmp_path: Path) -> None:
    add(core, tmp_path, variant(shared_bytes=100_000))
    op = made(core)
    op.prepare(inputs(T=1))
    assert recorder.log("cuFuncSetAttribute") == ["cuFuncSetAttribute decode_kernel 8=100000"]
    recorder.reset()
    recorder.fail("cuFuncSetAttribute", 1)
    with pytest.raises(CoreError, match="kernel decode needs 100000 bytes of shared memory"):
        op.prepare(inputs(T=1))


def test_clusters_are_whole(core: Core, recorder: Recorder, tmp_path: Path) -> None:
    """The cubin says how many blocks are a cluster; a grid that is no multiple is a mistake of the plan or of the index."""
    for blocks in (4, 5):
        core.call("still_clear_archive")
        entry = variant()
        entry["kernels"]["decode"]["cluster"] = blocks
        add(core, tmp_path / str(blocks), entry)
        op = made(core)
        if blocks == 4:
            op.prepare(inputs(T=1))
            continue
        with pytest.raises(CoreError, match="kernel decode has clusters of 5 blocks, of which 8 are no multiple"):
            op.prepare(inputs(T=1))


@pytest.mark.parametrize("blocks", [0, 16])
def test_damaged_clusters_are_refused(blocks: int, core: Core, tmp_path: Path) -> None:
    entry = variant()
    entry["kernels"]["decode"]["cluster"] = blocks
    with pytest.raises(CoreError, match=rf"cluster={blocks} is outside 1\.\.8"):
        add(core, tmp_path, entry)


def test_driver_failures_are_named(core: Core, op: CoreOp, recorder: Recorder) -> None:
    recorder.fail("cuMemAlloc", 2)
    with pytest.raises(CoreError, match="cuMemAlloc failed with 2 \\(CUDA_ERROR_OUT_OF_MEMORY: stand-in\\)"):
        op.prepare(inputs(T=1))
    recorder.reset()
    recorder.fail("cuModuleLoadData", 200)
    with pytest.raises(
        CoreError,
        match=r"the CUDA driver does not take the kernel decode \(error 200\): .* Update the driver",
    ):
        op.prepare(inputs(T=1))
    recorder.reset()
    op.prepare(inputs(T=1))
    recorder.fail("cuLaunchKernel", 700)
    with pytest.raises(CoreError, match="cuLaunchKernel of decode failed with 700"):
        op.launch(*addresses(op), 0x7000000, 0)


def test_a_machine_without_a_driver_says_so(core: Core, op: CoreOp) -> None:
    core.call("still_set_driver", b"libcuda_that_is_not_there.so.1")
    assert op.infer(inputs()) and op.workspace(inputs()), "shapes and workspace need no GPU"
    with pytest.raises(
        CoreError, match=r"cannot open libcuda_that_is_not_there.so.1: .* need an NVIDIA GPU and its driver"
    ):
        op.prepare(inputs())


def test_launch_needs_preparation_and_workspace(op: CoreOp) -> None:
    ins, outs = addresses(op)
    with pytest.raises(CoreError, match="launched before it was prepared"):
        op.launch(ins, outs, 0, 0)
    op.prepare(inputs())
    with pytest.raises(CoreError, match=r"needs \d+ bytes of workspace, got none"):
        op.launch(ins, outs, 0, 0)


@pytest.mark.parametrize("size", [0, 5, 20, 300, -1])
def test_damaged_archives_are_refused(core: Core, tmp_path: Path, size: int) -> None:
    whole = write_archive(tmp_path / "whole", [variant()]).read_bytes()
    damaged = tmp_path / "damaged.bin"
    damaged.write_bytes(whole[:size])
    with pytest.raises(CoreError, match=r"truncated|not an archive"):
        core.call("still_add_archive", str(damaged).encode())
    assert core.library.still_variant_count() == 0


def test_other_versions_are_refused(core: Core, tmp_path: Path) -> None:
    with pytest.raises(CoreError, match="still-kernels-aot version 1; this library reads still-kernels-aot version 3"):
        add(core, tmp_path / "older", version=1)
    with pytest.raises(CoreError, match="kernels of HybridAttention version 2; this library has version 1"):
        add(core, tmp_path / "other", op_version=2)
    unknown = variant()
    unknown["kernels"]["decode"]["args"].append({"name": "novel", "type": "i32"})
    add(core, tmp_path / "unknown", unknown)
    with pytest.raises(CoreError, match=r"kernel decode takes novel, which the launch plan does not pass"):
        made(core).prepare(inputs(T=1))
    with pytest.raises(CoreError, match=r"missing\.bin: cannot be opened"):
        core.call("still_add_archive", str(tmp_path / "missing.bin").encode())


DESCRIPTOR = {"name": "query", "type": "descriptor", "element": "fp16", "box": [64, 64], "swizzle": 3}


def test_a_matrix_goes_to_the_kernel_by_descriptor(core: Core, recorder: Recorder, tmp_path: Path) -> None:
    """Five parameters, made of the address of each launch; a tensor without rows has none."""
    cache = {**DESCRIPTOR, "name": "cached_key", "box": [128, 64]}
    entry = variant()
    entry["kernels"]["attend"]["args"] = [cache, DESCRIPTOR, {"name": "H", "type": "i32"}]
    add(core, tmp_path, entry)
    recorder.arguments("attend_kernel", "diilldiillipp")
    op = made(core)
    for slots, address in ((80, 0x1000), (0, 0x777000)):
        recorder.reset()
        op.prepare(inputs(N=slots))
        given, outputs = addresses(op)
        given[op.names("input").index("query")] = address
        op.launch(given, outputs, 0x7000000, 0)
        kept = outputs[op.names("output").index("present_salient_key")]
        rows = 2 * 6 * slots
        fields = next(fields for name, fields in recorder.launches() if name == "attend_kernel")["args"].split(",")
        encoded = f"6/{kept}/64/{rows}/128/64/128/3" if slots else "/".join("0" * 8)
        assert fields[:5] == [encoded, str(rows), "64", "64", "1"]
        assert fields[5:11] == [f"6/{address}/384/300/768/64/64/3", "300", "384", "384", "1", "6"]
        assert set(recorder.log("cuTensorMapEncodeTiled")) == {"cuTensorMapEncodeTiled "}
    recorder.fail("cuTensorMapEncodeTiled", 1)
    with pytest.raises(CoreError, match="cuTensorMapEncodeTiled for attend failed with 1"):
        op.launch(given, outputs, 0x7000000, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "score"}, "takes the descriptor score, of which the launch plan has no matrix"),
        ({"name": "novel"}, "takes novel, which the launch plan does not pass"),
        ({"name": "T"}, "takes T as descriptor; the launch plan passes something else"),
        ({"element": "fp8"}, "query has elements of the unknown type fp8"),
        ({"box": [64]}, "query has no two dimensions"),
        ({"box": [64, 512]}, "query has blocks of 512 rows or columns"),
        ({"swizzle": 4}, "swizzle=4 is outside 0..3"),
    ],
)
def test_descriptors_that_are_refused(changes: dict[str, Any], message: str, core: Core, tmp_path: Path) -> None:
    entry = variant()
    entry["kernels"]["attend"]["args"] = [DESCRIPTOR | changes]
    with pytest.raises(CoreError, match=message):
        add(core, tmp_path, entry)
        made(core).prepare(inputs())
