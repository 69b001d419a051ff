"""Opening, verifying and copying an index directory: every byte is proven before faiss parses or maps it.

Also the one-time conversion of ``blocks16`` to ``rows``, which is what faiss can map.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from hybridindex import filesystem
from hybridindex.errors import CorruptIndexError, FileError, IndexFormatError, InvalidInputError, NotWritableError
from hybridindex.index.attributes.stored import find_attributes
from hybridindex.index.faiss_model import LoadedModel, centroids_of, load_model, map_lists, require_faiss
from hybridindex.index.integrity import Integrity, name_lists
from hybridindex.index.ivf import IVFIndex
from hybridindex.index.live.store import LiveStore, open_live
from hybridindex.index.log.change_log import apart, log_file
from hybridindex.index.rabitq.codes import check_codes, find_codes
from hybridindex.index.rewrite import write_copy
from hybridindex.index.share.beside import read_ids
from hybridindex.index.share.record import read_held
from hybridindex.index.share.share import Share
from hybridindex.index.storage.checksums import digest_file
from hybridindex.index.storage.commit import Progress, no_progress
from hybridindex.index.storage.generation import (
    GenerationWriter,
    as_path,
    generation_name,
    read_current,
    refuse_share,
    unreadable,
)
from hybridindex.index.storage.going_back import previous_generation, remove_others, switch_back
from hybridindex.index.storage.huge_pages import load_in_huge_pages, map_file
from hybridindex.index.storage.list_digests import (
    U64,
    damaged_among,
    damaged_lists,
    digest_lists,
    list_spans,
    read_digests,
)
from hybridindex.index.storage.lists import read_table
from hybridindex.index.storage.manifest import (
    DIGESTS_FILE,
    LISTS_FILE,
    MODEL_FILE,
    SHARE_FILE,
    TABLE_FILE,
    Manifest,
    parse_manifest,
)
from hybridindex.types import I64, U8

__all__ = ["Verify", "open_generation", "open_index", "read_manifest", "remove_replaced", "rollback", "save", "verify"]

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
        InvalidInputError: ``path`` exists and is not an index. UnsupportedIndexError: ``index`` is a share.
        IndexExistsError, DiskFullError, BuildError: as :func:`hybridindex.index.build.build`.
    """
    refuse_share(index.integrity.folder)
    with GenerationWriter(as_path(path), replace=replace) as writer:
        write_copy(index, writer, index.manifest.layout, progress or no_progress)
    return open_index(path, verify="quick")


def read_manifest(path: str | Path, generation: int | None = None) -> Manifest:
    """The manifest of the current generation, or of that of a number; reads nothing else and needs no faiss.

    Raises:
        InvalidInputError, UnsupportedIndexError, CorruptIndexError: as :func:`open_index`.
    """
    if generation is not None:
        return _read_manifest(as_path(path) / generation_name(generation))
    return _of_current(as_path(path), _read_manifest)


def verify(path: str | Path, *, beside: bool = False) -> Manifest:
    """Check every checksum and every extent of the current generation, of a share those of the lists that it holds;
    needs no faiss. ``beside``: also attributes and codes, which searches can do without.

    Raises:
        CorruptIndexError: names the file that differs.
        InvalidInputError, UnsupportedIndexError: there is no index.
    """
    return _of_current(as_path(path), partial(_verify_generation, beside=beside))


def rollback(path: str | Path, *, force: bool = False) -> Manifest:
    """Make the generation that the current one replaced the current one again, after checking all of it.

    The other one stays in its place: a second call undoes the first. Needs no faiss. Who serves the index goes on with
    the generation that it opened until it is reloaded.

    Args:
        force: also where changes would be lost that were made since the other generation was compacted into this one.

    Raises:
        InvalidInputError: there is no index, nothing to go back to, or changes would be lost.
        CorruptIndexError: what was replaced is damaged; nothing has changed.
        BuildError: another process is writing.
    """
    path = as_path(path)

    def check(previous: Path) -> None:
        to = _verify_generation(previous)
        if force:
            return
        current = read_current(path)
        of = _read_manifest(current)
        if of.lineage != to.lineage:
            return
        here, there = log_file(current, of).read(), log_file(previous, to).read()
        first = int((of if of.generation > to.generation else to).notes.get("changes", 0))
        if of.generation > to.generation:
            known = apart(there, here, first)
            lost = here.place.number - there.place.number if known is None else known[1]
        else:  # forth again
            known = apart(here, there, first)
            lost = here.place.number - first if known is None else known[0]
        if lost > 0:
            raise InvalidInputError(
                f"{current.name} has {lost} changes that {previous.name} does not have, and that would be lost; "
                "expected force=True (--force) where that is meant"
            )

    switch_back(path, check)
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


def _verify_generation(generation: Path, *, beside: bool = False) -> Manifest:
    manifest = _read_manifest(generation)
    table, digests = _check_files(generation, manifest, "full")
    if (held := read_held(generation, manifest)) is not None:
        damaged = _damaged_of_share(generation, manifest, table, digests, held)
        if damaged:
            raise CorruptIndexError(
                f"{generation / LISTS_FILE} differs from its digests ({name_lists(damaged)}, which the share holds)"
            )
        assert digests is not None
        read_ids(generation, list_spans(table, manifest.code_size, manifest.layout), digests)
    LiveStore(generation, manifest)
    if beside:
        attributes, problem = find_attributes(generation, manifest)
        if problem:
            raise CorruptIndexError(problem)
        if attributes is not None:
            attributes.check()
        check_codes(generation, manifest, table[:, 0], whole=True)
    return manifest


def open_index(
    path: str | Path,
    verify: Verify = "full",
    *,
    changes_of: str | Path | None = None,
    generation: int | None = None,
) -> IVFIndex:
    """Open the current generation, or that of a number, memory-mapped.

    ``verify="full"`` reads all files once (several GB/s from the page cache); "quick" trusts the bytes of ``lists.bin``
    but still checks its size, the manifest, the model and the table. A ``blocks16`` index is converted to ``rows``
    once, with a warning in the log: as a new generation, or in a temporary directory where the index cannot be written.

    Of a share (:attr:`IVFIndex.share`) "full" reads the lists that it holds; those that are damaged are not held, which
    the log says. With ``changes_of``, the whole index, searches see what is added to and deleted from that one.

    Raises:
        InvalidInputError: there is nothing at ``path``, ``verify`` is unknown, or it is no share of ``changes_of``.
        UnsupportedIndexError: not an index directory, or a newer format.
        CorruptIndexError: bytes differ from their checksums, or a file is missing or short.
        UnreadableIndexError: a file is there and cannot be read: no permission, or an error of the disk.
        MissingDependencyError: faiss is not installed.
    """
    if verify not in ("full", "quick"):
        raise InvalidInputError(f"verify is {verify!r}; expected 'full' or 'quick'")
    directory = as_path(path)
    require_faiss()
    whole = None if changes_of is None else as_path(changes_of)
    if generation is not None:
        return _open_generation(directory, directory / generation_name(generation), verify, whole)
    return _of_current(directory, lambda generation: _open_generation(directory, generation, verify, whole))


def _of_current(path: Path, read: Callable[[Path], _T]) -> _T:
    """What ``read`` says of the current generation; of the next one, if that was put in its place meanwhile."""
    try:
        return _of_whole_current(path, read)
    except CorruptIndexError as error:
        try:
            kept = previous_generation(path)
        except FileError:
            kept = None
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
        return read_current(path) == generation and filesystem.is_dir(generation)
    except (IndexFormatError, InvalidInputError, FileError):
        return True


def _open_generation(path: Path, generation: Path, verify: Verify, whole: Path | None = None) -> IVFIndex:
    manifest = _read_manifest(generation)
    logged = generation if whole is None else _generation_of(whole, generation, manifest)
    table, digests = _check_files(generation, manifest, verify)
    recorded = read_held(generation, manifest)
    absent = None if recorded is None else _absent_lists(generation, manifest, table, digests, recorded, verify)
    addresses = []
    try:
        data = map_file(generation / LISTS_FILE)
        model_bytes: U8 = filesystem.map_array(generation / MODEL_FILE, np.uint8)
        # An imported index answers as faiss does with the file it came from; ours need not.
        model = load_model(generation / MODEL_FILE, precompute=manifest.notes.get("source") != "build")
        _check_model(model, manifest, generation)
        if manifest.layout != "blocks16":
            lists = generation / LISTS_FILE
            size = manifest.code_size
            addresses = [map_lists(model.ivf, lists, table, code_size=size, nbytes=data.nbytes)]
            model.outer.ntotal = manifest.count
            model.ivf.nprobe = manifest.nprobe
        integrity = Integrity(generation, manifest, table, data, addresses, digests, absent)
    except OSError as error:
        raise unreadable(error, generation) from error
    except (RuntimeError, ValueError) as error:
        raise CorruptIndexError(f"{generation} cannot be mapped: {error}") from error
    index = IVFIndex(path, manifest, model, table, data, model_bytes, integrity, open_live(logged, manifest))
    if manifest.layout == "blocks16":
        return _converted(index)
    if recorded is not None:
        index.share = Share(manifest, integrity, table, recorded)
        index.call_on_close(index.share.close)
    index.rabitq, index.rabitq_problem = find_codes(
        generation, manifest, index.list_sizes, lambda: centroids_of(model.ivf), whole=verify == "full"
    )
    index.attributes, index.attributes_problem = find_attributes(generation, manifest)
    return index


def _generation_of(whole: Path, share: Path, manifest: Manifest) -> Path:
    """The folder in the index ``whole`` of the generation that ``share`` is of."""
    folder = whole / share.name
    if not filesystem.exists(share / SHARE_FILE) or _read_manifest(folder) != manifest:
        raise InvalidInputError(f"{share.parent} is not a share of {whole}; expected one that was made from it")
    return folder


def open_generation(path: Path, folder: Path) -> IVFIndex:
    """Opens a generation of the index at ``path`` that was just written, whether or not it is the current one."""
    return _open_generation(path, folder, "quick")


def _read_manifest(generation: Path) -> Manifest:
    file = generation / "manifest.json"
    try:
        raw = filesystem.read_bytes(file)
    except OSError as error:
        raise unreadable(error, file) from error
    manifest = parse_manifest(raw, str(file))
    if generation.name != generation_name(manifest.generation):
        raise CorruptIndexError(f"{file} is of generation {manifest.generation}, but lies in {generation.name}")
    return manifest


def _check_files(generation: Path, manifest: Manifest, verify: Verify) -> tuple[I64, U64 | None]:
    """The table of extents, and the digests of single lists where they are known."""
    for name in (TABLE_FILE, MODEL_FILE):
        _check_size(generation, manifest, name)
        try:
            found = digest_file(generation / name)
        except OSError as error:
            raise unreadable(error, generation / name) from error
        if found != manifest.files[name].xxh3_128:
            raise CorruptIndexError(f"{generation / name} differs from its checksum in the manifest")
    _check_size(generation, manifest, LISTS_FILE)
    table = read_table(generation, manifest)
    digests = read_digests(generation / DIGESTS_FILE, manifest.files[LISTS_FILE].xxh3_128, manifest.nlist)
    if verify == "full" and not filesystem.exists(generation / SHARE_FILE):
        digests = _check_lists(generation / LISTS_FILE, manifest, table, digests)
    return table, digests


def _absent_lists(
    generation: Path,
    manifest: Manifest,
    table: I64,
    digests: U64 | None,
    recorded: npt.NDArray[np.bool_],
    verify: Verify,
) -> npt.NDArray[np.bool_]:
    """(nlist,) bool of a share: the lists that it does not hold, by its record, or that are damaged."""
    if digests is None:
        raise _without_digests(generation)
    absent = ~recorded
    damaged = _damaged_of_share(generation, manifest, table, digests, recorded) if verify == "full" else []
    if damaged:
        absent[damaged] = True
        _LOG.error(
            "%s: %s differ from their digests, and are not held any more", generation / LISTS_FILE, name_lists(damaged)
        )
    return absent


def _without_digests(generation: Path) -> CorruptIndexError:
    return CorruptIndexError(f"{generation / DIGESTS_FILE} of the share is missing, damaged or of another index")


def _damaged_of_share(
    generation: Path, manifest: Manifest, table: I64, digests: U64 | None, held: npt.NDArray[np.bool_]
) -> list[int]:
    """The lists that a share holds and that are not what was written."""
    if digests is None:
        raise _without_digests(generation)
    file = generation / LISTS_FILE
    try:
        spans = list_spans(table, manifest.code_size, manifest.layout)
        return damaged_among(file, spans, digests, np.flatnonzero(held).tolist())
    except OSError as error:
        raise unreadable(error, file) from error


def _check_size(generation: Path, manifest: Manifest, name: str) -> None:
    try:
        size = filesystem.stat(generation / name).st_size
    except OSError as error:
        raise unreadable(error, generation / name) from error
    if size != manifest.files[name].size:
        raise CorruptIndexError(f"{generation / name} has {size} bytes; the manifest says {manifest.files[name].size}")


def _check_lists(file: Path, manifest: Manifest, table: I64, digests: U64 | None) -> U64:
    """Compares every byte; the digests of single lists, those given where there are some."""
    try:
        load_in_huge_pages(file)
        spans = list_spans(table, manifest.code_size, manifest.layout)
        if digests is None:
            whole, found = digest_lists(file, spans)
        else:
            whole, found = digest_file(file), digests
        if whole == manifest.files[LISTS_FILE].xxh3_128:
            return found
        damaged = [] if digests is None else damaged_lists(file, spans, digests)
    except OSError as error:
        raise unreadable(error, file) from error
    where = f" ({name_lists(damaged)} of {manifest.nlist})" if damaged else ""
    raise CorruptIndexError(f"{file} differs from its checksum in the manifest{where}")


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
        _LOG.warning("%s was converted or rebuilt by another process in the meantime", path)
    except NotWritableError:
        return _converted_aside(blocks)
    return open_index(path, verify="quick")


class _OvertakenError(Exception):
    """Another process committed a generation first; never leaves this module."""


def _converted_aside(blocks: IVFIndex) -> IVFIndex:
    scratch = filesystem.scratch_folder("hybridindex-rows-")
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
