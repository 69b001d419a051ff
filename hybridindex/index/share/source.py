"""Where the files and lists of a share come from: an index directory, or another share, on disk. Peers that give them
over the network are the cluster's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from hybridindex import filesystem
from hybridindex.errors import CorruptIndexError, FileError, InvalidInputError, NotHeldError, UnsupportedIndexError
from hybridindex.index.log.change_log import log_file
from hybridindex.index.share.beside import attribute_files
from hybridindex.index.share.record import read_held
from hybridindex.index.storage.generation import as_path, generation_name, read_current, unreadable
from hybridindex.index.storage.list_digests import digest_lists, list_spans, read_digests, render_digests
from hybridindex.index.storage.lists import read_table
from hybridindex.index.storage.manifest import (
    DIGESTS_FILE,
    IDS_FILE,
    LISTS_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    TABLE_FILE,
    Manifest,
    parse_manifest,
)

__all__ = ["FILES", "FolderSource", "IndexSource", "ListSource"]

#: What a share needs beside its lists.
FILES = (MANIFEST_FILE, MODEL_FILE, TABLE_FILE, DIGESTS_FILE, IDS_FILE)


class ListSource(Protocol):
    """Gives the bytes of the lists of an index. Who takes them proves them."""

    def read(self, lists: Sequence[int]) -> Iterator[tuple[int, bytes, bytes]]:
        """List id, codes and ids of each of ``lists``, each once, in any order.

        Raises:
            NotHeldError: the source does not hold some of them.
        """
        ...


class IndexSource(ListSource, Protocol):
    """And the files beside them."""

    def files(self) -> Mapping[str, bytes]:
        """:data:`FILES` by name; and ``attributes.json`` with the file that it names, where there are attributes that
        the source gives."""
        ...


class FolderSource:
    """The current generation of the index, or share, at a path; it stays that one. One thread at a time."""

    def __init__(self, path: str | Path, *, generation: int | None = None, is_followed: bool = False) -> None:
        """
        Args:
            generation: or this one.
            is_followed: shares of it know what was added and deleted since its lists were written.

        Raises:
            InvalidInputError, UnsupportedIndexError, CorruptIndexError, UnreadableIndexError: no index can be read.
        """
        path = as_path(path)
        self._folder = folder = read_current(path) if generation is None else path / generation_name(generation)
        self._is_followed = is_followed
        try:
            self._raw_manifest = filesystem.read_bytes(folder / MANIFEST_FILE)
        except FileError as error:
            raise unreadable(error, folder) from error
        self._manifest = manifest = parse_manifest(self._raw_manifest, str(folder / MANIFEST_FILE))
        table = read_table(folder, manifest)
        self._spans = list_spans(table, manifest.code_size, manifest.layout)

    @property
    def manifest(self) -> Manifest:
        """Of the generation."""
        return self._manifest

    @property
    def folder(self) -> Path:
        """Of the generation."""
        return self._folder

    def files(self) -> dict[str, bytes]:
        """As :meth:`IndexSource.files`. Where an older version wrote no digests of single lists, they are computed: all
        of ``lists.bin`` is read.

        Raises:
            UnsupportedIndexError: rows were added or deleted since the lists were written.
            CorruptIndexError, UnreadableIndexError: a file is damaged, or cannot be read.
        """
        folder, manifest = self._folder, self._manifest
        if not self._is_followed and log_file(folder, manifest).read().changes:
            raise UnsupportedIndexError(
                f"rows of {folder.parent} were added or deleted since its lists were written, which a share would not "
                f"know; compact it first: hybridindex compact {folder.parent}"
            )
        return {**{name: self.file(name) for name in FILES}, **self.attributes()}

    def attributes(self) -> dict[str, bytes]:
        """``attributes.json`` and the file that it names; nothing where there are no attributes, or damaged ones.

        Raises:
            UnreadableIndexError: they cannot be read.
        """
        return attribute_files(self._folder, self._manifest)

    def file(self, name: str) -> bytes:
        """One of :data:`FILES`, as :meth:`files` gives it.

        Raises:
            CorruptIndexError, UnreadableIndexError: it is damaged, or cannot be read.
        """
        try:
            if name == MANIFEST_FILE:
                return self._raw_manifest
            if name == DIGESTS_FILE:
                return self._digests()
            if name == IDS_FILE and read_held(self._folder, self._manifest) is None:
                return self._ids()
            return filesystem.read_bytes(self._folder / name)
        except FileError as error:
            raise unreadable(error, self._folder) from error

    def _ids(self) -> bytes:
        """Of a whole index, which has them beside the codes of each list."""
        with filesystem.File(self._folder / LISTS_FILE, "r") as file:
            return b"".join(file.read_at(start, stop - start) for start, stop in self._spans[:, 1].tolist())

    def _digests(self) -> bytes:
        folder, digest = self._folder, self._manifest.files[LISTS_FILE].xxh3_128
        if read_digests(folder / DIGESTS_FILE, digest, len(self._spans)) is not None:
            return filesystem.read_bytes(folder / DIGESTS_FILE)
        whole, digests = digest_lists(folder / LISTS_FILE, self._spans)
        if whole != digest:
            raise CorruptIndexError(f"{folder / LISTS_FILE} differs from its checksum in the manifest")
        return render_digests(whole, digests)

    def read(self, lists: Sequence[int]) -> Iterator[tuple[int, bytes, bytes]]:
        """As :meth:`ListSource.read`, in the order of ``lists``.

        Raises:
            InvalidInputError: there is no such list. NotHeldError: this is a share that does not hold one.
            UnreadableIndexError: ``lists.bin`` cannot be read.
        """
        wanted = np.asarray(lists, dtype=np.int64)
        if len(wanted) and not 0 <= wanted.min() <= wanted.max() < len(self._spans):
            raise InvalidInputError(f"lists is {wanted.min()} to {wanted.max()}; expected 0 to {len(self._spans) - 1}")
        held = read_held(self._folder, self._manifest)
        if held is not None and not held[wanted].all():
            missing = wanted[~held[wanted]].tolist()
            raise NotHeldError(
                f"the share {self._folder.parent} does not hold {len(missing)} of the lists", lists=missing
            )
        return self._read(wanted.tolist())

    def _read(self, lists: list[int]) -> Iterator[tuple[int, bytes, bytes]]:
        file = self._folder / LISTS_FILE
        try:
            with filesystem.File(file, "r") as lists_file:
                for list_id in lists:
                    codes, ids = (
                        lists_file.read_at(start, stop - start) for start, stop in self._spans[list_id].tolist()
                    )
                    yield list_id, codes, ids
        except FileError as error:
            raise unreadable(error, file) from error
