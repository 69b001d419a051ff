"""The power fails before any call: every image of the disk holds the old or the new; what was acknowledged is there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from hybridindex.errors import HybridIndexError
from hybridindex.filesystem import watched_by
from tests.durability.power_cut import Recorder, write_image
from tests.durability.test_disk_faults import (
    SCENARIOS,
    besides,
    copied,
    folder,
    pictures,
    state,
    world,
)

__all__ = ["folder", "pictures", "world"]

#: They read alone, or what they write may be lost.
NOT_HERE = {"open", "verify", "checkpoint", "address"}


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in NOT_HERE])
def test_the_power_fails_before_any_call(name: str, world: Path, folder: Path, record_property: Any) -> None:
    path = copied(world, folder / "w")
    before = state(path, name)
    recorder = Recorder(path)
    with watched_by(recorder):
        SCENARIOS[name](path)
    recorder.end()
    after = state(path, name)
    wrong = []
    for image, call in recorder.cuts.items():
        if problem := found_in(image, path, name, [before, after]):
            wrong.append(f"before {call.name} {call.path}: {problem}")
    if problem := found_in(recorder.acknowledged, path, name, [after]):
        wrong.append(f"acknowledged: {problem}")
    record_property("images", len(recorder.cuts))
    assert len(recorder.cuts) > 1
    assert not wrong, f"{len(wrong)} of {len(recorder.cuts)}:\n" + "\n".join(wrong)


def found_in(image: tuple[object, ...], path: Path, name: str, allowed: list[dict[str, object]]) -> str:
    """What is wrong with an image; empty: nothing."""
    shutil.rmtree(path)
    write_image(image, path)
    try:
        now = state(path, name)
    except HybridIndexError as error:
        return f"broken: {error}"
    for key, value in now.items():
        values = [each[key] for each in allowed]
        if len(allowed) > 1:
            values += besides(name, key, values[-1])
        if value not in values:
            return f"{key} is {value}, expected one of {values}"
    return ""
