"""The process that renders chat templates: a template is a program of whoever made the model, so it runs where it can be killed.

Reads a JSON object from each line of standard input (`template`, `variables`), writes one for each: `text`, or `error` and its `kind`.
It needs jinja2 and nothing of this project. Exports copy this file into packages. See template.py for the other side.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

PROCESSOR_S = 0.5
"""Processor time for one rendering; then the kernel kills the process."""
MEMORY_BYTES = 1 << 28
TEXT_CHARACTERS = 1 << 24


class GenerationBlocks(Extension):
    """`{% generation %}` marks the model's output for training; here only its content is rendered."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class Names(Namespace):
    """A namespace that refuses private names, which lead to Python's own objects."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _demand_public(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _demand_public(name)
        super().__setitem__(name, value)


class Dicts:
    """`dict` without the attributes of Python's class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _demand_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name that begins with an underscore: {name!r}.")


def _refuse(message: object) -> None:
    raise TemplateError(str(message))


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as models were trained on, without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(8)
def compiled(template: str) -> Template:
    """A template with the globals and filters that transformers provides."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "namespace": Names, "dict": Dicts()}
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def answer(template: str, variables: Mapping[str, Any]) -> dict[str, str]:
    """The text of a template, or why there is none."""
    try:
        pieces, size = [], 0
        for piece in compiled(template).generate(variables):
            pieces.append(piece)
            size += len(piece)
            if size > TEXT_CHARACTERS:
                return {"kind": "bound", "error": f"it writes more than {TEXT_CHARACTERS:,} characters"}
        return {"text": "".join(pieces)}
    except TemplateSyntaxError as error:
        return {"kind": "syntax", "error": f"line {error.lineno}: {error.message}"}
    except MemoryError:
        return {"kind": "bound", "error": f"it needs more than {MEMORY_BYTES >> 20} MiB"}
    except RecursionError:
        return {"kind": "bound", "error": "it is nested too deeply"}
    except Exception as error:  # a template may raise anything
        kind = "refusal" if type(error) is TemplateError else "failure"
        return {"kind": kind, "error": " ".join(str(error).split()) or type(error).__name__}


def main() -> None:
    """Render until the input ends. Windows has no such bounds: there the other side kills this process after a while."""
    if sys.platform != "win32":
        import resource

        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        if sys.platform != "win32":
            signal.setitimer(signal.ITIMER_PROF, PROCESSOR_S)
        found = json.dumps(answer(**json.loads(line)))
        if sys.platform != "win32":
            signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(found.encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
