"""The codes of an open index: found beside its rows, proven, read into memory by who scans them. Whoever cannot use
them serves the rows.

They are few bytes, and each search reads many of them. In memory, what becomes of the file changes no answer.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import weakref
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import numpy as np

from hybridindex import filesystem
from hybridindex.errors import CorruptIndexError, IndexFormatError, MissingFileError
from hybridindex.index.rabitq.encode import Blocks, decode_blocks
from hybridindex.index.rabitq.rotation import dot, pad, signs
from hybridindex.index.rabitq.spec import SPEC_FILE, RabitqSpec, parse_spec
from hybridindex.index.storage.checksums import digest_bytes, digest_file
from hybridindex.index.storage.generation import unreadable
from hybridindex.index.storage.huge_pages import empty_in_huge_pages
from hybridindex.index.storage.manifest import LISTS_FILE, Manifest
from hybridindex.types import F32, I64, U8

__all__ = ["RabitqCodes", "are_whole", "check_codes", "find_codes", "read_spec", "say_unusable"]

_log = logging.getLogger(__name__)


class RabitqCodes:
    """Codes of one generation. Any thread; what it hands out is read-only and stays valid as long as it is held.

    The file stays open until it is read: codes that replace it do not disturb those that were found.
    """

    def __init__(self, spec: RabitqSpec, path: Path, list_sizes: I64, centroids: Callable[[], F32]) -> None:
        """Made by :func:`find_codes`, which has checked all parts. Raises OSError where the file cannot be opened."""
        self.spec = spec
        self.path = path
        self._file = filesystem.File(path, "r")
        self._close = weakref.finalize(self, self._file.close)
        self.list_sizes = list_sizes
        #: (nlist + 1,) int64: the first block of each list, and the number of all blocks.
        self.block_starts: I64 = spec.block_starts(list_sizes)
        #: (nlist,) int64: bytes that a scan of each list reads.
        self.list_bytes: I64 = np.diff(self.block_starts) * spec.block_bytes
        #: (rounds, padded_dim) float32, each +1 or -1.
        self.signs: F32 = signs(spec.padded_dim, spec.seed, spec.rounds)
        self._centroids = centroids
        self._reading = threading.Lock()
        self._data: U8 | None = None
        self._locked = False
        for array in (self.block_starts, self.list_bytes, self.signs):
            array.setflags(write=False)

    @property
    def data(self) -> U8:
        """All blocks: (file_bytes,) uint8, read-only, from a multiple of 64. Reads the file the first time.

        Raises:
            CorruptIndexError: it is not what was written.
            UnreadableIndexError: it cannot be read.
        """
        data = self._data
        if data is None:
            with self._reading:
                data = self._data = self._read() if self._data is None else self._data
        return data

    def lock(self) -> None:
        """Keeps all blocks in memory as long as they are held. Where the system refuses, the log says so, once.

        Raises: as :attr:`data`.
        """
        data = self.data
        with self._reading:
            first, self._locked = not self._locked, True
        if not first or not data.nbytes:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        place = ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(data.nbytes)
        if libc.mlock(*place) == 0:
            weakref.finalize(data, libc.munlock, *place)
            return
        _log.warning(
            "%s: its %d bytes of codes are not locked in memory (%s), and may be swapped out; raise the limit "
            "(ulimit -l, LimitMEMLOCK=), or run without swap",
            self.path,
            data.nbytes,
            os.strerror(ctypes.get_errno()),
        )

    def _read(self) -> U8:
        """Once: it closes the file."""
        size = self.spec.file_bytes
        data = empty_in_huge_pages(size)
        view, done = data.data, 0
        try:
            with filesystem.performing("read", self.path):
                while done < size and (count := os.preadv(self._file.fileno(), [view[done:]], done)):
                    done += count
        except OSError as error:
            raise unreadable(error, self.path) from error
        if done < size or digest_bytes(view) != self.spec.file_xxh3_128:
            raise CorruptIndexError(f"{self.path} differs from its checksum in {SPEC_FILE}")
        data.setflags(write=False)
        self._close()
        return data

    @cached_property
    def centroid_sq(self) -> F32:
        """(nlist,) float32: |c|^2; 0 where codes have no g, which it would be for."""
        if self.spec.source == "faiss":
            return np.zeros(len(self.list_sizes), np.float32)
        centroids = pad(self._centroids(), self.spec.padded_dim)
        return dot(centroids, centroids)

    def list_blocks(self, list_id: int) -> U8:
        """The blocks of one list: (blocks * block_bytes,) uint8, a view."""
        start, stop = (int(at) * self.spec.block_bytes for at in self.block_starts[list_id : list_id + 2])
        return self.data[start:stop]

    def decode_list(self, list_id: int) -> Blocks:
        """What the codes of one list say."""
        return decode_blocks(self.list_blocks(list_id), int(self.list_sizes[list_id]), self.spec)

    def __repr__(self) -> str:
        return f"<RabitqCodes {self.spec.file} {self.spec.bits} bits, {self.spec.file_bytes} bytes>"


def read_spec(generation: Path, manifest: Manifest) -> RabitqSpec | None:
    """What the codes of a generation say of themselves; None where it has none.

    Raises:
        CorruptIndexError: it is damaged, or of other rows.
        UnsupportedIndexError: it is of a newer format version.
        UnreadableIndexError: it cannot be read.
    """
    file = generation / SPEC_FILE
    try:
        raw = filesystem.read_bytes(file)
    except MissingFileError:
        return None
    except OSError as error:
        raise unreadable(error, file) from error
    spec = parse_spec(raw, str(file))
    found = (spec.generation, spec.rows_xxh3_128, spec.count, spec.nlist, spec.dim, spec.metric)
    rows, metric = manifest.files[LISTS_FILE].xxh3_128, manifest.metric if spec.source == "rows" else "l2"
    said = (manifest.generation, rows, manifest.count, manifest.nlist, manifest.scan_dim, metric)
    if found != said:
        raise CorruptIndexError(f"{file} belongs to other rows: it has {found}, the manifest {said}")
    return spec


def check_codes(generation: Path, manifest: Manifest, list_sizes: I64, *, whole: bool) -> RabitqSpec | None:
    """Proves the codes of a generation, with ``whole`` every byte of them; None where it has none.

    Raises:
        CorruptIndexError, UnsupportedIndexError, UnreadableIndexError: as :func:`read_spec`; or the file of codes is
            missing, of another size, or differs from its checksum.
    """
    spec = read_spec(generation, manifest)
    if spec is None:
        return None
    file = generation / spec.file
    try:
        size = filesystem.stat(file).st_size
        digest = digest_file(file) if whole and size == spec.file_bytes else spec.file_xxh3_128
    except OSError as error:
        raise unreadable(error, file) from error
    if not size == spec.file_bytes == spec.file_bytes_for(list_sizes):
        raise CorruptIndexError(f"{file} has {size} bytes; expected {spec.file_bytes_for(list_sizes)}")
    if digest != spec.file_xxh3_128:
        raise CorruptIndexError(f"{file} differs from its checksum in {SPEC_FILE}")
    return spec


def are_whole(generation: Path, manifest: Manifest, list_sizes: I64) -> bool:
    """Whether a generation has codes that can be used. Reads all of them."""
    try:
        return check_codes(generation, manifest, list_sizes, whole=True) is not None
    except IndexFormatError:
        return False


def find_codes(
    generation: Path, manifest: Manifest, list_sizes: I64, centroids: Callable[[], F32], *, whole: bool
) -> tuple[RabitqCodes | None, str]:
    """The codes of a generation; or None, and why not where there should be some.

    Args:
        centroids: gives (nlist, scan_dim) float32 when they are needed.
        whole: compare every byte with its checksum.
    """
    while True:
        said = _said(generation)
        try:
            spec = check_codes(generation, manifest, list_sizes, whole=whole)
            if spec is None:
                return None, ""
            try:
                return RabitqCodes(spec, generation / spec.file, list_sizes, centroids), ""
            except OSError as error:
                raise unreadable(error, generation / spec.file) from error
        except IndexFormatError as error:
            # Where other codes took their place meanwhile, or none, those are looked at.
            if said == _said(generation):
                return None, say_unusable(generation.parent, error)


def _said(generation: Path) -> bytes | None:
    """What lies where the codes say what they are; None where nothing can be read."""
    try:
        return filesystem.read_bytes(generation / SPEC_FILE)
    except OSError:
        return None


def say_unusable(index: Path, error: IndexFormatError) -> str:
    """Logs why the codes of an index are not used, with what helps; returns it."""
    problem = f"{error}; searches read the rows; hybridindex compress {index} makes the codes again"
    _log.warning("the codes of %s are not used: %s", index, problem)
    return problem
