"""Commands, run in the test's process."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from hybridindex.cli.console import err, out
from hybridindex.cli.main import run


@pytest.fixture
def cli(monkeypatch, capsys):
    """Runs one command; its status, what it wrote, and the JSON where that was asked for. No line is broken."""
    monkeypatch.setenv("COLUMNS", "200")
    # A worker of pytest-xdist has 80 columns, which a console takes over for good when it is made.
    for console in (out, err):
        monkeypatch.setattr(console, "_width", None)

    def invoke(*words: object) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["hybridindex", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            run()
        captured = capsys.readouterr()
        parsed = json.loads(captured.out) if "--json" in words and captured.out else None
        return SimpleNamespace(code=stopped.value.code or 0, out=captured.out, err=captured.err, json=parsed)

    return invoke


@pytest.fixture
def printed(monkeypatch):
    """What commands show of a table; no line is broken."""
    monkeypatch.setattr(out, "_width", 400)

    def show(what: object) -> str:
        with out.capture() as captured:
            out.print(what)
        return captured.get()

    return show
