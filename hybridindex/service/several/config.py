"""Which indexes a daemon serves, as the command line and the settings file name them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from hybridindex import filesystem
from hybridindex.config import Setting, check_number
from hybridindex.errors import InvalidInputError
from hybridindex.service.config import ServiceConfig, check_plan_choice
from hybridindex.service.settings import Settings

__all__ = ["IndexConfig", "check_name", "indexes_of", "name_of"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TABLE = "indexes"


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexConfig:
    """What a daemon is told of one of several indexes. None: what it is told of all."""

    path: Annotated[Path | None, Setting(help="Index directory.")] = None
    plan: Annotated[str | None, Setting(help="Like the daemon's plan.")] = None
    slo_ms: Annotated[
        float | None,
        Setting(help="SLO that its plan must meet, instead of the plan's own; attainment is measured against it."),
    ] = None
    rate_qps: Annotated[
        float | None, Setting(help="Requests/s that its plan must sustain, instead of the plan's own.")
    ] = None
    store_url: Annotated[str | None, Setting(help="Its control store.")] = None

    def __post_init__(self) -> None:
        if self.plan is not None:
            check_plan_choice(self.plan)
        for name, most in (("slo_ms", 86_400_000.0), ("rate_qps", 1e9)):
            if (value := getattr(self, name)) is not None:
                check_number(name, value, most)

    def within(self, config: ServiceConfig) -> ServiceConfig:
        """What its service is told."""
        return replace(
            config,
            plan=config.plan if self.plan is None else self.plan,
            slo_ms=config.slo_ms if self.slo_ms is None else self.slo_ms,
            store_url=config.store_url if self.store_url is None else self.store_url,
        )


def check_name(name: str) -> str:
    """Raises InvalidInputError where ``name`` is none for an index: it stands in URLs."""
    if not _NAME.fullmatch(name):
        raise InvalidInputError(
            f"index name is {name!r}; expected up to 64 letters, digits, '.', '_' or '-', the first a letter or digit"
        )
    return name


def indexes_of(words: Sequence[str], settings: Settings) -> dict[str, IndexConfig]:
    """Name -> index: first those of the command line, NAME=PATH or PATH, then those of the settings file.

    A PATH has its folder's name. What the command line says of a name that the file has, too, overrides that path.

    Raises:
        InvalidInputError: no index; a bad name or value; a name or folder that stands there twice.
    """
    said = settings.table(_TABLE)
    for name, table in said.items():
        check_name(name)
        if not isinstance(table, Mapping):
            raise InvalidInputError(
                f"{settings.path}: {_TABLE}.{name} is {table!r}; expected the table [indexes.{name}]"
            )
    paths: dict[str, Path] = {}
    for word in words:
        name, path = _name_and_path(word)
        if name in paths:
            raise InvalidInputError(f"index name {name!r} is given twice; expected another, as in NAME={path}")
        paths[name] = path
    found: dict[str, IndexConfig] = {}
    for name in (*paths, *(name for name in said if name not in paths)):
        key = f"{_TABLE}.{name}"
        one = Settings({key: said.get(name, {})}, settings.path)
        found[name] = one.build(IndexConfig, {"path": paths.get(name)}, table=key)
        if found[name].path is None:
            raise InvalidInputError(f"{settings.path}: [{key}] path is missing; expected the index directory")
    if not found:
        raise InvalidInputError("INDEX is missing; expected an index directory, or tables [indexes.NAME] in --config")
    where: dict[Path, str] = {}
    for name, each in found.items():
        assert each.path is not None
        if (other := where.setdefault(each.path.resolve(), name)) != name:
            raise InvalidInputError(f"indexes {other} and {name} are both {each.path}; expected a folder each")
    return found


def _name_and_path(word: str) -> tuple[str, Path]:
    name, equals, path = word.partition("=")
    if equals and path and "/" not in name and not filesystem.exists(word):
        return check_name(name), Path(path)
    return name_of(Path(word)), Path(word)


def name_of(folder: Path) -> str:
    """The name of an index that was given none: its folder's, as far as URLs can hold that."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", folder.resolve().name).lstrip("._-")[:64] or "index"
