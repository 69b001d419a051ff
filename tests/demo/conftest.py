from __future__ import annotations

from pathlib import Path

import pytest

from tests.demo.outside import World


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    outside = tmp_path / "outside"
    outside.mkdir()
    return World(outside, monkeypatch)
