"""Command line flags made from the fields of options records, which define name, help and default once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from dataclasses import Field, fields
from importlib import import_module
from typing import Annotated, Any, get_args, get_type_hints

import typer

from still_export.errors import ConfigError
from still_export.options import flag_of, names_of


def add_verb(
    app: typer.Typer,
    verb: Callable[..., None],
    epilog: str | None,
    whole: bool,
    panel: str,
    records: Collection[str] = (),
    without: Collection[str] = (),
    targets: bool = False,
    finders: bool = False,
) -> None:
    """Add `verb` to `app`, in `panel` of the help. If `whole`, it gets the flags of `records` (module.Name) except `without`, and of all
    `targets` and `finders`."""
    kinds = [getattr(import_module(r.rpartition(".")[0]), r.rpartition(".")[2]) for r in records if whole]
    flags = [flag for kind in kinds for flag in flags_of(kind, without)] + (target_flags() if whole and targets else [])
    flags += finder_flags() if whole and finders else []
    app.command(verb.__name__.replace("_", "-"), epilog=epilog, rich_help_panel=panel)(with_flags(verb, *flags))


def with_flags(function: Callable[..., None], *flags: inspect.Parameter) -> Callable[..., None]:
    """The verb `function` with `flags`. Its argument `flags` gets the values that the user set, by field name."""

    def verb(**flag_values: Any) -> None:
        values = {flag.name: flag_values.pop(flag.name) for flag in flags}
        function(**flag_values, flags={name: value for name, value in values.items() if value not in (None, [])})

    own = inspect.signature(function, eval_str=True)
    arguments = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own.parameters.values() if p.name != "flags"]
    parameters = [*arguments, *flags]
    verb.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    verb.__annotations__ = {p.name: p.annotation for p in parameters}
    verb.__doc__ = function.__doc__
    return verb


def flags_of(record: type, without: Collection[str] = ()) -> list[inspect.Parameter]:
    """Flags for all options of a record except those named in `without`."""
    return [_flag(record, entry) for entry in _options(record) if entry.name not in without]


def target_flags() -> list[inspect.Parameter]:
    """`--to`, and the flags of all targets' options records, grouped by the targets that accept them."""
    from still_export.targets.registry import TARGETS, names

    places: dict[str, list[tuple[str, type]]] = {}
    for to, record in dict.fromkeys((target.to, target.options) for target in TARGETS):
        for name in names_of(record):
            places.setdefault(name, []).append((to, record))
    records = [target.name for target in TARGETS if target.name not in names()]
    text = f"Target: {', '.join(names())}; or a record of theirs: {', '.join(records)}."
    chosen = typer.Option("--to", help=text, show_default=names()[0])
    flags = [_keyword("to", Annotated[str | None, chosen])]
    for name, found in places.items():
        entries = [(to, next(e for e in fields(record) if e.name == name)) for to, record in found]
        more = {"help": _together([(to, e.metadata["help"]) for to, e in entries])}
        more["shown"] = _together([(to, _shown(e)) for to, e in entries])
        more["panel"] = f"With --to {', '.join(to for to, _ in found)}"
        flags.append(_flag(found[0][1], entries[0][1], **more))
    return flags


def finder_flags() -> list[inspect.Parameter]:
    """`--find-NAME` of every layer finder."""
    from still_export.linearization.recipe import FINDERS

    named = ((name, typer.Option(f"--find-{name}", help=found.text)) for name, found in FINDERS.items())
    return [_keyword(f"find_{name}", Annotated[bool | None, option]) for name, option in named]


def _together(texts: list[tuple[str, str]]) -> str:
    """Texts of several targets; equal texts appear once."""
    by_text: dict[str, list[str]] = {}
    for to, text in texts:
        by_text.setdefault(text, []).append(to)
    return texts[0][1] if len(by_text) == 1 else "; ".join(f"{', '.join(tos)}: {text}" for text, tos in by_text.items())


def _options(record: type) -> Iterator[Field[Any]]:
    return (entry for entry in fields(record) if "help" in entry.metadata)


def _shown(entry: Field[Any]) -> str:
    """The default as shown in the help; "" if none is shown."""
    default = entry.default
    if "shown" in entry.metadata:
        return str(entry.metadata["shown"])
    return "" if default is None or isinstance(default, bool) or default in ((), "") else str(default)


def _flag(record: type, entry: Field[Any], **changes: Any) -> inspect.Parameter:
    metadata = {**entry.metadata, **changes}
    hint = get_type_hints(record)[entry.name]
    kind = next(part for part in (get_args(hint) or (hint,)) if part is not type(None))
    flag = flag_of(record, entry.name)
    limits = {"least": "min", "most": "max", "env": "envvar"}
    more: dict[str, Any] = {name: metadata[limit] for limit, name in limits.items() if limit in metadata}
    if "tuple" in str(hint):
        item: type = next((t for t in (float, int) if t.__name__ in str(hint)), str)
        kind = tuple if metadata.get("commas") else list[item]  # type: ignore[valid-type]
        if metadata.get("commas"):
            more |= {"parser": lambda text: _parts(flag, text, item), "metavar": "A,B,..."}
    shown = metadata.get("shown", _shown(entry)) or False
    option = typer.Option(
        flag,
        *metadata.get("also", ()),
        help=metadata["help"],
        show_default=shown,
        rich_help_panel=metadata.get("panel"),
        **more,
    )
    return _keyword(entry.name, Annotated[kind | None, option])


def _keyword(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _parts(flag: str, text: str, kind: Callable[[str], Any]) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in text.split(",") if part)
    except ValueError:
        raise ConfigError(f"{flag} {text}: give numbers separated by commas, such as 1024,4096.") from None
