"""Which tests a change reaches, and why."""

from pathlib import Path

import pytest

from tools.changed_tests import Reach

FILES = {
    "still_export/__init__.py": "",
    "still_export/errors.py": "",
    "still_export/run.py": "def go():\n    from still_export.errors import E\n",
    "still_export/schema.json": "{}",
    "still_export/read.py": "PLACE = 'schema.json'\n",
    "still_export/cli/main.py": "from importlib import import_module\n\ndef main(verb):\n    import_module(f'still_export.cli.{verb}')\n",
    "still_export/cli/verify.py": "",
    "kernels/still_kernels/causal_conv/plan.py": "",
    "tests/conftest.py": "",
    "tests/run/conftest.py": "from still_export.read import PLACE\n",
    "tests/run/test_run.py": "from still_export.run import go\n",
    "tests/test_cli.py": "from still_export.cli.main import main\n",
    "tests/test_op.py": "OP = 'CausalConv'\n",
    "tests/test_native.py": "def test_it(library):\n    pass\n",
    "tests/docs/test_pages.py": "",
}


@pytest.fixture
def tests(tmp_path: Path) -> Reach:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Reach(tmp_path)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("still_export/errors.py", {"tests/run/test_run.py"}),
        ("still_export/schema.json", {"tests/run/test_run.py"}),
        ("still_export/cli/verify.py", {"tests/test_cli.py"}),
        ("kernels/still_kernels/causal_conv/plan.py", {"tests/test_op.py"}),
        ("kernels/still_kernels/causal_conv/cpu/node.cpp", {"tests/test_op.py", "tests/test_native.py"}),
        ("docs/a.md", {"tests/docs/test_pages.py"}),
        ("tests/test_cli.py", {"tests/test_cli.py"}),
        ("tests/conftest.py", {name for name in FILES if "/test_" in name}),
        ("LICENSE", set()),
    ],
)
def test_a_change_reaches(changed: str, expected: set[str], tests: Reach) -> None:
    assert set(tests.reaching([changed])) == expected


def test_it_says_why(tests: Reach) -> None:
    (why,) = tests.reaching(["still_export/errors.py"]).values()
    assert why == "tests.run.test_run -> still_export.run -> still_export.errors"
