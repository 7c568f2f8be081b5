"""Find research systems: folders of `systems`, and installed packages with an entry point in the group of that name."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TypeVar

from still_export.errors import ConfigError

GROUP = f"{__package__}.systems"
"""The entry-point group, and the package of this project's own systems."""


class Named(Protocol):
    """An entry of a registry."""

    @property
    def name(self) -> str: ...


Item = TypeVar("Item", bound=Named)


@cache
def systems() -> tuple[str, ...]:
    """Packages of the systems: this project's, then those of installed packages."""
    own = [f"{GROUP}.{found.name}" for found in pkgutil.iter_modules([str(Path(__file__).with_name("systems"))])]
    return tuple(dict.fromkeys((*own, *(entry.value for entry in entry_points(group=GROUP)))))


class Registry(MutableMapping[str, Item]):
    """Records by name: the project's own, and those of systems, which load at the first lookup.

    Args:
        own: Records of no system.
        module: Module of a system that may have more, such as "mixer".
        constant: Their tuple in it, such as "MIXERS".
    """

    def __init__(self, own: Iterable[Item], module: str, constant: str) -> None:
        self._items = {item.name: item for item in own}
        self._module, self._constant = module, constant
        self._left: list[str] | None = None
        self._loads = False

    def _all(self) -> dict[str, Item]:
        if self._left is None:
            self._left = list(systems())
        if self._left and not self._loads:  # a loading system may look up what is known so far
            self._loads = True
            try:
                self._left = [system for system in self._left if not self._add(system)]
            finally:
                self._loads = False
        return self._items

    def _add(self, system: str) -> bool:
        """Add the records of one system; False: its module is being imported right now."""
        name = f"{system}.{self._module}"
        try:
            if find_spec(name) is None:
                return True
            if getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False):
                return False
            found: tuple[Item, ...] = getattr(import_module(name), self._constant)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"the system {system} does not load: {error}. Install what it needs, or uninstall it."
            ) from error
        for item in found:
            if item.name in self._items:
                raise ConfigError(f"the system {system} adds {item.name!r}, which exists. Uninstall one of the two.")
            self._items[item.name] = item
        return True

    def __getitem__(self, name: str) -> Item:
        return self._all()[name]

    def __setitem__(self, name: str, item: Item) -> None:
        self._all()[name] = item

    def __delitem__(self, name: str) -> None:
        del self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


@dataclass(frozen=True)
class Folder:
    """A published folder whose config.json names another family than the folder's own.

    Args:
        name: The family's model_type.
        recognises: Whether a config.json is of such a folder, by its keys.
    """

    name: str
    recognises: Callable[[Mapping[str, Any]], bool]


FOLDERS: Registry[Folder] = Registry((), "folder", "FOLDERS")


def recognised(config: Mapping[str, Any]) -> str:
    """The model_type for a config.json: that of the system that recognises it, or its own; "" without one."""
    own = str(config.get("model_type", ""))
    return next((folder.name for folder in FOLDERS.values() if folder.name != own and folder.recognises(config)), own)
