"""Options made from the fields of configurations: a new field is a new option by itself.

An option that was not given says nothing, so that it overrides no settings file. Its help shows the field's default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import make_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

import typer

from hybridindex.cli.console import readable_bytes
from hybridindex.config import RouterConfig
from hybridindex.service.settings import Entry, Settings, entries, read_settings

__all__ = ["ConfigFile", "RouterOptions", "SettingOptions", "options_of", "settings_in"]

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Settings file (TOML); options override it.", show_default=False),
]


class SettingOptions:
    """Base of classes that :func:`options_of` fills."""

    #: Option -> tables of its field, outermost first; and before the field's name in each.
    TABLES: ClassVar[dict[str, tuple[str, ...]]] = {}
    PREFIX: ClassVar[str] = ""

    def given(self) -> dict[str, Any]:
        """The options that were given, as tables of a settings file."""
        found: dict[str, Any] = {}
        for name, tables in self.TABLES.items():
            value = getattr(self, name)
            if value is not None:
                table = found
                for key in tables:
                    table = table.setdefault(key, {})
                table[name.removeprefix(self.PREFIX)] = value
        return found


Options = TypeVar("Options", bound=type[SettingOptions])


def options_of(
    kind: type, panel: str, *, inner: bool = False, tables: tuple[str, ...] = (), prefix: str = ""
) -> Callable[[Options], Options]:
    """Decorates a class: each field of the configuration ``kind`` becomes a field of it, as Typer takes options.

    Args:
        panel: title of the options in the help.
        inner: also those of configurations within it.
        tables: of ``kind`` itself.
        prefix: before the name of each option that has none of its own.
    """

    def fill(cls: Options) -> Options:
        found = [entry for entry in entries(kind, inner=inner, tables=tables) if entry.setting is not None]
        made: Any = make_dataclass(
            cls.__name__,
            [
                (prefix + entry.name, Annotated[_type_of(entry), _option_of(entry, panel, prefix)], None)
                for entry in found
            ],
            bases=(cls,),
            frozen=True,
            kw_only=True,
        )
        made.TABLES = {prefix + entry.name: entry.tables for entry in found}
        made.PREFIX = prefix
        made.__module__, made.__doc__ = cls.__module__, cls.__doc__
        return made  # type: ignore[no-any-return]

    return fill


def _type_of(entry: Entry) -> Any:
    assert entry.setting is not None
    kinds = get_args(entry.type) if get_origin(entry.type) in (UnionType, Union) else (entry.type,)
    several = any(get_origin(kind) is tuple for kind in kinds)
    one = next(kind for kind in kinds if kind is not NoneType)
    if entry.setting.is_bytes or several or get_origin(one) is Literal:
        one = str
    return list[one] | None if several else one | None  # type: ignore[valid-type]


def _option_of(entry: Entry, panel: str, prefix: str) -> Any:
    assert entry.setting is not None
    flag, default = entry.flag_after(prefix), entry.default
    if bool in (entry.type, *get_args(entry.type)):
        flag = f"{flag}/--no-{flag[2:]}"
    shown: bool | str = False
    if isinstance(default, bool):
        shown = flag.split("/")[0 if default else 1].removeprefix("--")
    elif isinstance(default, int) and entry.setting.is_bytes:
        shown = readable_bytes(default)
    elif isinstance(default, int | float | str):
        shown = str(default)
    metavar = entry.setting.metavar or ("SIZE" if entry.setting.is_bytes else None)
    if get_origin(entry.type) is Literal:
        metavar = "|".join(get_args(entry.type))
    return typer.Option(flag, help=entry.setting.help, metavar=metavar, show_default=shown, rich_help_panel=panel)


@options_of(RouterConfig, "Router", inner=True, tables=("router",))
class RouterOptions(SettingOptions):
    """Everything that a router can be told."""


def settings_in(file: Path | None) -> Settings:
    """Of a settings file, or none."""
    return Settings() if file is None else read_settings(file)
