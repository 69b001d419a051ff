"""Opening, verifying and copying an index directory: every byte is proven before faiss parses or maps it.

Also the one-time conversion of ``blocks16`` to ``rows``, which is what faiss can map.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from hybridindex.errors import CorruptIndexError, IndexFormatError, InvalidInputError, NotWritableError
from hybridindex.index.faiss_model import LoadedModel, load_model, map_lists, require_faiss
from hybridindex.index.ivf import IVFIndex
from hybridindex.index.rewrite import write_copy
from hybridindex.index.storage.checksums import digest_file
from hybridindex.index.storage.commit import Progress, no_progress
from hybridindex.index.storage.generation import (
    GenerationWriter,
    as_path,
    generation_name,
    read_current,
    unreadable,
)
from hybridindex.index.storage.going_back import previous_generation, remove_others, switch_back
from hybridindex.index.storage.huge_pages import load_in_huge_pages, map_file
from hybridindex.index.storage.layout import check_extents
from hybridindex.index.storage.manifest import LISTS_FILE, MODEL_FILE, TABLE_FILE, Manifest, parse_manifest
from hybridindex.types import I64, U8

__all__ = ["Verify", "open_index", "read_manifest", "remove_replaced", "rollback", "save", "verify"]

_LOG = logging.getLogger(__name__)

#: full: every checksum. quick: manifest, sizes, model and table; not the bytes of the lists.
Verify = Literal["full", "quick"]

#: A writer may remove a generation while a reader opens it; the reader then takes the next one.
_ATTEMPTS = 5
_CONVERT_LOCK_TIMEOUT_S = 600.0
_T = TypeVar("_T")


def save(index: IVFIndex, path: str | Path, *, replace: bool = False, progress: Progress | None = None) -> IVFIndex:
    """Copy an open index to ``path`` (new, empty, or with ``replace`` an index that gets a new generation) and open it.

    The copy has the same fingerprint, so profiles stay valid; the control store is not copied.

    Raises:
        InvalidInputError: ``path`` exists and is not an index.
        IndexExistsError, DiskFullError, BuildError: as :func:`hybridindex.index.build.build`.
    """
    with GenerationWriter(as_path(path), replace=replace) as writer:
        write_copy(index, writer, index.manifest.layout, progress or no_progress)
    return open_index(path, verify="quick")


def read_manifest(path: str | Path) -> Manifest:
    """The manifest of the current generation; reads nothing else and needs no faiss.

    Raises:
        InvalidInputError, UnsupportedIndexError, CorruptIndexError: as :func:`open_index`.
    """
    return _of_current(as_path(path), _read_manifest)


def verify(path: str | Path) -> Manifest:
    """Check every checksum and every extent of the current generation; needs no faiss.

    Raises:
        CorruptIndexError: names the file that differs.
        InvalidInputError, UnsupportedIndexError: there is no index.
    """
    return _of_current(as_path(path), _verify_generation)


def rollback(path: str | Path) -> Manifest:
    """Make the generation that the current one replaced the current one again, after checking all of it.

    The other one stays in its place: a second call undoes the first. Needs no faiss. Who serves the index goes on with
    the generation that it opened until it is reloaded.

    Raises:
        InvalidInputError: there is no index, or nothing to go back to.
        CorruptIndexError: what was replaced is damaged; nothing has changed.
        BuildError: another process is writing.
    """
    path = as_path(path)
    switch_back(path, _verify_generation)
    return read_manifest(path)


def remove_replaced(path: str | Path, *, serving: int | None = None) -> list[int]:
    """Remove what was replaced, after which nothing can be rolled back; the numbers of the removed generations.

    Args:
        path: the index directory.
        serving: only where this generation is the current one.

    Raises:
        InvalidInputError, UnsupportedIndexError, CorruptIndexError: there is no index, or no current generation.
        BuildError: another process is writing.
    """
    return remove_others(as_path(path), serving)


def _verify_generation(generation: Path) -> Manifest:
    manifest = _read_manifest(generation)
    _check_files(generation, manifest, "full")
    _read_table(generation, manifest)
    return manifest


def open_index(path: str | Path, verify: Verify = "full") -> IVFIndex:
    """Open the current generation, memory-mapped.

    ``verify="full"`` reads all files once (several GB/s from the page cache); "quick" trusts the bytes of ``lists.bin``
    but still checks its size, the manifest, the model and the table. A ``blocks16`` index is converted to ``rows``
    once, with a warning in the log: as a new generation, or in a temporary directory where the index cannot be written.

    Raises:
        InvalidInputError: there is nothing at ``path``, or ``verify`` is unknown.
        UnsupportedIndexError: not an index directory, or a newer format.
        CorruptIndexError: bytes differ from their checksums, or a file is missing or short.
        UnreadableIndexError: a file is there and cannot be read: no permission, or an error of the disk.
        MissingDependencyError: faiss is not installed.
    """
    if verify not in ("full", "quick"):
        raise InvalidInputError(f"verify is {verify!r}; expected 'full' or 'quick'")
    directory = as_path(path)
    require_faiss()
    return _of_current(directory, lambda generation: _open_generation(directory, generation, verify))


def _of_current(path: Path, read: Callable[[Path], _T]) -> _T:
    """What ``read`` says of the current generation; of the next one, if that was put in its place meanwhile."""
    try:
        return _of_whole_current(path, read)
    except CorruptIndexError as error:
        kept = previous_generation(path)
        back = "" if kept is None else f", or go back to generation {kept}: hybridindex rollback {path}"
        raise CorruptIndexError(f"{error}; restore the index from a copy, or build it again{back}") from error


def _of_whole_current(path: Path, read: Callable[[Path], _T]) -> _T:
    for attempt in range(_ATTEMPTS):
        generation = read_current(path)
        try:
            return read(generation)
        except IndexFormatError:
            if attempt + 1 == _ATTEMPTS or _unchanged(path, generation):
                raise
    raise AssertionError("unreachable")


def _unchanged(path: Path, generation: Path) -> bool:
    try:
        return read_current(path) == generation and generation.is_dir()
    except (IndexFormatError, InvalidInputError):
        return True


def _open_generation(path: Path, generation: Path, verify: Verify) -> IVFIndex:
    manifest = _read_manifest(generation)
    _check_files(generation, manifest, verify)
    table = _read_table(generation, manifest)
    try:
        data = map_file(generation / LISTS_FILE)
        model_bytes: U8 = np.memmap(generation / MODEL_FILE, dtype=np.uint8, mode="r")
        # An imported index answers as faiss does with the file it came from; ours need not.
        model = load_model(generation / MODEL_FILE, precompute=manifest.notes.get("source") != "build")
        _check_model(model, manifest, generation)
        if manifest.layout != "blocks16":
            lists = generation / LISTS_FILE
            map_lists(model.ivf, lists, table, code_size=manifest.code_size, nbytes=data.nbytes)
            model.outer.ntotal = manifest.count
            model.ivf.nprobe = manifest.nprobe
    except OSError as error:
        raise unreadable(error, generation) from error
    except (RuntimeError, ValueError) as error:
        raise CorruptIndexError(f"{generation} cannot be mapped: {error}") from error
    index = IVFIndex(path, manifest, model, table, data, model_bytes)
    return _converted(index) if manifest.layout == "blocks16" else index


def _read_manifest(generation: Path) -> Manifest:
    file = generation / "manifest.json"
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise unreadable(error, file) from error
    manifest = parse_manifest(raw, str(file))
    if generation.name != generation_name(manifest.generation):
        raise CorruptIndexError(f"{file} is of generation {manifest.generation}, but lies in {generation.name}")
    return manifest


def _check_files(generation: Path, manifest: Manifest, verify: Verify) -> None:
    for name in (TABLE_FILE, MODEL_FILE, LISTS_FILE):
        entry = manifest.files[name]
        file = generation / name
        try:
            size = file.stat().st_size
            if size != entry.size:
                raise CorruptIndexError(f"{file} has {size} bytes; the manifest says {entry.size}")
            if verify == "full" and name == LISTS_FILE:
                load_in_huge_pages(file)
            if (verify == "full" or name != LISTS_FILE) and digest_file(file) != entry.xxh3_128:
                raise CorruptIndexError(f"{file} differs from its checksum in the manifest")
        except OSError as error:
            raise unreadable(error, file) from error


def _read_table(generation: Path, manifest: Manifest) -> I64:
    file = generation / TABLE_FILE
    try:
        table = np.load(file, allow_pickle=False)
    except OSError as error:
        raise unreadable(error, file) from error
    except ValueError as error:
        raise CorruptIndexError(f"{file} cannot be read: {error}") from error
    check_extents(
        table,
        nlist=manifest.nlist,
        count=manifest.count,
        code_size=manifest.code_size,
        layout=manifest.layout,
        file_bytes=manifest.files[LISTS_FILE].size,
    )
    return np.ascontiguousarray(table)


def _check_model(model: LoadedModel, manifest: Manifest, generation: Path) -> None:
    faiss = require_faiss()
    metric = {faiss.METRIC_INNER_PRODUCT: "ip", faiss.METRIC_L2: "l2"}.get(model.ivf.metric_type)
    found = (model.outer.d, model.ivf.d, model.ivf.nlist, model.ivf.code_size, metric)
    said = (manifest.dim, manifest.scan_dim, manifest.nlist, manifest.code_size, manifest.metric)
    if found != said:
        raise CorruptIndexError(f"{generation / MODEL_FILE} is of another index: it has {found}, the manifest {said}")


def _converted(blocks: IVFIndex) -> IVFIndex:
    """``blocks`` as a rows index: a new generation beside it, or a temporary copy."""
    path = blocks.path
    _LOG.warning(
        "%s is stored as blocks16, which faiss cannot map: converting it to rows once (%d bytes)",
        path,
        blocks.mapped_lists().nbytes,
    )
    try:
        with GenerationWriter(path, replace=True, keep=False, lock_timeout_s=_CONVERT_LOCK_TIMEOUT_S) as writer:
            if read_current(path).name != generation_name(blocks.generation):
                raise _OvertakenError
            write_copy(blocks, writer, "rows")
    except _OvertakenError:
        _LOG.warning("%s was converted or rebuilt by another process meanwhile", path)
    except NotWritableError:
        return _converted_aside(blocks)
    return open_index(path, verify="quick")


class _OvertakenError(Exception):
    """Another process committed a generation first; never leaves this module."""


def _converted_aside(blocks: IVFIndex) -> IVFIndex:
    scratch = tempfile.TemporaryDirectory(prefix="hybridindex-rows-", ignore_cleanup_errors=True)
    cleanup: Callable[[], None] = scratch.cleanup
    _LOG.warning(
        "%s cannot be written: the converted copy lies in %s until the index is closed", blocks.path, scratch.name
    )
    try:
        with GenerationWriter(Path(scratch.name)) as writer:
            write_copy(blocks, writer, "rows")
        copy = open_index(scratch.name, verify="quick")
    except BaseException:
        cleanup()
        raise
    copy.path = blocks.path
    copy.call_on_close(cleanup)
    return copy
