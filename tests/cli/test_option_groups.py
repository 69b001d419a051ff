"""Options in dataclasses: the command line is the one that the parameters alone would give."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer

from hybridindex.cli.option_groups import grouped

SEEN: list[object] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    rate: Annotated[float, typer.Option("--rate", help="Requests per second.")]
    devices: Annotated[list[str] | None, typer.Option("--device")] = None
    fast: Annotated[bool, typer.Option("--fast/--slow")] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Twice:
    json: bool = False


app = typer.Typer()


@app.command()
@grouped
def run(path: Path, speed: Speed, json: bool = False) -> None:
    """Runs."""
    SEEN.append((path, speed, json))


def invoke(*words: str) -> int:
    """The exit status."""
    return typer.main.get_command(app)(list(words), standalone_mode=False) or 0


def test_fields_are_options_with_their_defaults_and_help(capsys):
    SEEN.clear()
    assert invoke("x", "--rate", "2.5", "--device", "a", "--device", "b", "--slow") == 0
    assert invoke("x", "--rate", "1", "--json") == 0
    fast, slow = Speed(rate=2.5, devices=["a", "b"], fast=False), Speed(rate=1.0)
    assert [*SEEN] == [(Path("x"), fast, False), (Path("x"), slow, True)]
    assert invoke("--help") == 0
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "Requests per second." in shown
    assert "Runs." in shown


def test_an_option_without_a_default_is_required():
    with pytest.raises(typer.BadParameter.__mro__[1], match="Missing parameter: rate"):
        invoke("x")


def test_two_options_of_one_name_are_our_own_bug():
    def twice(group: Twice, json: bool = False) -> None:
        raise AssertionError(group, json)

    with pytest.raises(AssertionError, match="json"):
        grouped(twice)
