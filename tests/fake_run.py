"""Stands for programs that tests must not start."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Any


class FakeRun:
    """Stands for subprocess.run: remembers command lines and lets a function act for the program."""

    def __init__(self, act: Any = None) -> None:
        self.commands: list[list[str]] = []
        self.act = act

    def __call__(self, arguments: Sequence[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        assert options.get("shell") is None
        self.commands.append(list(arguments))
        code, out, err = self.act(list(arguments), options.get("cwd")) if self.act else (0, b"", b"")
        return subprocess.CompletedProcess(list(arguments), code, out, err)
