"""The families: the folders of this package, each imported when it is first used."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping

import tuned.families
from tuned.families.family import Family


class Families(Mapping[str, Family]):
    """Name -> family. Each folder of this package is a family, described by its ``FAMILY``."""

    def __init__(self) -> None:
        self._names = tuple(module.name for module in pkgutil.iter_modules(tuned.families.__path__) if module.ispkg)
        self.outside: Family | None = None

    def only(self, family: Family) -> None:
        """Let a family from outside be the only one, in a process that tunes it."""
        self._names, self.outside = (family.name,), family

    def __getitem__(self, name: str) -> Family:
        if name not in self._names:
            raise KeyError(name)
        if self.outside is not None:
            return self.outside
        found: Family = importlib.import_module(f"tuned.families.{name}").FAMILY
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


FAMILIES = Families()
