"""Deciding which rows lie where in a process of the lowest priority: beside searches, and with their GIL, it would be
in their way. It reads the generation and its log by itself, and writes what it decided into a file.

Run as a module, this is that process: a JSON object on standard input says what to do.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np

from hybridindex import filesystem
from hybridindex.errors import BuildError, FileError, HybridIndexError
from hybridindex.index.changes.reshape import Shape, Thresholds
from hybridindex.index.changes.shape import LeftRowsAtPace, Pace, shape_of
from hybridindex.index.live.left_rows import LeftRows
from hybridindex.index.live.state import LiveState
from hybridindex.index.live.store import log_file
from hybridindex.index.opening import open_generation
from hybridindex.processes import ONE_THREAD

__all__ = ["shape_elsewhere"]

_log = logging.getLogger(__name__)

#: Gives way to everything; and what it takes of a machine that is idle, in parts of a core.
_NICE, _SHARE = 19, 0.5
#: Between looks whether it has ended, or shall.
_LOOK_S = 0.2


def shape_elsewhere(
    rows: LeftRows, number: int, thresholds: Thresholds, out: Path, stopping: Callable[[], bool]
) -> Shape | None:
    """The shape of an index with the changes until ``number``, decided by another process; None: none could be started,
    or it failed, which the log says.

    Args:
        out: a file that it may write.

    Raises:
        BuildError: ``stopping`` said so.
    """
    index = rows.index
    asked = {
        "path": str(index.path.absolute()),
        "folder": str(index.integrity.folder.absolute()),
        "number": number,
        "thresholds": asdict(thresholds),
        "out": str(out.absolute()),
        "parent": os.getpid(),
    }
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "hybridindex.index.changes.shape_process"],
            stdin=subprocess.PIPE,
            # Ctrl-C goes to the process that serves.
            process_group=0,
            env={**os.environ, **ONE_THREAD, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": path},
        )
    except (OSError, ValueError) as error:
        _log.warning("no process could be started to shape lists in, so it is done in this one: %s", error)
        return None
    try:
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(asked).encode())
            process.stdin.close()
        while True:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_S)
                break
            if stopping():
                raise BuildError("the compaction was stopped; everything is as it was")
        return _read(rows, out) if process.returncode == 0 else None
    finally:
        process.kill()
        process.wait()
        filesystem.discard(out)


def _read(rows: LeftRows, out: Path) -> Shape | None:
    """What was decided, if it is of the same rows in the same order."""
    try:
        found = filesystem.read_arrays(out)
    except (FileError, ValueError, EOFError) as error:
        _log.warning("what a process decided of lists cannot be read, so it is done in this one: %s", error)
        return None
    if not np.array_equal(found["sizes"], rows.sizes) or not np.array_equal(found["ids"], rows.ids()):
        _log.warning("a process shaped other lists than those that are there, so it is done in this one")
        return None
    n_split, n_dissolved, n_moved = (int(each) for each in found["counts"])
    return Shape(
        centroids=found["centroids"],
        parents=found["parents"],
        lists=found["lists"],
        n_split=n_split,
        n_dissolved=n_dissolved,
        n_moved=n_moved,
    )


def _main() -> None:
    os.nice(_NICE)
    asked = json.loads(sys.stdin.buffer.read())
    path, folder, number = Path(asked["path"]), Path(asked["folder"]), int(asked["number"])
    with open_generation(path, folder) as index:
        state = LiveState(index.nlist, index.code_size, keep_max=index.metric == "ip")
        found = log_file(folder, index.manifest).read()
        for change in found.changes[: len(found.changes) - (found.place.number - number)]:
            state.apply(change)
        pace = Pace(_SHARE, lambda: os.getppid() != asked["parent"])
        rows = LeftRowsAtPace(index, state.rows_at(number), pace)
        shape = shape_of(rows, Thresholds(**asked["thresholds"]))
        assert shape is not None
        filesystem.write_arrays(
            Path(asked["out"]),
            centroids=shape.centroids,
            parents=shape.parents,
            lists=shape.lists,
            counts=np.array([shape.n_split, shape.n_dissolved, shape.n_moved]),
            sizes=rows.sizes,
            ids=rows.ids(),
        )


if __name__ == "__main__":
    try:
        _main()
    except (HybridIndexError, MemoryError) as error:
        print(f"shaping lists failed: {error}", file=sys.stderr)
        sys.exit(1)
