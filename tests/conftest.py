"""Tests that need hardware are skipped, and say so, where it is absent."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections import Counter
from pathlib import Path

import pytest
import torch

from still_export.graph.garbage import RARELY
from still_export.targets.ort.headers import CACHE_VARIABLE
from still_export.targets.ort.library import BUILD_VARIABLE, cached_library, keep_library, this_cpu
from tests.plugins import builds

LONGEST = (
    "still_kernels/test_triton.py",
    "still_export/runtime/test_heads.py",
    "still_kernels/test_aot.py",
    "still_export/cli/test_cli.py",
    "still_export/proof/test_trt_verify.py",
    "still_export/linearization/test_linearize.py",
    "still_export/models/test_linear_families.py",
    "still_export/targets/test_lower.py",
    "still_export/linearization/test_mixers.py",
    "still_export/targets/trt/test_trt_families.py",
    "still_export/targets/ort/test_native.py",
    "still_export/serving/test_scheduler.py",
    "still_kernels/test_attend.py",
    "still_kernels/block_attention/test_triton.py",
    "still_export/runtime/test_trt_speculation.py",
    "still_export/targets/genai/test_genai_package.py",
    "still_export/targets/portable/test_export.py",
    "still_export/runtime/test_speculation.py",
    "still_export/targets/portable/test_linear_export.py",
    "docs/test_commands.py",
    "still_export/graph/quantization/test_quantization.py",
    "toy/test_toy_op.py",
    "still_kernels/attention/test_aot.py",
    "still_kernels/test_descriptors.py",
    "tools/test_benchmarks.py",
    "still_export/evaluation/test_small_model.py",
    "still_export/runtime/test_ort_runner.py",
    "faults/test_faults.py",
    "still_export/targets/trt/test_build.py",
    "still_export/graph/quantization/test_dequantized.py",
    "still_export/linearization/test_fused_losses.py",
    "plugins/test_onnxruntime.py",
    "still_kernels/experts/test_experts.py",
    "still_kernels/test_parallel.py",
    "still_export/test_auto_classes.py",
    "docs/test_examples.py",
    "still_graphs/test_functions.py",
    "attack/test_attack.py",
    "still_export/graph/quantization/test_exact_blocks.py",
    "still_export/evaluation/test_prove.py",
    "still_export/mixers/test_static_cache.py",
    "plugins/test_archive.py",
    "still_export/targets/web/test_web_package.py",
    "still_export/graph/quantization/test_float8.py",
    "still_export/models/test_models.py",
    "still_export/models/test_vision.py",
    "still_export/mixers/test_cache.py",
    "still_export/graph/test_fuse.py",
    "docs/test_own_program.py",
    "still_kernels/test_launch.py",
    "still_export/serving/test_guesses.py",
    "still_kernels/test_hybrid_attention.py",
    "still_kernels/test_tune.py",
    "still_export/models/test_quantized.py",
    "still_kernels/test_narrow.py",
    "still_export/runtime/test_prefixes.py",
    "still_export/graph/test_repeat.py",
    "still_export/package/test_trust.py",
    "still_export/evaluation/test_synthetic.py",
    "still_kernels/test_lane_sums.py",
    "still_kernels/test_linear.py",
    "plugins/test_block_attention.py",
    "plugins/test_manifest.py",
)
"""Files of more than a quarter of a minute of a processor, by how long they take; behind them those with the most slow tests."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` without a CUDA device, `tensorrt` without that and the library; the files that take longest come first.

    Tests that run side by side are given out by file: a file of minutes that came last would run alone.
    """
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    first = {Path(__file__).parent / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (first.get(item.path, len(first)), -slow[item.path]))
    cuda = torch.cuda.is_available()
    # TensorRT 8.6 has a Python of its own (tests/gpu/conftest.py).
    tensorrt = cuda and bool(os.environ.get("STILL_TENSORRT_ENV") or importlib.util.find_spec("tensorrt"))
    for item in items:
        if item.get_closest_marker("gpu") and not cuda:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("tensorrt") and not tensorrt:
            item.add_marker(pytest.mark.skip(reason="needs TensorRT and a CUDA device"))


def pytest_collection_finish() -> None:
    """What was imported, a million objects, stays: looking through it for garbage again and again was a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*RARELY)


@pytest.fixture(scope="session", autouse=True)
def own_configuration(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests write no list of trusted files into the home of who runs them, and take no kernels from there."""
    os.environ["XDG_CONFIG_HOME"] = str(tmp_path_factory.mktemp("configuration"))
    os.environ[CACHE_VARIABLE] = str(tmp_path_factory.mktemp("cache"))
    os.environ[BUILD_VARIABLE] = "0"  # minutes in each process of tests


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """libstill_onnxruntime.so with the toy op and without kernels of the GPU; or that of test_sanitized.py."""
    if built := os.environ.get("STILL_TEST_LIBRARY"):
        return built
    builds.demand_headers()
    return str(builds.optimized("still_onnxruntime", "onnxruntime/*.so", tmp_path_factory.mktemp("native")))


@pytest.fixture(scope="session")
def kernels_cache(library: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which the library was built."""
    before, folder = os.environ[CACHE_VARIABLE], tmp_path_factory.mktemp("kernels")
    os.environ[CACHE_VARIABLE] = str(folder)
    path = cached_library(this_cpu())
    os.environ[CACHE_VARIABLE] = before
    keep_library(Path(library), path)
    return folder
