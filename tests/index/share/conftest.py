"""A pair for each test, closed after it."""

from __future__ import annotations

import pytest

from tests.index.share.shares import Pair


@pytest.fixture
def make(tmp_path):
    made: list[Pair] = []

    def build(**options) -> Pair:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Pair(folder, **options))
        return made[-1]

    yield build
    for pair in made:
        pair.close()
