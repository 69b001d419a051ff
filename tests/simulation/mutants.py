"""Mutants of the product: changes of its source that the fixed runs must find. They are in ``mutants.toml``."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["Mutant", "all_mutants", "find", "hunt", "install", "install_mutant"]

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change."""

    name: str
    #: Below the repository.
    file: str
    old: str
    new: str

    @property
    def module(self) -> str:
        """Its name where the product is imported."""
        parts = Path(self.file).with_suffix("").parts
        return ".".join(parts if parts[0] == "hybridindex" else ("hybridindex", *parts))

    def changed(self) -> str:
        """The file's text with the change."""
        text = (_ROOT / self.file).read_text()
        assert text.count(self.old) == 1, f"{self.name}: {self.file} holds the old text {text.count(self.old)} times"
        return text.replace(self.old, self.new)


@cache
def all_mutants() -> dict[str, Mutant]:
    """By name."""
    tables = tomllib.loads((Path(__file__).parent / "mutants.toml").read_text())
    return {name: Mutant(name=name, **table) for name, table in tables.items()}


class _Finder(importlib.abc.MetaPathFinder):
    """Gives one module another source; its file and byte code stay as they are."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        if name != self._mutant.module:
            return None
        file = str(_ROOT / self._mutant.file)
        return importlib.util.spec_from_loader(name, _Loader(name, file, self._mutant), origin=file)


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, file: str, mutant: Mutant) -> None:
        super().__init__(name, file)
        self._mutant = mutant

    def get_code(self, fullname: str) -> Any:
        return compile(self._mutant.changed(), self.path, "exec")


def install(name: str) -> None:
    """The product that is imported from now on is this mutant."""
    install_mutant(all_mutants()[name])


def install_mutant(mutant: Mutant) -> None:
    """As :func:`install`, of any."""
    assert mutant.module not in sys.modules
    sys.meta_path.insert(0, _Finder(mutant))


def find(name: str, *, limit_s: float = 600) -> str:
    """What the fixed runs say of a mutant, in a process of their own: a line that begins with ``VIOLATION``, or why
    there is none."""
    command = [sys.executable, "-m", "tests.simulation", "--fixed", "--mutant", name]
    try:
        ended = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return f"the runs did not end within {limit_s:g} s"
    lines = [f"exit status {ended.returncode}", *ended.stdout.splitlines(), *ended.stderr.splitlines()]
    return next((line for line in lines if line.startswith("VIOLATION")), lines[-1])


def hunt(names: list[str]) -> int:
    """Prints which mutants are found, each by a violation; 1 where one is not."""
    missed = []
    for name in names or all_mutants():
        began_s = time.monotonic()
        said = find(name)
        found = said.startswith("VIOLATION")
        print(f"{name}: {'' if found else 'NOT FOUND: '}{said} ({time.monotonic() - began_s:.0f} s)", flush=True)
        if not found:
            missed.append(name)
    print(
        f"{len(names or all_mutants()) - len(missed)} found; not found: {', '.join(missed) or 'none'}",
        flush=True,
    )
    return int(bool(missed))
