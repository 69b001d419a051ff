"""Making a share, and changing which lists an open one holds, while searches run.

A share is an index directory whose ``lists.bin`` has its full length and the bytes of some lists only. The rest are
holes, which take no room where the file system has them. All else is that of the index, with ``share.json`` beside it
(:mod:`hybridindex.index.share.record`).

:class:`hybridindex.index.integrity.Integrity` says what a search may scan. A list that comes is scanned after its bytes
were proven in the mapping, synced and recorded. One that goes is not scanned any more before its bytes go, and a batch
that scanned it meanwhile is searched again.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
from filelock import Timeout

from hybridindex import filesystem
from hybridindex.errors import (
    BuildError,
    CorruptIndexError,
    FileError,
    InvalidInputError,
    NotHeldError,
    UnsupportedIndexError,
    cannot_write,
)
from hybridindex.index.integrity import Integrity, name_lists
from hybridindex.index.share.beside import prove_ids, put_attributes, put_codes, read_ids
from hybridindex.index.share.record import read_held, render_held
from hybridindex.index.share.source import FILES, FolderSource, IndexSource, ListSource
from hybridindex.index.storage.additions import adding_to_generation
from hybridindex.index.storage.checksums import digest_bytes
from hybridindex.index.storage.generation import (
    CURRENT_FILE,
    GenerationWriter,
    as_path,
    generation_name,
    point,
    read_current,
    scratch_of,
    writers_lock,
)
from hybridindex.index.storage.list_digests import list_spans, read_digests
from hybridindex.index.storage.lists import read_table
from hybridindex.index.storage.manifest import (
    DIGESTS_FILE,
    IDS_FILE,
    LISTS_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    SHARE_FILE,
    TABLE_FILE,
    Manifest,
    parse_manifest,
)
from hybridindex.processes import KeptLock
from hybridindex.types import I64

__all__ = ["HoldProgress", "Share", "add_to_share", "create_share", "renew_share", "switch_share"]

_log = logging.getLogger(__name__)

_PAGE = mmap.PAGESIZE
#: For another one that changes which generations there are.
_LOCK_S = 10.0
#: In the folder of the generation; held by who changes the share.
_LOCK_FILE = "share.lock"
#: Lists that come are recorded, and scanned, so far apart: batches that are under way are then searched again.
_RECORDED_S = 1.0
#: Zeros that are written at once where the file system makes no holes.
_ZEROS = bytes(1 << 20)

#: ``progress(lists_left, bytes_left)``.
HoldProgress = Callable[[int, int], None]


def create_share(path: str | Path, source: IndexSource) -> None:
    """Makes a share at ``path``, new or empty, that holds no list yet. It has the fingerprint and the generation of the
    index.

    Raises:
        UnsupportedIndexError: rows were added or deleted since the lists were written, or no share can be made of lists
            that are stored so.
        CorruptIndexError: the source gives other bytes than its manifest says, or lacks a file.
        InvalidInputError: ``path`` holds something else. IndexExistsError: it holds an index.
        DiskFullError, BuildError: as :func:`hybridindex.index.build.build`.
    """
    files = source.files()
    lacking = sorted(set(FILES) - set(files))
    if lacking:
        raise CorruptIndexError(f"the source lacks {', '.join(lacking)}")
    manifest = parse_manifest(files[MANIFEST_FILE], f"{MANIFEST_FILE} of the source")
    if manifest.layout == "blocks16" or (manifest.layout == "pqfs32" and manifest.by_residual):
        residual = " of residuals" if manifest.by_residual else ""
        cure = "open the index once, which converts it" if manifest.layout == "blocks16" else "build it as pq<M>"
        raise UnsupportedIndexError(
            f"lists are stored as {manifest.layout}{residual}, of which no share can be made: {cure}"
        )
    for name in (MODEL_FILE, TABLE_FILE):
        if digest_bytes(files[name]) != manifest.files[name].xxh3_128:
            raise CorruptIndexError(f"{name} of the source differs from its checksum in the manifest")
    with GenerationWriter(as_path(path), number=manifest.generation) as writer:
        for name in (MODEL_FILE, TABLE_FILE, DIGESTS_FILE):
            writer.open_file(name).append(files[name])
        table = read_table(writer.directory, manifest)
        digests = read_digests(writer.directory / DIGESTS_FILE, manifest.files[LISTS_FILE].xxh3_128, manifest.nlist)
        if digests is None:
            raise CorruptIndexError(f"{DIGESTS_FILE} of the source is damaged, or of another index")
        spans = list_spans(table, manifest.code_size, manifest.layout)
        prove_ids(files[IDS_FILE], spans, digests, f"{IDS_FILE} of the source")
        writer.open_file(IDS_FILE).append(files[IDS_FILE])
        writer.open_file(LISTS_FILE).extend(manifest.files[LISTS_FILE].size)
        writer.open_file(SHARE_FILE).append(render_held(np.zeros(manifest.nlist, dtype=np.bool_), manifest))
        writer.commit(manifest)
        put_attributes(writer.path, writer.directory, manifest, files)
        codes = source.folder if isinstance(source, FolderSource) else None
        put_codes(writer.path, writer.directory, manifest, table[:, 0], codes)


def renew_share(path: str | Path, source: FolderSource) -> None:
    """Gives a share that nobody has open the attributes and codes that its index has now, and ids where it has none or
    damaged ones. Lists stay as they are.

    Raises:
        InvalidInputError: ``path`` holds no share of the index.
        CorruptIndexError: the index has other ids than its digests say. UnreadableIndexError: a file cannot be read.
        BuildError: another process is writing. DiskFullError: no room.
    """
    folder, raw = read_current(as_path(path)), source.file(MANIFEST_FILE)
    manifest = parse_manifest(raw, f"{MANIFEST_FILE} of the source")
    digests = read_digests(folder / DIGESTS_FILE, manifest.files[LISTS_FILE].xxh3_128, manifest.nlist)
    if digests is None or filesystem.read_bytes(folder / MANIFEST_FILE) != raw:
        raise InvalidInputError(f"{path} is not a share of the source's index")
    table = read_table(folder, manifest)
    spans = list_spans(table, manifest.code_size, manifest.layout)
    try:
        read_ids(folder, spans, digests)
    except CorruptIndexError:
        ids = source.file(IDS_FILE)
        prove_ids(ids, spans, digests, f"{IDS_FILE} of the source")
        with adding_to_generation(folder.parent, folder):
            filesystem.replace_file(folder / IDS_FILE, ids)
    put_attributes(folder.parent, folder, manifest, source.attributes())
    put_codes(folder.parent, folder, manifest, table[:, 0], source.folder)


def add_to_share(path: str | Path, source: FolderSource) -> None:
    """Puts a share of another generation beside the one that is current at ``path``, which stays so. It has no lists.

    Raises:
        As :func:`create_share`, but for what ``path`` holds. InvalidInputError: it holds no share.
    """
    path = as_path(path)
    read_current(path)
    folder = path / generation_name(source.manifest.generation)
    # Whoever looks for what a writer left removes it.
    scratch = scratch_of(path, folder.name)
    with writers_lock(path, timeout_s=_LOCK_S):
        for old in (folder, scratch):
            if filesystem.exists(old):
                filesystem.remove_tree(old)
        try:
            create_share(scratch, source)
            filesystem.rename(scratch / folder.name, folder)
            filesystem.sync_folder(path)
        finally:
            if filesystem.exists(scratch):
                filesystem.remove_tree(scratch)


def switch_share(path: str | Path, generation: int) -> None:
    """Makes another generation of a share the current one: who opens it from now on gets that one.

    Raises:
        BuildError: another process is writing. DiskFullError, FileError: the one before is the current one.
    """
    path = as_path(path)
    with writers_lock(path, timeout_s=_LOCK_S):
        point(path, CURRENT_FILE, generation_name(generation))


class Share:
    """What an open share holds. Thread-safe; calls of :meth:`hold` take turns, and lists may be dropped meanwhile.

    Who changes a share first is the only one until it is closed. Others that had it open do not see lists go: nobody
    else may search it meanwhile.
    """

    def __init__(self, manifest: Manifest, integrity: Integrity, extents: I64, recorded: npt.NDArray[np.bool_]) -> None:
        """Made by :func:`hybridindex.index.opening.open_index`.

        Args:
            extents: the (nlist, 3) table.
            recorded: (nlist,) bool: what the record said when it was opened.
        """
        self._manifest, self._integrity = manifest, integrity
        self._recorded = recorded
        self._table = extents
        #: (nlist,) int64: bytes of the codes and ids of each list.
        self._nbytes: I64 = (integrity.spans[:, :, 1] - integrity.spans[:, :, 0]).sum(axis=1)
        self._claim_file = KeptLock(integrity.folder / _LOCK_FILE, timeout_s=0)
        self._has_claim = self._is_closed = False
        self._holding = threading.Lock()
        #: Held while bytes or the record change.
        self._changing = threading.Lock()
        #: Lists whose bytes were written, and which are not recorded yet.
        self._written = np.zeros(manifest.nlist, dtype=np.bool_)

    def close(self) -> None:
        """Others may change the share from now on, and this one may not. A second call does nothing."""
        with self._changing:
            self._is_closed = True
            self._claim_file.let_go()

    def _claim(self) -> None:
        """For who changes the share."""
        path = self._integrity.folder.parent
        if self._is_closed:
            raise InvalidInputError(f"the share {str(path)!r} was closed")
        if self._has_claim:
            return
        try:
            self._claim_file.__enter__()
        except Timeout as error:
            raise BuildError(
                f"lists of {path} come and go where it is open already; do it there, or end that"
            ) from error
        recorded = read_held(self._integrity.folder, self._manifest)
        if recorded is None or not np.array_equal(recorded, self._recorded):
            self._claim_file.let_go()
            raise BuildError(f"lists of {path} came or went since it was opened; open it again")
        self._has_claim = True

    @property
    def held(self) -> npt.NDArray[np.bool_]:
        """(nlist,) bool: lists that searches may scan now; a damaged one is not held until it is given anew."""
        quarantined = self._integrity.quarantined
        return np.ones(self._manifest.nlist, dtype=np.bool_) if quarantined is None else ~quarantined

    @property
    def held_bytes(self) -> int:
        """Bytes of their codes and ids."""
        return int(self._nbytes[self.held].sum())

    def hold(
        self,
        lists: Iterable[int],
        source: ListSource,
        *,
        bytes_per_s: float | None = None,
        progress: HoldProgress | None = None,
        stop: threading.Event | None = None,
    ) -> int:
        """Takes lists from ``source``, in the order in which it gives them. Each is scanned, at the latest, when this
        returns; those that are held already are left alone.

        Args:
            bytes_per_s: most bytes that are written a second; None: as fast as it goes.
            progress: told after each list how many lists and bytes are left.
            stop: when it is set, what has come is held and the rest is not.

        Returns:
            Bytes written.

        Raises:
            InvalidInputError: there is no such list.
            CorruptIndexError: the source gave other bytes than were written, or they read back differently here; names
                the list. NotHeldError: the source does not give them all.
            DiskFullError, BuildError: they cannot be written, or another one changes the share.
            Whatever the source raises. Lists that came in the last second before an error may not be held.
        """
        with self._holding:
            return self._hold(self._checked(lists), source, bytes_per_s, progress, stop or threading.Event())

    def _hold(
        self,
        lists: list[int],
        source: ListSource,
        bytes_per_s: float | None,
        progress: HoldProgress | None,
        stop: threading.Event,
    ) -> int:
        held = self.held
        wanted = [list_id for list_id in lists if not held[list_id]]
        left = {list_id: int(self._nbytes[list_id]) for list_id in wanted}
        bytes_left = sum(left.values())
        if not wanted:
            return 0
        fresh: list[int] = []
        written, started_s = 0, time.monotonic()
        recorded_s = started_s
        try:
            with self._typed("lists that were recorded are held"), filesystem.File(self._integrity.file, "r+") as file:
                self._lengthen(file)
                for list_id, codes, ids in source.read(wanted):
                    if stop.is_set():
                        break
                    if list_id not in left:
                        raise CorruptIndexError(f"the source gave list {list_id}, which was not asked for")
                    self._prove(list_id, codes, ids)
                    self._write(file, list_id, codes, ids)
                    fresh.append(list_id)
                    nbytes = left.pop(list_id)
                    written, bytes_left = written + nbytes, bytes_left - nbytes
                    if time.monotonic() - recorded_s >= _RECORDED_S:
                        self._record(file, fresh)
                        fresh, recorded_s = [], time.monotonic()
                    if progress is not None:
                        progress(len(left), bytes_left)
                    if bytes_per_s is not None:
                        stop.wait(max(0.0, started_s + written / bytes_per_s - time.monotonic()))
                self._record(file, fresh)
                fresh = []
        finally:
            with self._changing:
                self._written[fresh] = False
        if left and not stop.is_set():
            missing = sorted(left)
            raise NotHeldError(f"the source did not give {name_lists(missing)}", lists=missing)
        return written

    def drop(self, lists: Iterable[int]) -> int:
        """Lets lists go, and their disk space; those that are not held are left alone.

        Returns:
            Bytes of their codes and ids.

        Raises:
            InvalidInputError: there is no such list.
            DiskFullError, BuildError: the record cannot be written, or another one changes the share, and all are held
                as before; or the disk space stays taken, which the message says.
        """
        chosen = self._checked(lists)
        with self._changing:
            held = self.held
            absent = self._integrity.absent
            assert absent is not None
            # A damaged one goes, too.
            going = np.zeros_like(held)
            going[chosen] = True
            going &= ~absent
            if not going.any():
                return 0
            gone = np.flatnonzero(going).tolist()
            with self._typed("all lists are held as before"):
                self._claim()
                self._write_record(held & ~going)
            # Nobody compares bytes with digests meanwhile.
            with (
                self._typed(f"{name_lists(gone)} went, and their disk space is still taken"),
                self._integrity.looking,
            ):
                self._integrity.let_go(gone)
                with filesystem.File(self._integrity.file, "r+") as file:
                    self._clear(file, going, held & ~going | self._written)
        return int(self._nbytes[gone].sum())

    def read(self, lists: Iterable[int]) -> Iterator[tuple[int, bytes, bytes]]:
        """List id, codes and ids of each list, in order, as they were written; for peers.

        Raises:
            InvalidInputError: there is no such list.
            NotHeldError: this share does not hold some of them, or does not any more.
        """
        wanted = self._checked(lists)
        held = self.held
        self._refuse([list_id for list_id in wanted if not held[list_id]])
        return self._read(wanted)

    def _read(self, lists: list[int]) -> Iterator[tuple[int, bytes, bytes]]:
        for list_id in lists:
            codes, ids = self._integrity.read_file(list_id, 0), self._integrity.read_file(list_id, 1)
            if codes is None or ids is None:
                self._refuse([list_id])
                return
            yield list_id, codes, ids

    def _refuse(self, lists: list[int]) -> None:
        if lists:
            raise NotHeldError(
                f"the share {self._integrity.folder.parent.name} does not hold {name_lists(lists)}", lists=lists
            )

    def _checked(self, lists: Iterable[int]) -> list[int]:
        """Each once, in order."""
        ids = list(dict.fromkeys(int(list_id) for list_id in lists))
        wrong = next((list_id for list_id in ids if not 0 <= list_id < self._manifest.nlist), None)
        if wrong is not None:
            raise InvalidInputError(f"lists holds {wrong}; expected 0 to {self._manifest.nlist - 1}")
        return ids

    # What comes

    def _prove(self, list_id: int, codes: bytes, ids: bytes) -> None:
        """Raises CorruptIndexError: a source gave other bytes than were written."""
        for part, (content, what) in enumerate(((codes, "codes"), (ids, "ids"))):
            start, stop = self._integrity.spans[list_id, part].tolist()
            if len(content) != stop - start:
                raise CorruptIndexError(
                    f"the source gave {len(content)} bytes of {what} for list {list_id}; expected {stop - start}"
                )
            if not self._integrity.is_good(list_id, part, content):
                raise CorruptIndexError(f"the {what} of list {list_id} that the source gave differ from their digest")

    def _write(self, file: filesystem.File, list_id: int, codes: bytes, ids: bytes) -> None:
        """Into the mapped file, and proven as scans read it."""
        integrity = self._integrity
        (start, _), (ids_start, _) = integrity.spans[list_id].tolist()
        with self._changing:
            self._claim()
            # Before the first byte: no page of it may go from now on.
            self._written[list_id] = True
            try:
                file.write_at(codes, start)
                file.write_at(ids, ids_start)
                if not all(integrity.whole(list_id)):
                    # Once they could not be read, and zeros lie over them since.
                    with integrity.looking:
                        integrity.map_again()
                    if not all(integrity.whole(list_id)):
                        raise CorruptIndexError(
                            f"{integrity.file}: list {list_id} was written, and reads back differently"
                        )
            except BaseException:
                self._written[list_id] = False
                raise

    def _lengthen(self, file: filesystem.File) -> None:
        """Gives the file its length again, where it was cut."""
        with self._changing:
            self._claim()
            nbytes = self._manifest.files[LISTS_FILE].size
            if self._integrity.mapped.length() < nbytes:
                # What was cut is known to be gone before it reads as zeros.
                self._integrity.catch_up()
                file.extend(nbytes)

    def _record(self, file: filesystem.File, lists: list[int]) -> None:
        """Lists that were written are held from now on."""
        if not lists:
            return
        with self._changing:
            self._claim()
            file.sync()
            held = self.held
            held[lists] = True
            self._write_record(held)
            self._integrity.take(lists)
            self._written[lists] = False

    def _write_record(self, held: npt.NDArray[np.bool_]) -> None:
        filesystem.replace_file(self._integrity.folder / SHARE_FILE, render_held(held, self._manifest))

    # What goes

    def _clear(self, file: filesystem.File, going: npt.NDArray[np.bool_], kept: npt.NDArray[np.bool_]) -> None:
        """Gives back the pages of ``going`` that hold no byte of ``kept``, both (nlist,) bool."""
        _, capacity, offset = self._table.T
        kept, going = kept & (capacity > 0), going & ~kept
        ends = offset + capacity * (self._manifest.code_size + 8)
        # First and last byte that is kept on both sides of each list: extents lie in the order of their ids.
        before = np.maximum.accumulate(np.concatenate([[0], np.where(kept, ends, 0)[:-1]]))
        size = -(-self._manifest.files[LISTS_FILE].size // _PAGE) * _PAGE
        after = np.minimum.accumulate(np.where(kept, offset, size)[::-1])[::-1]
        starts, stops = -(-before // _PAGE) * _PAGE, after // _PAGE * _PAGE
        holes = np.unique(np.stack([starts, stops], axis=1)[going], axis=0).tolist()
        if all(file.punch(start, stop) for start, stop in holes if start < stop):
            return
        for start, stop in self._integrity.spans[going].reshape(-1, 2).tolist():
            for first in range(start, stop, len(_ZEROS)):
                file.write_at(_ZEROS[: stop - first], first)

    @contextmanager
    def _typed(self, kept: str) -> Iterator[None]:
        """Errors of our own files become what they mean; others pass. ``kept``: what is still so."""
        path = self._integrity.folder.parent
        try:
            yield
        except FileError as error:
            if Path(str(error.filename)).is_relative_to(path):
                raise cannot_write(error, path, kept) from error
            raise
