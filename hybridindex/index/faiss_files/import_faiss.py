"""Importing a faiss IVF index: its model is kept as it is, its lists move into our extents. Answers stay faiss's.

Covers IVF indexes with any coarse quantizer, bare, behind pre-transforms or an id map, from a file or from memory. Of a
refinement (``IVF…,RFlat``), the caller says what becomes of its vectors. Not: indexes that keep other data outside
codes and ids (deduplication, Panorama), binary indexes, or anything without inverted lists.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hybridindex import filesystem
from hybridindex.config import check_count
from hybridindex.errors import (
    CorruptIndexError,
    FileError,
    HybridIndexError,
    InvalidInputError,
    MissingFileError,
    UnsupportedIndexError,
    cannot_read,
)
from hybridindex.index.compress import can_take_over, compress
from hybridindex.index.faiss_files.refinement import Refine, Refinement, check_refine, find_refinement
from hybridindex.index.faiss_model import (
    LoadedModel,
    faiss_message,
    peel,
    require_faiss,
    stream_index,
    write_empty_model,
)
from hybridindex.index.ids import find_duplicates
from hybridindex.index.ivf import IVFIndex
from hybridindex.index.on_disk_lists import on_disk_names
from hybridindex.index.opening import open_index
from hybridindex.index.storage.commit import Progress, commit_generation, no_progress
from hybridindex.index.storage.generation import GenerationWriter, OutFile, as_path
from hybridindex.index.storage.layout import Layout, plan_extents, total_bytes
from hybridindex.index.storage.manifest import LISTS_FILE, MODEL_FILE, GenerationSpec
from hybridindex.types import I64, U8, Metric

__all__ = ["from_faiss"]

_LOG = logging.getLogger(__name__)
_LIMIT_LOCK = threading.Lock()

#: Of recall, against faiss's estimates without rounded queries: nobody asked for any.
_TAKEN_OVER_LOSS = 0.001
#: Kinds whose whole state is the model plus codes and ids.
_KINDS = (
    "IndexIVFFlat",
    "IndexIVFScalarQuantizer",
    "IndexIVFPQ",
    "IndexIVFPQFastScan",
    "IndexIVFRaBitQ",
    "IndexIVFRaBitQFastScan",
    "IndexIVFSpectralHash",
    "IndexIVFResidualQuantizer",
    "IndexIVFLocalSearchQuantizer",
    "IndexIVFProductResidualQuantizer",
    "IndexIVFProductLocalSearchQuantizer",
    "IndexIVFResidualQuantizerFastScan",
    "IndexIVFLocalSearchQuantizerFastScan",
    "IndexIVFProductResidualQuantizerFastScan",
    "IndexIVFProductLocalSearchQuantizerFastScan",
)


def from_faiss(
    file: Any,
    path: str | Path,
    *,
    nprobe: int | None = None,
    refine: Refine | None = None,
    allow_on_disk: bool = False,
    replace: bool = False,
    progress: Progress | None = None,
) -> IVFIndex:
    """Import a faiss index into the index directory ``path`` and open it.

    Ids are kept, repeated ones too: their number stands in ``manifest.notes["duplicate_ids"]`` and in a log warning.
    An id map is resolved into the lists. The lists are mapped from the file and copied one by one (fast-scan lists are
    loaded whole, as faiss cannot map them). RaBitQ codes of 1 bit are also taken over into our blocks, which searches
    by codes scan. Where that fails, of a full disk for one, the index is imported all the same: a log warning says so.
    Vectors that the file counts and no list holds are not imported: a log warning says how many. faiss counts vectors
    of NaN or infinity and puts them into no list; a file whose lists lost rows looks the same.

    Args:
        file: written by ``faiss.write_index``; or an index object, which stays as it is: it is written into the new
            generation first, so that its disk needs room for it once more.
        path, replace: as in :func:`hybridindex.index.build.build`.
        nprobe: default number of probes; ``None`` keeps that of ``file``. faiss's own default is 1, which finds little:
            a log warning says so.
        refine: needed for a refinement alone, see :data:`hybridindex.index.faiss_files.refinement.Refine`.
        allow_on_disk: ``file`` may name another file that holds its lists (``OnDiskInvertedLists``). It is read into
            the index, so only say so of a ``file`` that you trust. It must lie below the folder of ``file``.
        progress: ``progress(stage, done, total)`` with the stages import (lists) and checksum (bytes); where codes are
            taken over, those of :func:`hybridindex.index.compress.compress`, too.

    Raises:
        InvalidInputError: the file is not there, ``file`` is something else, or ``nprobe`` is out of range.
        IndexExistsError: as in :func:`hybridindex.index.build.build`.
        UnsupportedIndexError: not a faiss file, or not an IVF index that can be served; says what was found. Or its
            lists lie in another file, and that was not allowed.
        CorruptIndexError: the file is truncated or damaged.
        DiskFullError, BuildError: as in :func:`hybridindex.index.build.build`.
    """
    path = as_path(path)
    options = _Options(nprobe=nprobe, refine=check_refine(refine), report=progress or no_progress)
    if not isinstance(file, str | os.PathLike):
        _check_object(file)
    else:
        file = as_path(file, "file")
        try:
            readable = filesystem.is_file(file)
        except FileError as error:
            raise cannot_read(error, "file", file) from error
        if not readable:
            raise InvalidInputError(f"file {str(file)!r} is not a file; expected one written by faiss.write_index")
    with GenerationWriter(path, replace=replace) as writer:
        if isinstance(file, Path):
            named = _named_files(file, allowed=allow_on_disk)
            _import(file, str(file), writer, options, named=named)
        else:
            scratch = writer.open_file("import.faiss")
            stream_index(file, scratch.append)
            _import(scratch.path, f"the {type(file).__name__}", writer, options, scratch)
    index = open_index(path, verify="quick")
    if can_take_over(index):
        try:
            compress(index, recall_loss=_TAKEN_OVER_LOSS, progress=options.report)
        except UnsupportedIndexError as error:
            _LOG.warning("faiss scans the codes of %s: %s", path, error)
        except HybridIndexError as error:
            # The generation is committed: a second import would be refused.
            _LOG.warning(
                "%s is imported, but faiss scans its codes because they could not be converted: %s; "
                "'hybridindex compress %s' converts them", path, error, path
            )  # fmt: skip
        except BaseException:
            index.close()
            raise
    return index


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    nprobe: int | None
    refine: Refine | None
    report: Progress


def _check_object(given: Any) -> None:
    faiss = require_faiss()
    if not isinstance(given, faiss.Index):
        raise InvalidInputError(
            f"file is a {type(given).__name__}; expected a string or a pathlib.Path, or a faiss index in memory"
        )
    if faiss.try_extract_index_ivf(given) is None:
        raise UnsupportedIndexError(
            f"the faiss index is {type(given).__name__}; expected an IVF index in main memory (faiss.index_gpu_to_cpu "
            "brings one there)"
        )


def _named_files(file: Path, *, allowed: bool) -> list[str]:
    """The files that ``file`` names: none, or the one that holds its lists."""
    try:
        names = on_disk_names(file)
    except FileError as error:
        raise cannot_read(error, "file", file) from error
    if not names:
        return names
    if not allowed:
        raise UnsupportedIndexError(
            f"{file} keeps its lists in another file, {names[0]!r}, which faiss would read: that could be any file of "
            f"this machine. If you trust {file}, import it with allow_on_disk=True (--allow-on-disk); the other file "
            "must lie below the same folder"
        )
    if len(names) > 1:
        raise UnsupportedIndexError(f"{file} names {len(names)} other files; expected one, which holds its lists")
    return names


def _import(
    file: Path,
    name: str,
    writer: GenerationWriter,
    options: _Options,
    scratch: OutFile | None = None,
    *,
    named: Sequence[str] = (),
) -> None:
    """Commits the index in ``file``, called ``name`` in messages. ``scratch``: the file, where it is the writer's.

    ``named``: the other file that it names, which was allowed. A scratch file comes from an index in memory, which has
    opened whatever it names.
    """
    outer = _read(file, name, refined=options.refine is not None, named=bool(named))
    refinement = find_refinement(outer, name, options.refine)
    model, id_map = peel(outer if refinement is None else refinement.base)
    metric = _check_servable(model, name)
    if named:
        _map_named(model.ivf, named[0], file)
    if refinement is not None and options.refine == "vectors":
        lists: _SourceLists = _RefinedLists(model.ivf, file, name, id_map, refinement)
        model = replace(model, ivf=refinement.flat_model(model.ivf))
    else:
        lists = _SourceLists(model.ivf, file, name, id_map)
    code_size = int(model.ivf.code_size)
    nprobe = _nprobe_of(model.ivf, name, options.nprobe)
    table = plan_extents(lists.sizes, code_size, lists.layout)
    out = writer.open_file(LISTS_FILE)
    out.reserve(total_bytes(table, code_size))
    _copy_lists(lists, table, code_size, out, options.report)
    duplicates = find_duplicates(_all_ids(lists), lists.count, writer)
    notes: dict[str, Any] = {"source": "faiss", "faiss_kind": type(model.ivf).__name__}
    if refinement is not None:
        notes["refinement"] = options.refine
    if duplicates.surplus:
        notes |= {"duplicate_ids": duplicates.surplus, "duplicate_id_examples": list(duplicates.examples)}
        first = duplicates.examples[0]
        _LOG.warning("%s: %d vectors repeat an id (for example %d); they are kept", name, duplicates.surplus, first)
    bare = _without_id_map(model, id_map is not None or refinement is not None)
    clear_direct_map(model.ivf)
    write_empty_model(bare, model.ivf, writer.open_file(MODEL_FILE).append)
    imported = GenerationSpec(
        metric=metric,
        codec=_codec_name(model.ivf),
        dim=int(bare.d),
        scan_dim=int(model.ivf.d),
        nprobe=nprobe,
        layout=lists.layout,
        by_residual=bool(model.ivf.by_residual),
        normalized=_normalizes(model, metric),
        code_size=code_size,
        notes=notes,
    )
    if scratch is not None:
        writer.drop(scratch)
    commit_generation(writer, out, table, imported, progress=options.report)


def _nprobe_of(ivf: Any, name: str, given: int | None) -> int:
    nlist = int(ivf.nlist)
    if given is None:
        found = max(1, min(int(ivf.nprobe), nlist))
        if found == 1 < nlist:
            _LOG.warning(
                "%s has nprobe 1, faiss's default: a search without nprobe scans 1 of %d lists and finds "
                "little; import it with nprobe=... (--nprobe)", name, nlist,
            )  # fmt: skip
        return found
    return check_count("nprobe", given, nlist)


def _read(file: Path, name: str, *, refined: bool, named: bool) -> Any:
    """``named``: lists lie in another file, which is not opened here."""
    faiss = require_faiss()
    size = filesystem.stat(file).st_size
    try:
        try:
            return _read_within(faiss, file, size, refined=refined, named=named)
        except RuntimeError as error:
            # Of fast scan under l2, faiss makes this table while it reads, and counts it as an array of the file. All
            # before it was read; what comes after may not take more than the table may.
            if "precomputed_table" not in str(error):
                raise
            most = max(size, int(faiss.cvar.precomputed_table_max_bytes))
            return _read_within(faiss, file, most, refined=refined, named=named)
    except (RuntimeError, MemoryError) as error:
        message = faiss_message(error)
        if "not recognized" in message:
            raise UnsupportedIndexError(
                f"{name} is not an index that faiss {faiss.__version__} reads: {message}"
            ) from (error)
        raise CorruptIndexError(f"{name} cannot be read by faiss {faiss.__version__}: {message}") from error


def _read_within(faiss: Any, file: Path, nbytes: int, *, refined: bool, named: bool) -> Any:
    """``nbytes``: of the largest array."""
    # Tables that are derived from the file and only speed up searches: not wanted here, and larger than the file.
    lean = getattr(faiss, "IO_FLAG_PQ_SKIP_SDC_TABLE", 0) | getattr(faiss, "IO_FLAG_SKIP_PRECOMPUTE_TABLE", 0)
    with _limited_vectors(faiss, nbytes), filesystem.performing("faiss", file):
        if refined and not named:
            # All arrays are mapped, the vectors of a refinement too.
            return faiss.read_index(str(file), faiss.IO_FLAG_MMAP_IFC | lean)
        try:
            outer = faiss.read_index(str(file), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY | lean)
            if named or not _quantizes_by_lists(faiss, outer):
                return outer
        except RuntimeError as error:
            if named or "read_InvertedLists" not in str(error):
                raise
        # Some kinds of lists cannot be mapped; those of a quantizer are part of the model.
        return faiss.read_index(str(file), lean)


def _quantizes_by_lists(faiss: Any, outer: Any) -> bool:
    """Whether the coarse quantizer is itself an IVF index."""
    ivf = faiss.try_extract_index_ivf(outer)
    return ivf is not None and faiss.try_extract_index_ivf(ivf.quantizer) is not None


@contextmanager
def _limited_vectors(faiss: Any, nbytes: int) -> Iterator[None]:
    """No array in a file is longer than the file: keeps a damaged length from filling the memory with zeros.

    The limit is global to faiss; readers elsewhere in the process feel it for the moment of the import.
    """
    if not hasattr(faiss, "set_deserialization_vector_byte_limit"):
        yield
        return
    with _LIMIT_LOCK:
        before = faiss.get_deserialization_vector_byte_limit()
        faiss.set_deserialization_vector_byte_limit(min(before, nbytes) if before else nbytes)
        try:
            yield
        finally:
            faiss.set_deserialization_vector_byte_limit(before)


def _check_servable(model: LoadedModel, name: str) -> Metric:
    faiss = require_faiss()
    kind = type(model.ivf).__name__
    if kind not in _KINDS:
        raise UnsupportedIndexError(f"{name} holds an {kind}, which keeps data outside its lists; it cannot be served")
    if not model.ivf.is_trained:
        raise UnsupportedIndexError(f"{name} holds an untrained {kind}; train it and add vectors first")
    metrics: dict[int, Metric] = {faiss.METRIC_INNER_PRODUCT: "ip", faiss.METRIC_L2: "l2"}
    if model.ivf.nlist < 1:
        raise CorruptIndexError(f"{name} says that it has no lists")
    quantizer = model.ivf.quantizer
    n_centroids, dim = (0, 0) if quantizer is None else (quantizer.ntotal, quantizer.d)
    if (n_centroids, dim) != (model.ivf.nlist, model.ivf.d):
        raise CorruptIndexError(
            f"{name} has a coarse quantizer of {n_centroids} centroids with {dim} dimensions; expected one of "
            f"{model.ivf.nlist} with {model.ivf.d}, as its lists have"
        )
    if model.ivf.metric_type not in metrics:
        raise UnsupportedIndexError(f"{name} has faiss metric {model.ivf.metric_type}; expected inner product or L2")
    return metrics[model.ivf.metric_type]


class _SourceLists:
    """The lists of a loaded faiss index, as views; proven to lie inside the file where they are mapped."""

    def __init__(self, ivf: Any, file: Path, name: str, id_map: I64 | None) -> None:
        faiss = require_faiss()
        self._faiss, self._id_map = faiss, id_map
        self._lists = faiss.downcast_InvertedLists(ivf.invlists)
        self._code_size = int(ivf.code_size)
        kind = type(self._lists).__name__
        self.layout: Layout = "rows"
        if kind == "BlockInvertedLists":
            self.layout = "pqfs32"
            if self._lists.n_per_block != 32 or self._lists.block_size != 32 * self._code_size:
                raise UnsupportedIndexError(
                    f"{name} packs {self._lists.n_per_block} vectors into {self._lists.block_size} bytes; expected "
                    f"blocks of 32 vectors in {32 * self._code_size} bytes"
                )
        elif kind == "OnDiskInvertedLists":
            _check_mapped(self._lists, file)
        elif kind != "ArrayInvertedLists":
            raise UnsupportedIndexError(f"{name} keeps its lists as {kind}; expected plain inverted lists")
        self.sizes: I64 = np.array([self._lists.list_size(i) for i in range(ivf.nlist)], dtype=np.int64)
        self.count = int(self.sizes.sum())
        if self.count > ivf.ntotal or (ivf.ntotal and not self.count):
            raise CorruptIndexError(f"{name}: lists hold {self.count} vectors, the header says {ivf.ntotal}")
        if self.count < ivf.ntotal:
            _LOG.warning(
                "%s: %d of %d vectors are in no list, and are not imported. The index does not say why: either they "
                "hold NaN or infinity, which faiss counts and puts into no list, or the lists lost rows after faiss "
                "counted them; if all vectors were finite, make it anew", name, ivf.ntotal - self.count, ivf.ntotal,
            )  # fmt: skip

    def codes(self, list_id: int) -> U8:
        """The code bytes of a list that is not empty, whole blocks: a view."""
        size = int(self.sizes[list_id])
        rows = -(-size // 32) * 32 if self.layout == "pqfs32" else size
        view: U8 = self._faiss.rev_swig_ptr(self._lists.get_codes(list_id), rows * self._code_size)
        return view

    def positions(self, list_id: int) -> I64:
        """Ids of a list that is not empty, as they stand in it: a view."""
        view: I64 = self._faiss.rev_swig_ptr(self._lists.get_ids(list_id), int(self.sizes[list_id]))
        return view

    def ids(self, list_id: int) -> I64:
        """Ids of a list that is not empty, id map applied."""
        ids = self.positions(list_id)
        if self._id_map is not None:
            if int(ids.min()) < 0 or int(ids.max()) >= len(self._id_map):
                raise CorruptIndexError(f"list {list_id} holds a position outside the id map")
            ids = self._id_map[ids]
        if int(ids.min()) < 0:
            raise UnsupportedIndexError(f"list {list_id} holds id {int(ids.min())}; expected ids of 0 or more")
        return ids


class _RefinedLists(_SourceLists):
    """The same lists with the vectors of a refinement in the place of codes."""

    def __init__(self, ivf: Any, file: Path, name: str, id_map: I64 | None, refinement: Refinement) -> None:
        super().__init__(ivf, file, name, id_map)
        self._refinement = refinement
        self.layout = "rows"

    def codes(self, list_id: int) -> U8:
        return self._refinement.vectors(self.positions(list_id)).view(np.uint8)


def _map_named(ivf: Any, name: str, file: Path) -> None:
    """Maps the lists of ``ivf`` from the file of that name, which must lie below the folder of ``file``.

    Where both files were moved, it lies beside ``file``. Otherwise a relative name counts from the folder, or else, as
    in faiss, from the working directory.
    """
    lists = require_faiss().downcast_InvertedLists(ivf.invlists)
    if type(lists).__name__ != "OnDiskInvertedLists" or lists.filename != name:
        raise UnsupportedIndexError(
            f"{file} names another file, {name!r}, but does not keep its lists there; it cannot be served"
        )
    folder = file.resolve().parent
    places = (folder / Path(name).name, folder / name, Path(name))
    target = next((place for place in places if filesystem.exists(place)), places[-1])
    try:
        # What is opened is what is looked at: a link that changes in between does not matter.
        with filesystem.performing("open", target):
            opened = os.open(target, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except MissingFileError as error:
        raise CorruptIndexError(f"{file} keeps its lists in {target}, which is not there") from error
    except FileError as error:
        raise cannot_read(error, "file", target) from error
    try:
        reached = f"/proc/self/fd/{opened}"
        found = Path(reached).resolve()
        if not found.is_relative_to(folder):
            raise UnsupportedIndexError(
                f"{file} keeps its lists in {target}, which is not below {folder}; move it beside {file.name} to "
                "import it"
            )
        with filesystem.performing("stat", target):
            mode = os.fstat(opened).st_mode
        if not stat.S_ISREG(mode):
            raise CorruptIndexError(f"{file} keeps its lists in {target}, which is not a file")
        lists.filename, lists.read_only = reached, True
        _map(lists, found)
        lists.filename = str(found)
    finally:
        os.close(opened)


def _check_mapped(lists: Any, file: Path) -> None:
    # faiss maps a short file without complaint, and a read beyond its end kills the process.
    faiss = require_faiss()
    extents = np.empty((lists.lists.size(), 3), dtype=np.uint64)
    if extents.size:
        faiss.memcpy(faiss.swig_ptr(extents), lists.lists.data(), extents.nbytes)
    size, capacity, offset = extents.astype(np.float64).T
    target = Path(lists.filename) if lists.filename else file
    if not filesystem.is_file(target):
        raise CorruptIndexError(f"{file} keeps its lists in {target}, which is not there")
    available = min(int(lists.totsize), filesystem.stat(target).st_size)
    ends = np.where(size > 0, offset + capacity * (lists.code_size + 8), 0)
    if (size > capacity).any() or ends.max(initial=0) > available:
        raise CorruptIndexError(f"{target} is truncated: lists reach beyond its {available} bytes")
    if lists.ptr is None:
        # The mapping flag makes faiss leave out the data of lists that lie in a file of their own.
        _map(lists, target)


def _map(lists: Any, target: Path) -> None:
    try:
        lists.do_mmap()
    except RuntimeError as error:
        raise CorruptIndexError(f"{target} cannot be mapped: {faiss_message(error)}") from error


def _copy_lists(lists: _SourceLists, table: I64, code_size: int, out: OutFile, report: Progress) -> None:
    for list_id, (size, capacity, offset) in enumerate(table.tolist()):
        if size:
            out.write(np.ascontiguousarray(lists.codes(list_id)), offset)
            out.write(np.ascontiguousarray(lists.ids(list_id)), offset + capacity * code_size)
        if list_id % 256 == 0 or list_id + 1 == len(table):
            report("import", list_id + 1, len(table))


def _all_ids(lists: _SourceLists) -> Iterator[I64]:
    for list_id in np.flatnonzero(lists.sizes):
        yield lists.ids(int(list_id))


def _without_id_map(model: LoadedModel, had_id_map: bool) -> Any:
    """The index to store: pre-transforms and IVF, without the id map."""
    if not had_id_map:
        return model.outer
    if not model.transforms:
        return model.ivf
    bare = require_faiss().IndexPreTransform(model.ivf)
    for transform in reversed(model.transforms):
        bare.prepend_transform(transform)
    return bare


def clear_direct_map(ivf: Any) -> None:
    """Forget an id-to-position map; our lists do not change, and it would be stored with the model."""
    faiss = require_faiss()
    if ivf.direct_map.type != faiss.DirectMap.NoMap:
        ivf.set_direct_map_type(faiss.DirectMap.NoMap)


def _normalizes(model: LoadedModel, metric: Metric) -> bool:
    faiss = require_faiss()
    last = model.transforms[-1] if model.transforms else None
    return metric == "ip" and isinstance(last, faiss.NormalizationTransform) and last.norm == 2.0


def _codec_name(ivf: Any) -> str:
    faiss = require_faiss()
    kind = type(ivf).__name__
    if kind == "IndexIVFFlat":
        return "flat"
    if kind == "IndexIVFPQ" and ivf.pq.nbits == 8:
        return f"pq{ivf.pq.M}"
    if kind == "IndexIVFPQFastScan" and ivf.pq.nbits == 4:
        return f"pqfs{ivf.pq.M}"
    if kind == "IndexIVFScalarQuantizer":
        quantizer = faiss.ScalarQuantizer
        named = {quantizer.QT_8bit: "sq8", quantizer.QT_fp16: "fp16"}
        if hasattr(quantizer, "QT_bf16"):
            named[quantizer.QT_bf16] = "bf16"
        return named.get(ivf.sq.qtype, f"faiss:SQ(qtype={ivf.sq.qtype})")
    return f"faiss:{kind.removeprefix('Index')}"
