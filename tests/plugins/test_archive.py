"""A real archive, compiled without a GPU, packed, and loaded by the core for the GPUs it was compiled for."""

from __future__ import annotations

from pathlib import Path

import pytest

from still_export.targets.trt.plugins import PluginBuildError, pack_archive
from tests.plugins.core_abi import Core, CoreError, Recorder, shapes_of
from tests.plugins.test_core import ABSENT, HYBRID, absent_mask

aot = pytest.importorskip("still_kernels.aot")
cuda_function = pytest.importorskip("still_kernels.common.cuda_function")
variants = pytest.importorskip("still_kernels.hybrid_attention.plan")
SIZES = {"B": 2, "T": 300, "H": 6, "HK": 3, "HS": 6, "D": 64, "P": 64, "F": 128, "C": 64, "N": 40}


@pytest.mark.slow
def test_the_core_loads_what_was_compiled(core: Core, recorder: Recorder, tmp_path: Path) -> None:
    variant = variants.Variant(dtype="float16", head_dim=64, feature_rows=64, count_dtype="int32")
    index = aot.write_archive(tmp_path / "aot", [87, 90], "HybridAttention", [variant])
    core.call("still_add_archive", str(pack_archive([tmp_path / "aot"], tmp_path / "kernels.bin")).encode())
    assert core.library.still_variant_count() == 2
    op = core.op("HybridAttention", {}, absent_mask(ABSENT))
    for entry, architecture in zip(index["variants"], (87, 90), strict=True):
        recorder.reset(architecture)
        for rows, tokens in ((2, 300), (2, 1), (12, 1), (32, 1)):  # as many rows as take clusters of 8, 2 and 1
            op.prepare(shapes_of(HYBRID, {**SIZES, "B": rows, "T": tokens}, "float16", "int32", ABSENT))
        loaded = [line.split()[1] for line in recorder.log("cuModuleGetFunction")]
        clusters = entry["constants"]["decode_clusters"]
        assert clusters == (architecture == 90 and cuda_function.can_compile())
        used = [kernel for name, kernel in entry["kernels"].items() if not clusters or name != "decode"]
        assert sorted(loaded) == sorted(kernel["symbol"] for kernel in used)
        large = {kernel["symbol"] for kernel in used if kernel["shared_bytes"] > 48 << 10}
        assert {line.split()[1] for line in recorder.log("cuFuncSetAttribute")} == large
    recorder.reset(80)
    with pytest.raises(CoreError, match="the archive has sm_87, sm_90, the GPU is sm_80"):
        op.prepare(shapes_of(HYBRID, SIZES, "float16", "int32", ABSENT))


def test_packing_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(PluginBuildError, match=r"index\.json: missing"):
        pack_archive([tmp_path], tmp_path / "kernels.bin")
    kernels = '{"decode": {"cubin": "gone.cubin"}}'
    (tmp_path / "index.json").write_text(f'{{"variants": [{{"kernels": {kernels}}}]}}')
    with pytest.raises(PluginBuildError, match=r"gone\.cubin: missing, but .* names it"):
        pack_archive([tmp_path], tmp_path / "kernels.bin")
