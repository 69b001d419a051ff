"""Building an index from vectors: train on a sample, assign, encode and sort into lists, commit; in bounded memory.

Two passes over the vectors. The first assigns each to its nearest centroid and counts; the second encodes and writes
every vector to its final place. What cannot be read at any place (an iterator, Parquet, Arrow, HDF5) is spooled to disk
before (in the index directory: it must be on a disk with room for the vectors once more, as float32).
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hybridindex import filesystem
from hybridindex.config import check_count
from hybridindex.errors import DuplicateIdError, InvalidInputError
from hybridindex.index.codec import DEVICE_KINDS, CodecSpec, parse_codec
from hybridindex.index.compress import check_bits, check_codec, compress
from hybridindex.index.faiss_model import (
    LoadedModel,
    apply_transforms,
    encode,
    new_model,
    quantize,
    require_faiss,
    train_model,
    write_empty_model,
)
from hybridindex.index.ids import find_duplicates
from hybridindex.index.ivf import IVFIndex
from hybridindex.index.memory import BuildMemory, divide_budget
from hybridindex.index.opening import open_index
from hybridindex.index.source import VectorSource, open_source
from hybridindex.index.storage.commit import Progress, commit_generation, no_progress
from hybridindex.index.storage.generation import GenerationWriter, OutFile, as_path
from hybridindex.index.storage.lists import ExtentReader, ExtentWriter, repack
from hybridindex.index.storage.manifest import LISTS_FILE, MODEL_FILE, GenerationSpec
from hybridindex.types import F32, I64, Metric

__all__ = ["DEFAULT_SEED", "build", "default_nlist", "default_nprobe"]

_LOG = logging.getLogger(__name__)

DEFAULT_SEED = 1234
_MAX_SEED = 2**31 - 1
_KMEANS_ITERATIONS = 10
#: K-means gains little from more rows per centroid than this, and little from fewer rows than _SMALL_SAMPLE in all.
_ROWS_PER_CENTROID = 64
_SMALL_SAMPLE = 65_536
#: faiss's own lower bound of rows per centroid for a sound k-means.
_SOUND_ROWS_PER_CENTROID = 39


def build(
    vectors: Any,
    path: str | Path,
    *,
    nlist: int | None = None,
    metric: Metric = "ip",
    codec: str = "flat",
    ids: Any = None,
    normalize: bool = False,
    nprobe: int | None = None,
    memory_budget_bytes: int = 1 << 30,
    train_size: int | None = None,
    seed: int = DEFAULT_SEED,
    replace: bool = False,
    bits: int | None = None,
    rerank: str | None = None,
    on_source: Callable[[VectorSource], None] | None = None,
    prepare: Callable[[Path], None] | None = None,
    progress: Progress | None = None,
) -> IVFIndex:
    """Build an index at ``path`` and open it.

    A first build makes the directory. Building onto an existing index is refused without ``replace``, which adds a
    generation and makes it the current one once it is safely on disk. The old one stays for
    :func:`hybridindex.index.opening.rollback`, until the new one serves. Whatever stops a build (Ctrl-C and a full disk
    included) leaves the old one.

    Args:
        vectors: (n, dim) array or memory map; the path of a file, or a :class:`hybridindex.types.VectorFile`, which
            names its columns; or an iterable of (n_i, dim) chunks or of (chunk, ids) pairs. Elements are float32,
            float16, bfloat16, uint8, or float64, which is rounded to float32.
        path: the index directory: new, empty, or an index where ``replace`` says so.
        nlist: number of lists; ``None`` takes about 4*sqrt(n).
        metric: "ip" (inner product; k-means is spherical, as faiss does) or "l2" (squared Euclidean distance).
        codec: see :func:`hybridindex.index.codec.parse_codec`. "rabitq" is short for ``bits=1`` with the rows of
            ``rerank``.
        ids: (n,) integers of 0 or more, all different; ``None`` numbers the vectors from 0.
        normalize: scale vectors and queries to length 1, which makes "ip" cosine similarity; kept in the manifest.
        nprobe: default number of probes of a search; ``None`` takes nlist/16.
        memory_budget_bytes: bound on the anonymous memory that the build adds, see :mod:`hybridindex.index.memory`.
        train_size: rows of the k-means sample; ``None`` takes 64 per list, at least 65,536, as far as the budget goes.
        seed: of sampling and k-means; the same vectors, options and seed give the same fingerprint.
        replace: an index that stands at ``path`` may be replaced.
        bits: put codes of 1, 2 or 4 bits a dimension beside the rows, as :func:`hybridindex.index.compress.compress`
            does; where that fails, the index stands without them.
        rerank: codec of the rows of ``codec="rabitq"``: flat (the default), fp16, bf16 or sq8.
        on_source: called with the vectors and their ids, by position, before anything is trained.
        prepare: called with the folder of the new generation when its files are on disk, and it is not the current one
            yet; may add others. Where it fails, the old one stays.
        progress: ``progress(stage, done, total)`` with the stages spool, train, assign, encode, pack, checksum, and
            those of compress; units are rows (pack: lists; checksum: bytes).

    Raises:
        InvalidInputError: an argument is wrong, or a vector holds NaN or infinity or is too long; names it.
        IndexExistsError: an index stands at ``path``; says what it is and who serves it.
        DuplicateIdError: an id is given twice.
        DiskFullError: no room; the previous generation is untouched.
        NotWritableError: ``path`` cannot be made or written.
        BuildError: another process is writing to the same index.
        MissingDependencyError: faiss, or the package that reads the file, is not installed.
    """
    path = as_path(path)
    _check_metric(metric, normalize)
    codec, bits = _rows_and_bits(codec, bits, rerank)
    nlist, train_size = _optional("nlist", nlist), _optional("train_size", train_size)
    memory_budget_bytes, seed = _whole("memory_budget_bytes", memory_budget_bytes, 1), _whole("seed", seed, 0)
    if seed > _MAX_SEED:
        raise InvalidInputError(f"seed is {seed}; expected at most {_MAX_SEED}")
    require_faiss()
    report = progress or no_progress
    with GenerationWriter(path, replace=replace, prepare=prepare) as writer:
        source = open_source(vectors, ids, writer, report)
        if on_source is not None:
            on_source(source)
        if not source.n:
            raise InvalidInputError("vectors hold no rows; expected 1 at least")
        if nlist is None:
            nlist = default_nlist(source.n)
        if source.n < nlist:
            raise InvalidInputError(f"nlist is {nlist} but there are {source.n} vectors; expected nlist <= {source.n}")
        if nprobe is not None:
            nprobe = check_count("nprobe", nprobe, nlist)
        spec = parse_codec(codec, source.dim)
        if bits is not None:
            check_codec(spec.name)
        # Normalised, every element is at most 1.
        source = dataclasses.replace(source, max_abs=None if normalize else spec.max_abs)
        memory = divide_budget(memory_budget_bytes, dim=source.dim, nlist=nlist, spec=spec)
        _check_ids_unique(source, writer, memory)
        model = new_model(spec, dim=source.dim, nlist=nlist, metric=metric, normalize=normalize)
        train_rows = _train(model, source, memory, nlist=nlist, train_size=train_size, seed=seed, report=report)
        assigned, sizes = _assign(model, source, writer, memory, nlist, report)
        lists, table = _write_lists(model, source, writer, memory, spec, assigned, sizes, report)
        for scratch in (*source.scratch, assigned):
            writer.drop(scratch)
        write_empty_model(model.outer, model.ivf, writer.open_file(MODEL_FILE).append)
        built = GenerationSpec(
            metric=metric,
            codec=spec.name,
            dim=source.dim,
            scan_dim=source.dim,
            nprobe=nprobe or default_nprobe(nlist),
            layout=spec.layout,
            by_residual=spec.by_residual,
            normalized=normalize,
            code_size=spec.code_size,
            notes={"source": "build", "train_rows": train_rows, "seed": seed},
        )
        commit_generation(writer, lists, table, built, progress=report)
    # What was just written and digested need not be read a second time.
    index = open_index(path, verify="quick")
    if bits is not None:
        try:
            compress(index, bits, progress=report)
        except BaseException:
            index.close()
            raise
    return index


def _rows_and_bits(codec: str, bits: int | None, rerank: str | None) -> tuple[str, int | None]:
    """The codec of the rows, and the bits of codes beside them."""
    if codec == "rabitq":
        codec, bits = "flat" if rerank is None else rerank, 1 if bits is None else bits
        if codec not in DEVICE_KINDS:
            raise InvalidInputError(f"rerank is {rerank!r}; expected one of {', '.join(DEVICE_KINDS)}")
    elif rerank is not None:
        raise InvalidInputError(
            f"rerank is {rerank!r} and codec {codec!r}; expected codec 'rabitq' with it, or codec {rerank!r} with bits"
        )
    return codec, None if bits is None else check_bits(bits)


def default_nlist(n: int) -> int:
    """4*sqrt(n), but no list shorter than 39 vectors on average, and 65,536 at most."""
    return max(1, min(round(4 * math.sqrt(n)), n // _SOUND_ROWS_PER_CENTROID, 65_536))


def default_nprobe(nlist: int) -> int:
    """A sixteenth of the lists."""
    return max(1, min(nlist, round(nlist / 16)))


def _check_metric(metric: str, normalize: bool) -> None:
    if metric not in ("ip", "l2"):
        raise InvalidInputError(f"metric is {metric!r}; expected 'ip' or 'l2' (cosine: metric 'ip', normalize=True)")
    if normalize and metric != "ip":
        raise InvalidInputError("normalize=True with metric 'l2'; expected metric 'ip': it gives the same order")


def _whole(name: str, value: Any, least: int) -> int:
    """A Python integer of a Python or numpy one: manifests hold no other."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise InvalidInputError(f"{name} is {value!r}; expected an integer of at least {least}")
    return int(value)


def _optional(name: str, value: Any) -> int | None:
    return None if value is None else _whole(name, value, 1)


def _check_ids_unique(source: VectorSource, writer: GenerationWriter, memory: BuildMemory) -> None:
    if source.given_ids is None:
        return
    chunks = (source.ids(start, stop) for start, stop in _spans(source.n, memory.chunk_rows))
    found = find_duplicates(chunks, source.n, writer)
    if found.surplus:
        repeated, whose = found.examples[0], f" of {source.origin}" if source.origin else ""
        spans = _spans(source.n, memory.chunk_rows)
        rows = (
            start + int(row) for start, stop in spans for row in np.flatnonzero(source.ids(start, stop) == repeated)
        )
        first, second = itertools.islice(rows, 2)
        raise DuplicateIdError(
            f"ids{whose} hold {repeated} more than once ({found.surplus} of {source.n} ids repeat an earlier one), "
            f"first in rows {first} and {second}; expected every id once"
        )


def _train(
    model: LoadedModel,
    source: VectorSource,
    memory: BuildMemory,
    *,
    nlist: int,
    train_size: int | None,
    seed: int,
    report: Progress,
) -> int:
    wanted = train_size or max(_ROWS_PER_CENTROID * nlist, min(256 * nlist, _SMALL_SAMPLE))
    rows = max(nlist, min(source.n, wanted, memory.train_rows))
    if rows < min(source.n, wanted, _SOUND_ROWS_PER_CENTROID * nlist):
        _LOG.warning(
            "k-means trains on %d rows for %d lists (%.1f per list; %d or more would be better): raise "
            "memory_budget_bytes", rows, nlist, rows / nlist, _SOUND_ROWS_PER_CENTROID * nlist,
        )  # fmt: skip
    report("train", 0, rows)
    sample = source.sample(_strata(source.n, rows, seed), memory.chunk_rows)
    for start, stop in _spans(rows, memory.chunk_rows):
        sample[start:stop] = _transformed(model, sample[start:stop])
    train_model(model, sample, encoder_rows=memory.encoder_rows, seed=seed, niter=_KMEANS_ITERATIONS)
    report("train", rows, rows)
    return rows


def _strata(n: int, rows: int, seed: int) -> I64:
    """One random position from each of ``rows`` equal parts of 0..n-1: increasing, (rows,) int64."""
    edges = np.arange(rows + 1, dtype=np.int64) * n // rows
    spread = np.random.default_rng(seed).random(rows)
    return edges[:-1] + (spread * np.diff(edges)).astype(np.int64)


def _transformed(model: LoadedModel, x: F32) -> F32:
    return apply_transforms(model.transforms, x)


def _assign(
    model: LoadedModel,
    source: VectorSource,
    writer: GenerationWriter,
    memory: BuildMemory,
    nlist: int,
    report: Progress,
) -> tuple[OutFile, I64]:
    """First pass: the list of every vector into a scratch file of int32; and the list sizes (nlist,) int64."""
    out = writer.open_file("assign.i32")
    sizes = np.zeros(nlist, dtype=np.int64)
    for start, stop in _spans(source.n, memory.chunk_rows):
        lists = quantize(model.ivf, _transformed(model, source.rows(start, stop)), 1)[0][:, 0]
        sizes += np.bincount(lists, minlength=nlist)
        out.append(lists.astype(np.int32))
        report("assign", stop, source.n)
    return out, sizes


def _write_lists(
    model: LoadedModel,
    source: VectorSource,
    writer: GenerationWriter,
    memory: BuildMemory,
    spec: CodecSpec,
    assigned: OutFile,
    sizes: I64,
    report: Progress,
) -> tuple[OutFile, I64]:
    """Second pass: encode and put every vector where it belongs; fast-scan blocks are packed from rows afterwards."""
    out = writer.open_file(LISTS_FILE if spec.layout == "rows" else "rows.bin")
    extents = ExtentWriter(out, sizes, spec.code_size)
    lists_of = filesystem.map_array(assigned.path, np.int32, (source.n,))
    for start, stop in _spans(source.n, memory.chunk_rows):
        lists = lists_of[start:stop].astype(np.int64)
        codes = encode(model.ivf, _transformed(model, source.rows(start, stop)), lists)
        extents.add(lists, codes, source.ids(start, stop))
        report("encode", stop, source.n)
    if spec.layout == "rows":
        return out, extents.table
    rows = filesystem.map_array(out.path, np.uint8)
    reader = ExtentReader(rows, extents.table, code_size=spec.code_size, layout="rows", element=None)
    packed = writer.open_file(LISTS_FILE)
    table = repack(
        reader,
        packed,
        sizes=sizes,
        code_size=spec.code_size,
        layout=spec.layout,
        element=None,
        progress=lambda done: report("pack", done, len(sizes)),
    )
    writer.drop(out)
    return packed, table


def _spans(n: int, step: int) -> Iterator[tuple[int, int]]:
    for start in range(0, n, step):
        yield start, min(start + step, n)
