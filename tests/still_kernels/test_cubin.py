"""What a cubin says of its kernel's arguments is what the launch plan is held to: cubins made here, tampered with, and compiled ones."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from still_graphs.errors import ConfigError
from still_kernels import aot
from still_kernels.common.cubin import DESCRIPTOR, Entry, read_entry, trailing_pointers
from still_kernels.registry import kernels_of
from tests.cubins import cubin, info

TYPES = ("ptr", "i32", "f32", "descriptor", "ptr")
PASSED = (8, 4, 4, *DESCRIPTOR, 8)


def pointers(
    sizes: Sequence[int], types: Sequence[str] = TYPES, cluster: tuple[int, int, int] | None = None, asked: int = 1
) -> int:
    return trailing_pointers(read_entry(cubin(info(sizes, cluster)), "copy_kernel"), "copy_kernel", types, asked)


def test_arguments_in_order_and_what_is_left_are_pointers() -> None:
    assert read_entry(cubin(info(PASSED)), "copy_kernel") == Entry(PASSED)
    assert [pointers((*PASSED, *[8] * count)) for count in (0, 1, 2, 3)] == [0, 1, 2, 3]
    assert pointers((*PASSED, 8), cluster=(8, 1, 1), asked=8) == 1


@pytest.mark.parametrize(
    "sizes",
    [
        PASSED[:-1],  # one fewer
        (*PASSED, 4),  # a number behind them
        (*PASSED, 8, 4, 8),
        (4, *PASSED[1:]),  # a pointer of another width
        (8, 8, *PASSED[2:]),
        (8, *PASSED),  # one more in front
        (8, 4, 4, 128, 8, 8, 8, 8, 8),  # a descriptor's sizes in 64 bits
    ],
    ids=str,
)
def test_other_arguments_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"copy_kernel takes arguments of .* Triton"):
        pointers(sizes)


@pytest.mark.parametrize(("cluster", "asked"), [((8, 1, 1), 1), (None, 8), ((4, 1, 1), 8), ((4, 2, 1), 4)])
def test_other_clusters_are_refused(cluster: tuple[int, int, int] | None, asked: int) -> None:
    with pytest.raises(ConfigError, match="is of a cluster"):
        pointers(PASSED, cluster=cluster, asked=asked)


def test_a_damaged_cubin_is_refused() -> None:
    whole = cubin(info(PASSED))
    for wrong in (
        b"",
        b"no code",
        whole[:63],
        whole[: len(whole) // 2],
        whole[:-70],
        whole.replace(b".nv.info", b".nv.none"),
    ):
        with pytest.raises(ConfigError, match="copy_kernel"):
            read_entry(wrong, "copy_kernel")
    with pytest.raises(ConfigError, match="other_kernel"):
        read_entry(whole, "other_kernel")
    overlap = info(PASSED).replace(b"\x0c\0" + bytes(8), b"\x0c\0" + struct.pack("<IHH", 0, 0, 40))
    missing = info(PASSED)[16 * (len(PASSED) - 3) :]  # of the last arguments nothing is said, which the plan then finds
    assert read_entry(cubin(missing), "copy_kernel").sizes == PASSED[:3]
    for wrong in (overlap, info(PASSED)[: 16 * 3]):  # of the last arguments alone
        with pytest.raises(ConfigError, match="how large"):
            read_entry(cubin(wrong), "copy_kernel")


@pytest.mark.parametrize(
    "asked",
    [{"global_scratch_size": 128}, {"profile_scratch_size": 8}, {"num_ctas": 2}, {"launch_cooperative_grid": True}],
    ids=str,
)
def test_launches_that_hosts_do_not_do_are_refused(asked: dict[str, int]) -> None:
    plain = {"global_scratch_size": 0, "profile_scratch_size": 0, "num_ctas": 1, "launch_cooperative_grid": False}
    aot.demand_launchable("copy", SimpleNamespace(**plain))
    with pytest.raises(ConfigError, match="copy"):
        aot.demand_launchable("copy", SimpleNamespace(**{**plain, **asked}))


@pytest.mark.slow
def test_compiled_kernels_say_what_the_index_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this Triton; one argument more in the binary ends the export, where the driver would read past what a host gives."""
    pytest.importorskip("triton")
    variant = kernels_of("GreedyToken").default_variants()[0]
    archs = [aot.parse_arch(arch) for arch in aot.ARCHS]
    for arch in archs:
        entry, cubins = aot.compile_variant("GreedyToken", variant, arch)
        (kernel,) = entry["kernels"].values()
        types = [argument["type"] for argument in kernel["args"]]
        read = read_entry(cubins[kernel["cubin"]], kernel["symbol"])
        assert trailing_pointers(read, kernel["symbol"], types) == kernel["trailing_null_pointers"] >= 0
    monkeypatch.setattr(aot, "read_entry", lambda cubin, symbol: Entry((*read.sizes, 4)))
    with pytest.raises(ConfigError, match="takes arguments of"):
        aot.compile_variant("GreedyToken", variant, 90)
