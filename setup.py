"""What pyproject.toml has no words for: the C++ sources travel as package data, in a folder of another name.

`plugins` would be a generic name on the import path, so a wheel installs the folder as `still_plugins`, beside still_export, which
finds it there (`still_export/targets/trt/plugins.py`). Compiled kernels are the distribution still-export-kernels
(distributions/kernels). Everything else is in pyproject.toml.
"""

from setuptools import find_packages, setup

ROOTS = {"still_export": ".", "still_kernels": "kernels", "still_graphs": "graphs"}

setup(
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
            "texts/everyday.jsonl",
        ],
    },
    include_package_data=False,
)
