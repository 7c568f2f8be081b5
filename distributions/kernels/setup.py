"""Builds the library of the clone that this folder lies in, and puts it into a wheel for one kind of machine.

    pip wheel --no-deps distributions/kernels                                                   # for this machine
    pip wheel --no-deps distributions/kernels -C--build-option=--plat-name=linux_aarch64        # by a cross compiler

The wheel is tagged with glibc 2.28, or the oldest later one that has all symbols which the library needs.
Everything else is in pyproject.toml.
"""

import json
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "graphs"), str(ROOT / "kernels")]

from still_export.targets.ort.library import CPUS, LIBRARY, build_library, describe_build, this_cpu  # noqa: E402
from still_export.targets.trt.plugins import oldest_glibc  # noqa: E402
from still_export.version import __version__  # noqa: E402

MODULE = "still_export_kernels"
GLIBC = 28
"""Minor version of the oldest glibc that a wheel is offered for; ONNX Runtime's own wheels need 2.27 or 2.28."""


class Wheel(bdist_wheel):
    """Adds the library, and names the machines that load it."""

    def run(self) -> None:
        cpu = next((cpu for cpu in CPUS if self.plat_name and self.plat_name.endswith(f"_{cpu}")), this_cpu())
        library = build_library(cpu)
        self.plat_name, self.plat_name_supplied = f"manylinux_2_{max(GLIBC, oldest_glibc(library))}_{cpu}", True
        self.distribution.has_ext_modules = lambda: True  # its files belong where compiled ones do
        self.root_is_pure = False
        build = self.get_finalized_command("build")
        place = Path(build.build_lib, MODULE)
        place.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(library, place / LIBRARY)
        (place / "build.json").write_text(json.dumps(describe_build(library, cpu), indent=1) + "\n", encoding="utf-8")
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"bdist_wheel": Wheel}, version=__version__, packages=[MODULE])
