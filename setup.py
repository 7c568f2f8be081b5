"""What pyproject.toml has no words for: the C++ sources travel as package data, in a folder of another name, and compiled beside them.

`plugins` would be a generic name on the import path, so a wheel installs the folder as `still_plugins`, beside still_export, which
finds it there (`still_export/targets/trt/plugins.py`). Where cmake and a C++ compiler are, a wheel carries the library of kernels
for ONNX Runtime on CPUs too, and is one for that kind of machine; elsewhere it is one for all. `--plat-name linux_aarch64` (`pip wheel .
-C--build-option=--plat-name=linux_aarch64`) makes the wheel of that machine by a cross compiler. Everything else is in pyproject.toml.
"""

import re
import shutil
import sys
from pathlib import Path
from typing import ClassVar

from setuptools import find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
ROOTS = {"still_export": ".", "still_kernels": "kernels", "still_graphs": "graphs"}
sys.path[:0] = [str(ROOT), str(ROOT / "graphs")]

from still_export.errors import StillExportError  # noqa: E402
from still_export.targets.ort.library import CPUS, LIBRARY, PREBUILT, build_library, this_cpu  # noqa: E402


class Wheel(bdist_wheel):
    """Adds the library of kernels, and names the machines that load it."""

    library: Path | None = None

    def run(self) -> None:
        asked = [cpu for cpu in CPUS if self.plat_name and self.plat_name.endswith(f"linux_{cpu}")]
        cpu = asked[0] if asked else this_cpu()
        try:
            self.library = build_library(cpu)
        except StillExportError as error:
            if asked:
                raise
            print(f"without kernels for CPUs: {error}", file=sys.stderr)
        if self.library:
            tag = f"manylinux_2_{oldest_glibc(self.library)}_{cpu}"
            self.plat_name, self.plat_name_supplied = tag, True
            self.distribution.has_ext_modules = lambda: True  # its files belong where compiled ones do
            self.root_is_pure = False
            build = self.get_finalized_command("build_py")
            assert isinstance(build, Sources)
            build.compiled.update({f"still_plugins/{PREBUILT}/{cpu}/{LIBRARY}": self.library})
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        platform = super().get_tag()[2] if self.library else "any"
        return "py3", "none", platform


class Sources(build_py):
    """Copies what was compiled, too."""

    compiled: ClassVar[dict[str, Path]] = {}

    def run(self) -> None:
        super().run()
        for name, path in self.compiled.items():
            target = Path(self.build_lib, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def oldest_glibc(library: Path) -> int:
    """The minor version of the oldest glibc 2 that has all symbols which the library asks for."""
    return max(int(minor) for minor in re.findall(rb"\0GLIBC_2\.(\d+)", library.read_bytes()))


setup(
    cmdclass={"bdist_wheel": Wheel, "build_py": Sources},
    packages=[p for name, root in ROOTS.items() for p in find_packages(root, include=[name, f"{name}.*"])]
    + ["still_plugins"],
    package_dir={**{name: f"{root}/{name}" for name, root in ROOTS.items()}, "still_plugins": "plugins"},
    package_data={
        "still_plugins": ["**/*"],
        "still_kernels": ["**/*.cu", "*/cpu/*"],
        "still_export": [
            "package/manifest.schema.json",
            "report/page.html",
            "serving/page/*",
            "linearization/recipes/*.yaml",
            "systems/*/*.yaml",
            "texts/words.json",
        ],
    },
    include_package_data=False,
)
