"""Options in dataclasses: the command line is the one that the parameters alone would give."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

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


def test_fields_are_options_with_their_defaults_and_help():
    SEEN.clear()
    assert CliRunner().invoke(app, ["x", "--rate", "2.5", "--device", "a", "--device", "b", "--slow"]).exit_code == 0
    assert CliRunner().invoke(app, ["x", "--rate", "1", "--json"]).exit_code == 0
    fast, slow = Speed(rate=2.5, devices=["a", "b"], fast=False), Speed(rate=1.0)
    assert [*SEEN] == [(Path("x"), fast, False), (Path("x"), slow, True)]
    shown = re.sub(r"\s+", " ", CliRunner().invoke(app, ["--help"]).output)
    assert "Requests per second." in shown
    assert "Runs." in shown


def test_an_option_without_a_default_is_required():
    result = CliRunner().invoke(app, ["x"])
    assert result.exit_code == 2
    assert "--rate" in result.output


def test_two_options_of_one_name_are_our_own_bug():
    def twice(group: Twice, json: bool = False) -> None:
        raise AssertionError(group, json)

    with pytest.raises(AssertionError, match="json"):
        grouped(twice)
