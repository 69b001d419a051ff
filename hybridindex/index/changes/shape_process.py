"""Deciding which rows lie where in a process of the lowest priority: beside searches, and with their GIL, it would be
in their way. It reads the generation and its log by itself, and puts what it decided into memory that both processes
share: nothing of it is needed on a disk.

Run as a module, this is that process: a JSON object on standard input says what to do.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np
import xxhash

from hybridindex.errors import BuildError, HybridIndexError
from hybridindex.index.changes.reshape import Shape, Thresholds
from hybridindex.index.changes.shape import LeftRowsAtPace, Pace, shape_of
from hybridindex.index.live.left_rows import LeftRows
from hybridindex.index.live.state import LiveState
from hybridindex.index.log.change_log import log_file
from hybridindex.index.opening import open_generation
from hybridindex.processes import ONE_THREAD

__all__ = ["shape_elsewhere"]

_log = logging.getLogger(__name__)

#: Gives way to everything; and what it takes of a machine that is idle, in parts of a core.
_NICE, _SHARE = 19, 0.5
#: Between looks whether it has ended, or shall.
_LOOK_S = 0.2
#: What begins the shared memory: lists, rows, dimensions, lists that were split and dissolved, rows that moved, and a
#: digest of the rows. Behind it lie the list that each list comes from, int64; the list of each row, int32; and the
#: centroids, float32.
_HEAD = struct.Struct("<6q16s")


def shape_elsewhere(rows: LeftRows, number: int, thresholds: Thresholds, stopping: Callable[[], bool]) -> Shape | None:
    """The shape of an index with the changes until ``number``, decided by another process; None: none could be started,
    or it failed, which the log says.

    Raises:
        BuildError: ``stopping`` said so.
    """
    try:
        memory = os.memfd_create("hybridindex-shape", os.MFD_CLOEXEC)
    except (OSError, AttributeError) as error:  # or the system has none of it
        _log.warning("no memory can be shared with a process that splits lists; this process splits them: %s", error)
        return None
    try:
        return _shape_in(memory, rows, number, thresholds, stopping)
    finally:
        os.close(memory)


def _shape_in(
    memory: int, rows: LeftRows, number: int, thresholds: Thresholds, stopping: Callable[[], bool]
) -> Shape | None:
    """``memory``: an open file in memory that the process fills."""
    index = rows.index
    asked = {
        "path": str(index.path.absolute()),
        "folder": str(index.integrity.folder.absolute()),
        "number": number,
        "thresholds": asdict(thresholds),
        "memory": memory,
        "parent": os.getpid(),
    }
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "hybridindex.index.changes.shape_process"],
            stdin=subprocess.PIPE,
            pass_fds=(memory,),
            # Ctrl-C goes to the process that serves.
            process_group=0,
            env={**os.environ, **ONE_THREAD, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": path},
        )
    except (OSError, ValueError) as error:
        _log.warning("no process could be started to split lists; this process splits them: %s", error)
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
        return _read(rows, memory) if process.returncode == 0 else None
    finally:
        process.kill()
        process.wait()


def _digest(rows: LeftRows) -> bytes:
    """Of the ids of all rows, one list after the other, and the lists' sizes."""
    digest = xxhash.xxh3_128(rows.sizes.tobytes())
    for list_id in range(rows.index.nlist):
        digest.update(rows.of(list_id)[1].tobytes())
    return digest.digest()


def _write(rows: LeftRows, shape: Shape, memory: int) -> None:
    parts = [shape.parents.astype("<i8"), shape.lists.astype("<i4"), shape.centroids.astype("<f4")]
    n_lists, dim = shape.centroids.shape
    head = _HEAD.pack(n_lists, len(shape.lists), dim, shape.n_split, shape.n_dissolved, shape.n_moved, _digest(rows))
    said = [head, *(part.tobytes() for part in parts)]
    nbytes = sum(map(len, said))
    os.ftruncate(memory, nbytes)
    with mmap.mmap(memory, nbytes) as shared:
        for part in said:
            shared.write(part)


def _read(rows: LeftRows, memory: int) -> Shape | None:
    """What was decided, if it is of the same rows in the same order."""
    try:
        with mmap.mmap(memory, 0) as shared:
            said = shared[:]
        n_lists, n_rows, dim, n_split, n_dissolved, n_moved, digest = _HEAD.unpack_from(said)
    except (OSError, ValueError, struct.error) as error:
        _log.warning("the result of the process that splits lists cannot be read; this process splits them: %s", error)
        return None
    if digest != _digest(rows):
        _log.warning("a process split other lists than these; this process splits them")
        return None
    at = _HEAD.size + 8 * n_lists
    centroids = np.frombuffer(said, "<f4", n_lists * dim, at + 4 * n_rows)
    return Shape(
        parents=np.frombuffer(said, "<i8", n_lists, _HEAD.size).astype(np.int64),
        lists=np.frombuffer(said, "<i4", n_rows, at).astype(np.int32),
        centroids=centroids.reshape(n_lists, dim).astype(np.float32),
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
        _write(rows, shape, int(asked["memory"]))


if __name__ == "__main__":
    try:
        _main()
    except (HybridIndexError, MemoryError) as error:
        print(f"shaping lists failed: {error}", file=sys.stderr)
        sys.exit(1)
