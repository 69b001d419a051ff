"""Options of a command as frozen dataclasses: one field is one option. Commands with the same options share them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints

import typer

from hybridindex.errors import InvalidInputError

__all__ = ["grouped", "refuse_beside_remove"]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Decorates a Typer command. Each parameter whose type is a dataclass becomes the options of its fields.

    Apply it below ``@app.command()``. Fields are annotated as Typer's parameters are (``Annotated[..., Option(...)]``);
    their defaults are the options' defaults. The command gets the dataclass.
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}
    parameters = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name in groups:
            parameters += _options_of(groups[parameter.name])
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[parameter.name]))
    names = [parameter.name for parameter in parameters]
    assert len(names) == len(set(names)), f"{command.__name__} has an option twice: {sorted(names)}"

    def run(**given: Any) -> None:
        values = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**given, **values)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _options_of(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    found = []
    for field in fields(group):
        default = field.default
        if default is MISSING:
            default = inspect.Parameter.empty if field.default_factory is MISSING else field.default_factory()
        found.append(
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name])
        )
    return found


def refuse_beside_remove(ctx: typer.Context, names: Sequence[str]) -> None:
    """Raises InvalidInputError where a parameter of ``names`` is given beside ``--remove``."""
    sources = {name: ctx.get_parameter_source(name) for name in names}
    spelled = {name: "FILE" if name == "table" else f"--{name.replace('_', '-')}" for name in names}
    given = [spelled[name] for name, of in sources.items() if of is not None and of.name != "DEFAULT"]
    if given:
        raise InvalidInputError(f"--remove is given with {' and '.join(given)}; expected --remove alone")
