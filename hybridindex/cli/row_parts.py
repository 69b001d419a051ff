"""Adding, deleting and compacting from the command line: through the daemon that serves the index, or directly."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np

import hybridindex as hx
from hybridindex.cli.console import CliProgress, err, fail, load_ids
from hybridindex.client.client import Client
from hybridindex.errors import AccessDeniedError, BusyWritingError, InvalidInputError, UnreachableError
from hybridindex.index.attributes.columns import read_table
from hybridindex.index.inputs.batches import Batches
from hybridindex.index.inputs.elements import ELEMENTS, as_float32, holds_vectors
from hybridindex.index.inputs.files import open_file
from hybridindex.index.source import find_unusable
from hybridindex.service.daemon_address import find_daemon
from hybridindex.types import VectorFile

__all__ = ["MOST_ROWS", "RowInput", "RowTarget", "open_target"]

#: Of one call, and bytes of its vectors.
MOST_ROWS, _MOST_BYTES = 1 << 16, 8 << 20
#: Of a body: its vectors. Beside them are ids and attributes.
_OF_BODY = 0.5
#: Ids in one request.
_MOST_IDS = 100_000
#: Longest time of one call, waits for a compaction included.
_TIMEOUT_S = 3600.0

_Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowInput:
    """Files of rows, which are read in parts."""

    file: VectorFile
    ids: Path | None = None
    attributes: Path | None = None

    def parts(self, most: int) -> Iterator[tuple[_Array, _Array | None, Any, int | None]]:
        """Vectors (n, dim) float32, their ids, a table of their attributes, and how many rows there are in all, where
        that is known.

        Raises:
            InvalidInputError: a file cannot be read, they do not fit each other, or a row holds what no row may.
        """
        ids = None if self.ids is None else load_ids(self.ids, "--ids")
        table = None if self.attributes is None else read_table(self.attributes)
        opened = open_file(Path(self.file.path), self.file)
        total = opened.count if isinstance(opened, Batches) else len(opened)
        for name, given in (("--ids", ids), ("--attributes", table)):
            if given is not None and total is not None and len(given) != total:
                raise InvalidInputError(
                    f"{name} has {len(given)} rows, but {self.file.path} has {total}; expected as many"
                )
        at = 0
        for vectors, own in _parts(opened, most):
            if own is not None and ids is not None:
                raise InvalidInputError(
                    f"--ids is given, but {self.file.path} has ids of its own; expected only one of them"
                )
            n, numbers = len(vectors), own if ids is None else ids[at : at + len(vectors)]
            part = None if table is None else table.slice(at, n)
            if (numbers is not None and len(numbers) != n) or (part is not None and len(part) != n):
                raise InvalidInputError(f"--ids or --attributes ends after row {at}, before {self.file.path} does")
            rows = as_float32(np.asarray(vectors))
            if rows.ndim == 2 and (unusable := find_unusable(rows)) is not None:
                raise InvalidInputError(f"{self.file.path}, row {at + unusable[0]}, {unusable[1]}")
            yield rows, numbers, part, total
            at += n


def _parts(opened: _Array | Batches, most: int) -> Iterator[tuple[_Array, _Array | None]]:
    if isinstance(opened, Batches):
        try:
            for batch in opened.batches:
                vectors, ids = batch if isinstance(batch, tuple) else (batch, None)
                for at in range(0, len(vectors), most):
                    yield vectors[at : at + most], None if ids is None else ids[at : at + most]
        finally:
            opened.batches.close()
        return
    if not holds_vectors(opened.dtype) and opened.dtype.kind not in "iu":
        raise InvalidInputError(f"vectors have dtype {opened.dtype}; expected {ELEMENTS}")
    if opened.ndim != 2:
        raise InvalidInputError(f"vectors have shape {opened.shape}; expected (n, dim)")
    for at in range(0, len(opened), most):
        yield opened[at : at + most], None


def _most_rows(dim: int, most_bytes: int = _MOST_BYTES) -> int:
    return max(1, min(MOST_ROWS, min(most_bytes, _MOST_BYTES) // (4 * dim)))


class RowTarget(Protocol):
    """Where rows go: an index, or the daemon that serves it."""

    #: How many rows were added or replaced.
    done: int

    @property
    def most_rows(self) -> int:
        """Of one call."""

    def add(self, vectors: _Array, ids: Any, attributes: Any, *, replace: bool) -> int:
        """How many took the place of others."""

    def delete(self, ids: _Array | None, where: str | None) -> int: ...

    def compact(self, progress: CliProgress) -> dict[str, Any]: ...

    def facts(self) -> dict[str, Any]:
        """Of the index now."""


class _Directly:
    def __init__(self, path: Path) -> None:
        self._index = hx.open(path, verify="quick")
        self.done = 0

    @property
    def most_rows(self) -> int:
        return _most_rows(self._index.dim)

    def add(self, vectors: _Array, ids: Any, attributes: Any, *, replace: bool) -> int:
        try:
            there = self._add(vectors, ids, attributes, replace=replace)
        except BusyWritingError as error:
            err.print(f"{error}; compacting", highlight=False)
            self._index.compact()
            there = self._add(vectors, ids, attributes, replace=replace)
        self.done += len(vectors)
        return there

    def _add(self, vectors: _Array, ids: Any, attributes: Any, *, replace: bool) -> int:
        if replace:
            return self._index.upsert(vectors, ids, attributes)
        self._index.add(vectors, ids, attributes)
        return 0

    def delete(self, ids: _Array | None, where: str | None) -> int:
        return self._index.delete(ids, where=where)

    def compact(self, progress: CliProgress) -> dict[str, Any]:
        done = self._index.writer.compact(progress)
        rows = {} if done is None else {"count": done.count, "split": done.n_split, "dissolved": done.n_dissolved}
        return {"compacted": done is not None, "generation": self._index.ivf.generation, **rows}

    def facts(self) -> dict[str, Any]:
        index = self._index
        return {"count": index.count, "added": index.n_added, "deleted": index.n_deleted, "live": index.n_live}

    def close(self) -> None:
        self._index.close()


class _ByDaemon:
    def __init__(self, client: Client, status: dict[str, Any]) -> None:
        self._client = client
        limits = status.get("limits", {})  # a daemon of 0.2 reports none
        body_bytes = limits.get("max_body_bytes", 2 * _MOST_BYTES)
        self.most_rows = min(
            _most_rows(int(status["index"]["dim"]), int(_OF_BODY * body_bytes)), limits.get("max_rows", MOST_ROWS)
        )
        self.done = 0

    def add(self, vectors: _Array, ids: Any, attributes: Any, *, replace: bool) -> int:
        there = 0
        if replace:
            there = self._client.upsert(vectors, ids, attributes)
        else:
            self._client.add(vectors, ids, attributes)
        self.done += len(vectors)
        return there

    def delete(self, ids: _Array | None, where: str | None) -> int:
        if ids is None or where is not None:
            return self._client.delete(ids, where=where)
        return sum(self._client.delete(ids[at : at + _MOST_IDS]) for at in range(0, max(1, len(ids)), _MOST_IDS))

    def compact(self, progress: CliProgress) -> dict[str, Any]:
        progress("compact", 0, None)
        return self._client.compact()

    def facts(self) -> dict[str, Any]:
        status = self._client.status()
        changes = status["changes"]
        return {"count": status["index"]["count"], **{name: changes[name] for name in ("added", "deleted", "live")}}

    def close(self) -> None:
        self._client.close()


class _Closing(AbstractContextManager[RowTarget]):
    def __init__(self, target: RowTarget, close: Callable[[], None], again: str, as_json: bool | None) -> None:
        self._target, self._close, self._again, self._as_json = target, close, again, as_json

    def __enter__(self) -> RowTarget:
        return self._target

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
        done = self._target.done
        if error is None or not done:
            return
        said = f"{done:,} rows are already in the index; {self._again}"
        if isinstance(error, KeyboardInterrupt) and self._as_json is not None:
            # Typer would pass over what a KeyboardInterrupt says.
            sys.exit(fail(KeyboardInterrupt(f"interrupted; {said}"), as_json=self._as_json))
        err.print(said, highlight=False)


def open_target(
    index: Path,
    key: str | None,
    *,
    upkeep: bool = False,
    again: str = "with ids, repeat the command with --upsert",
    as_json: bool | None = None,
) -> AbstractContextManager[RowTarget]:
    """The daemon that serves ``index``, or a node of its cluster, where there is one and it takes changes; else the
    index itself.

    Args:
        upkeep: for what needs the role admin.
        again: what is said to who stops midway.
        as_json: how a Ctrl-C after the first rows is told, with their number; None: by the caller, without it.

    Raises:
        UnreachableError: the daemon starts or stops, or no node answers. AccessDeniedError: it wants another key.
    """
    from hybridindex.cluster.reach import client_of  # it loads what else places lists

    found: object = "a cluster serves it"
    if (daemon := find_daemon(index)) is None:
        node = client_of(index, key=key, upkeep=upkeep, timeout_s=_TIMEOUT_S)
        if node is None:
            direct = _Directly(index)
            return _Closing(direct, direct.close, again, as_json)
        client = node
    else:
        found = daemon
        if not daemon.urls:
            raise UnreachableError(f"the daemon with pid {daemon.pid} does not listen yet; try again later")
        client = Client(daemon.urls[0], key=key, index=daemon.index, timeout_s=_TIMEOUT_S)
    try:
        status = client.status()
    except AccessDeniedError as error:
        client.close()
        raise AccessDeniedError(f"{found}; {error}; pass a key with --key or HYBRIDINDEX_KEY") from error
    except BaseException:
        client.close()
        raise
    if status.get("changes", {}).get("writes"):  # a daemon of 0.2 has none
        by_daemon = _ByDaemon(client, status)
        return _Closing(by_daemon, by_daemon.close, again, as_json)
    client.close()
    err.print(f"{found} and accepts no changes: writing to the index directly", highlight=False)
    direct = _Directly(index)
    return _Closing(direct, direct.close, again, as_json)
