"""Reading and writing files. A :class:`File` is one thread's."""

from __future__ import annotations

import ctypes
import errno
import io
import mmap
import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hybridindex.errors import file_error
from hybridindex.filesystem.calls import (
    StrPath,
    discard,
    exists,
    is_file,
    performing,
    replace,
    seen,
    sync_folder,
    unlink,
    watched,
)

__all__ = [
    "File",
    "array_bytes",
    "file_digest",
    "map_array",
    "map_file",
    "open_for_reading",
    "open_for_writing",
    "open_text",
    "open_zip",
    "read_array",
    "read_arrays",
    "read_bytes",
    "read_text",
    "replace_file",
    "replacing",
    "write_arrays",
    "write_bytes",
]
#: What a read gives a digest at a time.
_CHUNK_BYTES = 8 << 20
#: linux/falloc.h: keep the size, punch a hole; Python names neither.
_PUNCH_HOLE = 0x01 | 0x02


@cache
def _fallocate() -> Any:
    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return call


class File(io.FileIO):
    """An open file without a buffer, every call of which is seen. Read and written in order, or written by position."""

    def __init__(
        self, path: StrPath, mode: Literal["r", "r+", "w", "a", "x", "w+"], *, permissions: int = 0o666
    ) -> None:
        """``permissions``: of a new file, less the process's mask."""
        self._path = os.fspath(path)
        with performing("open" if mode in ("r", "r+", "a") else "create", path):
            super().__init__(self._path, mode, opener=lambda name, flags: os.open(name, flags, permissions))

    def readinto(self, buffer: Any, /) -> int | None:
        with performing("read", self._path):
            return super().readinto(buffer)

    def read(self, size: int | None = -1, /) -> bytes:
        with performing("read", self._path):
            return super().read(-1 if size is None else size) or b""

    def readall(self) -> bytes:
        with performing("read", self._path):
            return super().readall() or b""

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Bytes [offset, offset + nbytes); fewer beyond the end of the file."""
        with performing("read", self._path):
            parts = []
            while nbytes and (part := os.pread(self.fileno(), nbytes, offset)):
                parts.append(part)
                offset, nbytes = offset + len(part), nbytes - len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)

    def write(self, data: Any, /) -> int:
        """Writes what the system takes; buffers around it write the rest."""
        view = memoryview(data).cast("B")
        try:
            # A pipe has no offset.
            if watched():
                view = view[: seen("write", self._path, offset=self.tell(), data=view)]
            return super().write(view)
        except OSError as error:
            raise file_error(error, "write", self._path) from error

    def write_at(self, data: Any, offset: int) -> None:
        """All of a C-contiguous buffer, at ``offset`` bytes."""
        view = memoryview(data).cast("B")
        try:
            while view.nbytes:
                count = os.pwrite(self.fileno(), view[: seen("write", self._path, offset=offset, data=view)], offset)
                view, offset = view[count:], offset + count
        except OSError as error:
            raise file_error(error, "write", self._path) from error

    def reserve(self, nbytes: int) -> None:
        """Sets the length and claims its disk space now, so that a full disk shows before the work is done."""
        with performing("truncate", self._path):
            if nbytes:
                try:
                    os.posix_fallocate(self.fileno(), 0, nbytes)
                except OSError as error:
                    if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                        raise
            os.ftruncate(self.fileno(), nbytes)

    def extend(self, nbytes: int) -> None:
        """Sets a greater length without claiming disk space: what is not written reads as zeros."""
        with performing("truncate", self._path):
            os.ftruncate(self.fileno(), nbytes)

    def punch(self, start: int, stop: int) -> bool:
        """Gives back the disk space of bytes [start, stop), which then read as zeros; the length stays. False: the file
        system cannot, and nothing has changed."""
        with performing("punch", self._path):
            if _fallocate()(self.fileno(), _PUNCH_HOLE, start, stop - start) == 0:
                return True
            code = ctypes.get_errno()
            if code in (errno.EOPNOTSUPP, errno.ENOSYS):
                return False
            raise OSError(code, os.strerror(code))

    def cut(self, nbytes: int) -> None:
        """Leaves the first bytes alone."""
        with performing("truncate", self._path):
            os.ftruncate(self.fileno(), nbytes)

    def close(self) -> None:
        try:
            super().close()
        except OSError as error:
            raise file_error(error, "write", self._path) from error

    def status(self) -> os.stat_result:
        """As :func:`stat` of the file that is open, whatever has its name now."""
        with performing("look at", self._path):
            return os.fstat(self.fileno())

    def sync(self) -> None:
        """What was written survives a power cut."""
        with performing("sync", self._path):
            os.fsync(self.fileno())


def open_for_reading(path: StrPath) -> io.BufferedReader:
    return io.BufferedReader(File(path, "r"))


def open_for_writing(
    path: StrPath, mode: Literal["w", "a", "x"] = "w", *, permissions: int = 0o666
) -> io.BufferedWriter:
    return io.BufferedWriter(File(path, mode, permissions=permissions))


def open_text(
    path: StrPath,
    mode: Literal["r", "w", "a"] = "r",
    *,
    encoding: str = "utf-8",
    errors: str = "strict",
    newline: str | None = None,
) -> io.TextIOWrapper:
    binary = open_for_reading(path) if mode == "r" else open_for_writing(path, mode)
    return io.TextIOWrapper(binary, encoding=encoding, errors=errors, newline=newline)


def read_bytes(path: StrPath) -> bytes:
    with File(path, "r") as file:
        return file.readall()


def read_text(path: StrPath, *, encoding: str = "utf-8", errors: str = "strict") -> str:
    return read_bytes(path).decode(encoding, errors)


def read_array(path: StrPath) -> npt.NDArray[Any]:
    """A ``.npy`` file. Raises ValueError or EOFError for another content."""
    # From memory: numpy would read a file past us.
    content = io.BytesIO(read_bytes(path))
    try:
        array: npt.NDArray[Any] = np.load(content, allow_pickle=False)
    except (ValueError, EOFError):
        raise
    except Exception as error:  # numpy parses the header as Python, and raises what the parser does
        raise ValueError(f"{path} holds no array: {error}") from error
    return array


@contextmanager
def open_zip(path: StrPath) -> Iterator[zipfile.ZipFile]:
    """An archive, to read."""
    with open_for_reading(path) as file, zipfile.ZipFile(file) as archive:
        yield archive


def array_bytes(array: npt.NDArray[Any]) -> bytes:
    """The content of a ``.npy`` file."""
    content = io.BytesIO()
    np.save(content, array, allow_pickle=False)
    return content.getvalue()


def read_arrays(path: StrPath) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a ``.npz`` file, by name. Raises ValueError, EOFError or BadZipFile for another content."""
    with open_for_reading(path) as file, np.load(file, allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files}


def write_arrays(path: StrPath, /, **arrays: npt.NDArray[Any]) -> None:
    """As a ``.npz`` file; or into a device or a pipe."""
    if exists(path) and not is_file(path):
        # These tell no position, which numpy asks for.
        content = io.BytesIO()
        np.savez(content, **arrays)  # type: ignore[arg-type]
        write_bytes(path, content.getvalue())
        return
    with open_for_writing(path) as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def file_digest(path: StrPath, make: Callable[[], Any], *, progress: Callable[[int], None] | None = None) -> str:
    """Hexadecimal digest of a whole file in constant memory; ``progress`` gets the number of bytes read so far."""
    state = make()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    done = 0
    with File(path, "r") as file:
        while count := file.readinto(buffer):
            state.update(buffer[:count])
            done += count
            if progress is not None:
                progress(done)
    return str(state.hexdigest())


def write_bytes(path: StrPath, data: bytes) -> None:
    """Into the file itself, as into a pipe or a terminal; :func:`replace_file` is for what shall be whole."""
    with open_for_writing(path) as file:
        file.write(data)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside ``path`` to write to. What lies there becomes ``path`` when the block ends well: readers, and a
    start after a power cut, find the old file or the new one, whole. One writer of a path at a time."""
    beside = path.with_name(f"{path.name}.new")
    try:
        unlink(beside, missing_ok=True)
        yield beside
        with File(beside, "r") as file:
            file.sync()
        replace(beside, path)
    except BaseException:
        discard(beside)
        raise
    sync_folder(path.parent)


def copy_file(path: StrPath, to: StrPath) -> None:
    """The content of a file as a new one, safely on disk."""
    with File(path, "r") as source, File(to, "x") as file:
        buffer, at = memoryview(bytearray(_CHUNK_BYTES)), 0
        while count := source.readinto(buffer):
            file.write_at(buffer[:count], at)
            at += count
        file.sync()


def replace_file(path: Path, data: bytes | str, *, permissions: int = 0o666) -> None:
    """``data``, text as UTF-8, as the whole content of ``path``, as :func:`replacing` does it."""
    with replacing(path) as beside, open_for_writing(beside, "x", permissions=permissions) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def map_file(path: StrPath) -> mmap.mmap:
    """A file that is not empty, to read."""
    with File(path, "r") as file, performing("map", path):
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)


def map_array(
    path: StrPath, dtype: npt.DTypeLike, shape: tuple[int, ...] | None = None, *, mode: Literal["r", "r+"] = "r"
) -> npt.NDArray[Any]:
    """A file as an array; with ``r+``, what is written to the array goes into the file."""
    with performing("map", path):
        return np.memmap(path, dtype=dtype, mode=mode, shape=shape)
