"""What a share has of all rows, also of lists that it does not hold: their ids, attributes and codes.

A search with a filter chooses its lists by the rows that the filter leaves in each, so a node has to know these of
every list. Ids take 8 bytes a row, and lie in ``lists.ids``: int64, little-endian, in the order of the lists. The
digests of single lists prove them. Codes are a few percent of the rows: with all of them a node finds the candidates
of a search alone, and asks others for their exact distances. Attributes and codes are those that the index had when the
share was made or renewed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from hybridindex import filesystem
from hybridindex.errors import CorruptIndexError, FileError, HybridIndexError, IndexFormatError, MissingFileError
from hybridindex.index.attributes.stored import SPEC_FILE, find_attributes, parse_spec, render_spec
from hybridindex.index.rabitq import spec as rabitq
from hybridindex.index.rabitq.codes import are_whole, check_codes
from hybridindex.index.storage.additions import adding_to_generation, remove_additions
from hybridindex.index.storage.checksums import digest_bytes, digest_file
from hybridindex.index.storage.generation import unreadable
from hybridindex.index.storage.list_digests import U64, digest_part
from hybridindex.index.storage.manifest import IDS_FILE, Manifest
from hybridindex.types import I64

__all__ = ["attribute_files", "prove_ids", "put_attributes", "put_codes", "read_ids"]

_log = logging.getLogger(__name__)


def prove_ids(raw: bytes, spans: I64, digests: U64, where: str) -> I64:
    """(count,) int64 ids of all rows, in the order of the lists, of the bytes of ``lists.ids``.

    Args:
        spans: (nlist, 2, 2) int64: where codes and ids of each list lie in ``lists.bin``.
        digests: (nlist, 2) uint64, of codes and ids of each list.
        where: names the bytes in errors.

    Raises:
        CorruptIndexError: they are not those of the lists.
    """
    ends = np.cumsum(spans[:, 1, 1] - spans[:, 1, 0])
    nbytes = int(ends[-1]) if len(ends) else 0
    if len(raw) != nbytes:
        raise CorruptIndexError(f"{where} has {len(raw)} bytes; expected {nbytes}, 8 a row")
    start, view = 0, memoryview(raw)
    for list_id, (stop, digest) in enumerate(zip(ends.tolist(), digests[:, 1].tolist(), strict=True)):
        if digest_part(view[start:stop]) != digest:
            raise CorruptIndexError(f"the ids of list {list_id} in {where} differ from their digest")
        start = stop
    return np.frombuffer(raw, dtype="<i8")


def read_ids(folder: Path, spans: I64, digests: U64) -> I64:
    """:func:`prove_ids` of the share in the folder of a generation.

    Raises:
        CorruptIndexError: there are none, or they are damaged. UnreadableIndexError: they cannot be read.
    """
    file = folder / IDS_FILE
    try:
        raw = filesystem.read_bytes(file)
    except MissingFileError as error:
        raise CorruptIndexError(
            f"{file}, which searches with a filter need, is missing: make the share again"
        ) from error
    except FileError as error:
        raise unreadable(error, file) from error
    return prove_ids(raw, spans, digests, str(file))


def attribute_files(folder: Path, manifest: Manifest) -> dict[str, bytes]:
    """``attributes.json`` and the file that it names, of the index or share in the folder of a generation; nothing
    where it has no attributes, or damaged ones, which the log says.

    Raises:
        UnreadableIndexError: they cannot be read.
    """
    stored, _ = find_attributes(folder, manifest)
    if stored is None:
        return {}
    try:
        content = filesystem.read_bytes(stored.path)
    except FileError as error:
        raise unreadable(error, folder) from error
    if digest_bytes(content) != stored.spec.file_xxh3_128:
        _log.warning("%s differs from its checksum in %s: shares get no attributes", stored.path, SPEC_FILE)
        return {}
    return {SPEC_FILE: render_spec(stored.spec), stored.spec.file: content}


def put_attributes(path: Path, folder: Path, manifest: Manifest, files: Mapping[str, bytes]) -> None:
    """Gives the share at ``path`` the attributes that are among ``files``, in the place of those that it has.

    Args:
        folder: of its generation.
        files: as of :meth:`hybridindex.index.share.source.IndexSource.files`.

    Raises:
        CorruptIndexError: they are not what ``attributes.json`` says.
        BuildError: another process is writing. DiskFullError: no room.
    """
    raw = files.get(SPEC_FILE)
    if _has(folder, manifest, raw):
        return
    with adding_to_generation(path, folder):
        remove_additions(folder, SPEC_FILE, "attributes*")
        if raw is None:
            return
        spec = parse_spec(raw, f"{SPEC_FILE} of the source")
        content = files.get(spec.file, b"")
        if digest_bytes(content) != spec.file_xxh3_128:
            raise CorruptIndexError(f"{spec.file} of the source differs from its checksum in {SPEC_FILE}")
        filesystem.replace_file(folder / spec.file, content)
        filesystem.replace_file(folder / SPEC_FILE, raw)


def _has(folder: Path, manifest: Manifest, raw: bytes | None) -> bool:
    """Whether the share has these attributes, whole; None: none."""
    stored, problem = find_attributes(folder, manifest)
    if stored is None or raw is None:
        return stored is None and raw is None and not problem
    try:
        stored.check()
    except HybridIndexError:
        return False
    return render_spec(stored.spec) == raw


def put_codes(path: Path, folder: Path, manifest: Manifest, list_sizes: I64, source: Path | None) -> None:
    """Gives the share at ``path`` the codes of its index, in the place of those that it has. Where these cannot be
    read, are damaged, or find no room, the log says so, and the share keeps its own. One without any is searched by
    rows.

    Args:
        folder: of its generation.
        source: folder of the same generation of the index; None: no codes are taken.

    Raises:
        BuildError: another process is writing. DiskFullError, FileError: the share cannot be written at all.
    """
    try:
        found = None if source is None else _codes_of(source, manifest, list_sizes)
    except (FileError, IndexFormatError) as error:
        _log.warning("the codes of the index cannot be taken: %s", error)
        return
    if found is None and not filesystem.exists(folder / rabitq.SPEC_FILE):
        return
    has = found is not None and _has_codes(folder, manifest, list_sizes, found[0])
    if has and len([*filesystem.list_folder(folder, "rabitq*")]) == 2:
        return
    with adding_to_generation(path, folder):
        if found is None:
            remove_additions(folder, rabitq.SPEC_FILE, "rabitq*")
            return
        raw, file = found
        try:
            if not has:
                _copy_codes(file, folder / file.name, rabitq.parse_spec(raw, rabitq.SPEC_FILE).file_xxh3_128)
                filesystem.replace_file(folder / rabitq.SPEC_FILE, raw)
        except (FileError, CorruptIndexError) as error:
            _log.warning("the codes of the index are not taken: %s", error)
            return
        # Also those that a crash left.
        for old in [*filesystem.list_folder(folder, "rabitq*")]:
            if old.name not in (rabitq.SPEC_FILE, file.name):
                filesystem.unlink(old, missing_ok=True)


def _copy_codes(file: Path, copy: Path, digest: str) -> None:
    """Raises CorruptIndexError: they are not those of the digest; FileError. Nothing is left then."""
    try:
        with filesystem.replacing(copy) as beside:
            filesystem.copy_file(file, beside)
            if digest_file(beside) != digest:
                raise CorruptIndexError(f"{file} differs from its checksum in {rabitq.SPEC_FILE}")
    except MissingFileError as error:
        raise CorruptIndexError(f"{file} was replaced while it was copied") from error


def _codes_of(folder: Path, manifest: Manifest, list_sizes: I64) -> tuple[bytes, Path] | None:
    """What the codes of a generation say of themselves, as bytes, and their file; None where it has none.

    Raises:
        FileError, IndexFormatError: they cannot be read, or used.
    """
    spec = check_codes(folder, manifest, list_sizes, whole=False)
    return None if spec is None else (filesystem.read_bytes(folder / rabitq.SPEC_FILE), folder / spec.file)


def _has_codes(folder: Path, manifest: Manifest, list_sizes: I64, raw: bytes) -> bool:
    """Whether the share has these codes, whole."""
    try:
        if filesystem.read_bytes(folder / rabitq.SPEC_FILE) != raw:
            return False
    except FileError:
        return False
    return are_whole(folder, manifest, list_sizes)
