"""The right to change an index: one process has it at a time, for one change, or for as long as it likes.

idx/writer.lock     locked by the process that has it
idx/writer.json     who that is, and since when
"""

from __future__ import annotations

import datetime
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from hybridindex import filesystem
from hybridindex.errors import BuildError, ClaimedError, FileError, MissingFileError, cannot_write
from hybridindex.processes import lock_file

__all__ = ["WritersClaim", "claim_of"]

_LOCK, _WHO = "writer.lock", "writer.json"


class WritersClaim:
    """That of this process on one index. Made by :func:`claim_of`; from any thread."""

    def __init__(self, path: Path) -> None:
        # Wherever the process goes.
        self._path = path.absolute()
        self._lock: FileLock | None = None
        self._changing = threading.Lock()
        self._n_holders = 0
        #: Since when somebody in this process keeps it.
        self._kept_since = ""

    def is_of(self, folder: tuple[int, int]) -> bool:
        """Whether its path is still that folder: device and number."""
        try:
            found = filesystem.stat(self._path)
        except MissingFileError:  # with another error it may be: two claims would shut each other out
            return False
        return (found.st_dev, found.st_ino) == folder

    @contextmanager
    def held(self, timeout_s: float) -> Iterator[None]:
        """For one change.

        Raises:
            ClaimedError: another process has it, and keeps it for ``timeout_s``; names it.
        """
        self._take(timeout_s)
        try:
            yield
        finally:
            self._give_back()

    def keep(self, timeout_s: float) -> None:
        """Until :meth:`give_up`.

        Raises:
            ClaimedError: another process has it. BuildError: somebody in this one keeps it. Each names it.
        """
        if self._kept_since:
            raise BuildError(
                f"{self._path} is open for writing in this process, {os.getpid()}, since {self._kept_since}; close "
                "that first, or write with it"
            )
        self._take(timeout_s)
        self._kept_since = _now()

    def give_up(self) -> None:
        """The opposite of :meth:`keep`; a second call does nothing."""
        if self._kept_since:
            self._kept_since = ""
            self._give_back()

    def forget(self) -> None:
        """In a child process: it is the parent's, and stays so."""
        _carried.append(self._lock)
        self._lock, self._n_holders, self._kept_since = None, 0, ""
        self._changing = threading.Lock()

    def _take(self, timeout_s: float) -> None:
        with self._changing:
            if not self._n_holders:
                lock = lock_file(self._path / _LOCK, timeout_s=timeout_s)
                try:
                    lock.acquire()
                except Timeout as error:
                    raise ClaimedError(f"{self._path} is being written by {self._whose()}") from error
                except FileError as error:
                    raise cannot_write(error, self._path, "nothing has changed") from error
                self._lock = lock
                with suppress(FileError):  # it is for messages
                    said = {"pid": os.getpid(), "since": _now()}
                    filesystem.write_bytes(self._path / _WHO, json.dumps(said).encode())
            self._n_holders += 1

    def _give_back(self) -> None:
        with self._changing:
            self._n_holders -= 1
            if not self._n_holders and self._lock is not None:
                self._lock.release()
                self._lock = None

    def _whose(self) -> str:
        try:
            said = json.loads(filesystem.read_bytes(self._path / _WHO))
            return f"process {int(said['pid'])}, since {str(said['since'])[:40]}; write through it, or end it first"
        except (OSError, ValueError, KeyError, TypeError):
            return "another process; write through it, or end it first"


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


_claims: dict[tuple[int, int], WritersClaim] = {}
_making = threading.Lock()
#: Of a parent process: nobody may release them here.
_carried: list[FileLock | None] = []


def claim_of(path: Path) -> WritersClaim:
    """This process's claim on the index at ``path``."""
    found = filesystem.stat(path)
    key = (found.st_dev, found.st_ino)
    with _making:
        claim = _claims.get(key)
        # Of a folder that is gone, another one may have the number.
        if claim is None or not claim.is_of(key):
            claim = _claims[key] = WritersClaim(path)
        return claim


def _in_child() -> None:
    global _making
    _making = threading.Lock()
    for claim in _claims.values():
        claim.forget()


os.register_at_fork(after_in_child=_in_child)
