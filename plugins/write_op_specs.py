#!/usr/bin/env python3
"""Writes the OpSpecs of all ops as a C++ source; CMake runs it. C++ and Python thus share one source of names and shapes.

    python write_op_specs.py OUTPUT [FOLDER ...]

FOLDER: folder of another project's op, whose spec.py has an OpSpec with `home`. Needs only Python 3.11.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(p) for p in (HERE.parent / "graphs", HERE.parent / "kernels", HERE.parent) if p.is_dir()]

from still_graphs.ops import OPS, OpSpec  # noqa: E402
from still_graphs.spec import AttributeSpec, StateSpec, TensorSpec  # noqa: E402

TYPES = {
    "T": "ElementType::kActivation",
    "float32": "ElementType::kFloat32",
    "int64": "ElementType::kInteger",
    "int32": "ElementType::kInt32",
}
KINDS = {int: "AttributeKind::kInteger", float: "AttributeKind::kFloat", str: "AttributeKind::kString"}


def boolean(value: bool) -> str:
    return "true" if value else "false"


def tensor(spec: TensorSpec | StateSpec, prefix: str = "") -> str:
    dims = ", ".join(f'"{d}"' for d in spec.shape)
    of_codes = isinstance(spec, StateSpec) and spec.of_codes
    flags = (spec.role == "weight", spec.role == "state", spec.optional, spec.narrow, of_codes)
    return f'    {{"{prefix}{spec.name}", {{{dims}}}, {TYPES[spec.dtype]}, {", ".join(map(boolean, flags))}}},'


def attribute(spec: AttributeSpec) -> str:
    integer = spec.default if isinstance(spec.default, int) else 0
    real = spec.default if isinstance(spec.default, float) else 0.0
    text = spec.default if isinstance(spec.default, str) else ""
    choices = ", ".join(f'"{c}"' for c in spec.choices)
    return f'    {{"{spec.name}", {KINDS[type(spec.default)]}, {integer}, {real!r}, "{text}", {{{choices}}}}},'


def operation(spec: OpSpec) -> list[str]:
    lines = ["{", f'    "{spec.name}", "{spec.domain}", {spec.version},', "    {"]
    lines += ["    " + tensor(t) for t in spec.inputs] + ["    " + tensor(t, "past_") for t in spec.states]
    lines += ["    },", "    {"]
    lines += ["    " + tensor(t) for t in spec.outputs] + ["    " + tensor(t, "present_") for t in spec.states]
    lines += ["    },", "    {"] + ["    " + attribute(a) for a in spec.attributes] + ["    },", "},"]
    return ["    " + line for line in lines]


def source(specs: list[OpSpec]) -> str:
    """C++ source that defines `still::op_specs`."""
    lines = [line for spec in specs for line in operation(spec)]
    head = [
        '#include "core/op_spec.h"',
        "std::vector<still::OpSpec> const& still::op_specs()",
        "{",
        "    static auto const* const specs = new std::vector<OpSpec>{",
    ]
    return "\n".join([*head, *lines, "    };", "    return *specs;", "}", ""])


def spec_of(folder: Path) -> OpSpec:
    """The op in a folder of another project."""
    found = importlib.util.spec_from_file_location(folder.name, folder / "spec.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    (spec,) = [value for value in vars(module).values() if isinstance(value, OpSpec) and value.home]
    return spec


if __name__ == "__main__":
    specs = [*OPS.values(), *map(spec_of, map(Path, sys.argv[2:]))]
    Path(sys.argv[1]).write_text(source(specs), encoding="utf-8")
