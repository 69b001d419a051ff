"""Settings files: TOML whose keys are fields of a configuration, whose tables are the configurations within it.

Settings from the command line come as such tables, too, and override the file key by key. Whatever is wrong is said by
file, table and key, before anything is opened. Reads one file, and nothing else.
"""

from __future__ import annotations

import difflib
import tomllib
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from hybridindex import filesystem
from hybridindex.config import Setting, parse_bytes
from hybridindex.errors import FileError, InvalidInputError

__all__ = ["Entry", "Settings", "Table", "entries", "read_settings"]

C = TypeVar("C")
#: Of a settings file.
Table = Mapping[str, Any]
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One field of a configuration that a settings file can name."""

    name: str
    #: Its tables, outermost first.
    tables: tuple[str, ...]
    #: Without ``Annotated``.
    type: Any
    default: Any
    #: None: the field does not describe itself.
    setting: Setting | None

    @property
    def flag(self) -> str:
        """Its option of the command line."""
        return self.flag_after("")

    def flag_after(self, prefix: str) -> str:
        """The same where ``prefix`` stands before the names of fields."""
        flag = self.setting.flag if self.setting is not None else None
        return flag or "--" + f"{prefix}{self.name}".replace("_", "-")


def entries(kind: type, *, inner: bool = True, tables: tuple[str, ...] = ()) -> Iterator[Entry]:
    """The fields of a configuration, then those of the configurations within it; ``inner=False``: without these."""
    default, later = kind(), []
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        hint = hints[field.name]
        if is_dataclass(hint):
            later.append((hint, field.name))
            continue
        setting = next((extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Setting)), None)
        plain = hint.__origin__ if setting is not None else hint
        yield Entry(name=field.name, tables=tables, type=plain, default=getattr(default, field.name), setting=setting)
    for hint, name in later if inner else ():
        assert isinstance(hint, type)
        yield from entries(hint, tables=(*tables, name))


def read_settings(path: Path) -> Settings:
    """The tables of a settings file.

    Raises:
        InvalidInputError: it cannot be read, is too large, or is no TOML.
    """
    try:
        with filesystem.open_for_reading(path) as file:
            content = file.read(_MAX_BYTES + 1)
        said = tomllib.loads(content.decode("utf-8")) if len(content) <= _MAX_BYTES else None
    # ValueError: no UTF-8, no TOML, or an integer of thousands of digits.
    except (FileError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"{path} is not a settings file: {error}; expected TOML") from error
    if said is None:
        raise InvalidInputError(f"{path} is not a settings file: it has more than {_MAX_BYTES:,} bytes")
    return Settings(said, path)


class Settings:
    """What a file says, if there is one, and what overrides it."""

    def __init__(self, said: Table | None = None, path: Path | None = None) -> None:
        self._said = dict(said or {})
        self._path = path

    @property
    def path(self) -> Path | None:
        return self._path

    def table(self, name: str) -> Table:
        """One table as the file has it; empty where there is none.

        Raises:
            InvalidInputError: it is no table.
        """
        said = self._said.get(name, {})
        if not isinstance(said, Mapping):
            raise InvalidInputError(f"{self._path}: {name} is {said!r}; expected the table [{name}]")
        return said

    def only(self, name: str) -> Settings:
        """One table, still under its name."""
        return Settings({key: value for key, value in self._said.items() if key == name}, self._path)

    def without(self, *names: str) -> Settings:
        """Everything but some tables."""
        return Settings({key: value for key, value in self._said.items() if key not in names}, self._path)

    def names(self) -> set[str]:
        """Keys and tables of the file."""
        return set(self._said)

    def build(self, kind: type[C], given: Table | None = None, *, table: str = "") -> C:
        """A configuration; of its defaults, of the file, and of what was ``given`` besides, the last one counts.

        Args:
            given: as the file's tables. A value of None was not given.
            table: the one that ``kind`` is, where it is not the whole file.

        Raises:
            InvalidInputError: file, key and what would be right.
        """
        said = self._said.get(table, {}) if table else self._said
        return self._build(kind, said, given or {}, (table,) if table else ())

    def _build(self, kind: type[C], said: Any, given: Table, tables: tuple[str, ...]) -> C:
        at = f"[{'.'.join(tables)}]" if tables else ""
        if not isinstance(said, Mapping):
            raise InvalidInputError(f"{self._path}: {tables[-1]} is {said!r}; expected the table {at}")
        given = {name: value for name, value in given.items() if value is not None}
        prefix = f"{self._path}: {at} " if at else f"{self._path}: "
        hints, values = get_type_hints(kind, include_extras=True), {}
        known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
        for name in {**said, **given}:
            where = "" if name not in said else prefix
            if name not in known:
                raise InvalidInputError(f"{where}{name} is not a setting; expected {_nearest(name, known)}")
            hint = hints[name]
            if is_dataclass(hint):
                assert isinstance(hint, type)
                values[name] = self._build(hint, said.get(name, {}), given.get(name, {}), (*tables, name))
            elif name in given:
                values[name] = _converted(name, given[name], hint)
            else:
                try:
                    values[name] = _converted(name, said[name], hint, self._path)
                except InvalidInputError as error:
                    raise InvalidInputError(f"{prefix}{error}") from None
        try:
            return kind(**values)
        except InvalidInputError as error:
            named = str(error).split(" ", 1)[0]
            if not said or named in given:
                raise
            raise InvalidInputError(f"{prefix}{error}") from None


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"{close[0]}, or another of {', '.join(sorted(known))}" if close else f"one of {', '.join(sorted(known))}"


def _converted(name: str, value: Any, hint: Any, file: Path | None = None) -> Any:
    """A value of a file or an option as what the field holds. A path is relative to its file's folder."""
    setting = next((extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Setting)), None)
    if setting is not None:
        hint = hint.__origin__
    kinds = get_args(hint) if get_origin(hint) in (types.UnionType, Union) else (hint,)
    if value is False and type(None) in kinds and bool not in kinds:
        return None
    if setting is not None and setting.is_bytes:
        value = _bytes(name, value)
    for kind in kinds:
        if kind is Path and isinstance(value, str | Path):
            return Path(value) if file is None else file.parent / value
        if _is_a(value, kind):
            return tuple(value) if isinstance(value, list) else value
    # A literal's words are the best that can be said; "false" for what need not be set.
    expected = " or ".join(_words(kind) for kind in kinds if kind is not type(None))
    off = ", or false for none" if type(None) in kinds and bool not in kinds else ""
    raise InvalidInputError(f"{name} is {value!r}; expected {expected}{off}")


def _bytes(name: str, value: Any) -> Any:
    """Sizes in bytes; a list of one is the one for all."""
    if isinstance(value, list | tuple):
        sizes = [_bytes(name, size) for size in value]
        return sizes[0] if len(sizes) == 1 else sizes
    try:
        return parse_bytes(value) if isinstance(value, str) else value
    except InvalidInputError as error:
        raise InvalidInputError(f"{name}: {error}") from None


def _is_a(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is tuple:
        return isinstance(value, list | tuple) and all(_is_a(item, get_args(kind)[0]) for item in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(kind, type) and isinstance(value, kind)


def _words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(repr(word) for word in get_args(kind))
    if get_origin(kind) is tuple:
        return f"a list, each {_words(get_args(kind)[0])}"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}
    return names.get(kind, str(kind))
