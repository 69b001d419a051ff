"""Making RaBitQ codes of the rows of an index, beside them: list by list, in bounded memory, safely on disk.

The file of codes is written under a temporary name, synced and renamed; then ``rabitq.json``, which is the commit. A
crash leaves the old codes or the new ones, and files that the next call removes. The rows are only read.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from hybridindex import filesystem
from hybridindex.config import MAX_CANDIDATES
from hybridindex.errors import (
    FileError,
    IndexFormatError,
    InvalidInputError,
    MissingFileError,
    UnsupportedIndexError,
)
from hybridindex.index.codec import DEVICE_KINDS, DeviceCodec
from hybridindex.index.faiss_model import centroids_of
from hybridindex.index.ivf import IVFIndex
from hybridindex.index.rabitq.candidates import CandidateMeter
from hybridindex.index.rabitq.codes import find_codes
from hybridindex.index.rabitq.encode import decode_blocks, encode_list, factors
from hybridindex.index.rabitq.faiss_codes import FAISS_CODEC, FaissCodes, code_bytes
from hybridindex.index.rabitq.rotation import signs
from hybridindex.index.rabitq.spec import (
    BLOCK_ROWS,
    ROUNDS,
    SPEC_FILE,
    SUPPORTED_BITS,
    CodeFormat,
    CodeSource,
    RabitqSpec,
    bin_name,
    pad_dim,
    parse_spec,
    render_spec,
)
from hybridindex.index.storage.additions import adding_to_generation, remove_additions
from hybridindex.index.storage.checksums import digest_file
from hybridindex.index.storage.commit import Progress, no_progress
from hybridindex.index.storage.generation import OutFile
from hybridindex.index.storage.manifest import LISTS_FILE, versions
from hybridindex.types import F32, I64, U8, Metric

__all__ = ["can_take_over", "check_asked", "check_bits", "check_codec", "compress", "remove_codes"]

_log = logging.getLogger(__name__)

_MAX_SEED = 2**31 - 1
_BEING_WRITTEN = "rabitq.bin.new"
#: Decoded rows that are coded together.
_CHUNK_BYTES = 8 << 20
#: Of the sample that chooses the scales.
_SAMPLED_LISTS, _SAMPLED_ROWS = 64, 256
#: The largest factor of the sample is below 2^8 of its scale, a 256th of what a half holds.
_SCALE_BITS = 8
#: That candidates are measured with; more say little more and take memory.
_MOST_QUERIES = 512
_MOST_PROBES = 8192
#: Noise on sampled rows, as a share of their distance from the centroid.
_NOISE = 0.1
#: Fewer say little about an average.
_FEW_QUERIES = 100


def check_codec(codec: str) -> None:
    """Refuse rows that are no vectors.

    Raises:
        UnsupportedIndexError: names the codec.
    """
    if codec not in DEVICE_KINDS:
        raise UnsupportedIndexError(
            f"codec {codec!r} cannot be compressed: its rows are not vectors, so candidates cannot be "
            f"compared exactly; expected {', '.join(DEVICE_KINDS)}"
        )


def can_take_over(index: IVFIndex) -> bool:
    """Whether the rows are codes of faiss's own that :func:`compress` takes over."""
    return index.codec == FAISS_CODEC and index.code_size == code_bytes(index.scan_dim)


def check_bits(bits: Any) -> int:
    """``bits`` as a Python integer; raises InvalidInputError."""
    if isinstance(bits, bool) or not isinstance(bits, int | np.integer) or bits not in SUPPORTED_BITS:
        raise InvalidInputError(f"bits is {bits!r}; expected one of {', '.join(map(str, SUPPORTED_BITS))}")
    return int(bits)


def _check_loss(recall_loss: Any) -> float:
    number = isinstance(recall_loss, int | float | np.number) and not isinstance(recall_loss, bool)
    if not number or not 0 <= recall_loss < 1:
        raise InvalidInputError(f"recall_loss is {recall_loss!r}; expected a share of 0 or more and less than 1")
    return float(recall_loss)


def _check_seed(seed: Any) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed <= _MAX_SEED:
        raise InvalidInputError(f"seed is {seed!r}; expected a whole number from 0 to {_MAX_SEED}")
    return int(seed)


def check_asked(index: IVFIndex, bits: Any, recall_loss: Any, queries: Any, seed: Any) -> None:
    """Raises what :func:`compress` would of its arguments and the codec."""
    bits = check_bits(bits)
    _check_loss(recall_loss)
    seed = _check_seed(seed)
    _check_rows(index, bits)
    if queries is not None:
        _given_queries(index, queries, seed)


def compress(
    index: IVFIndex,
    bits: int = 1,
    recall_loss: float = 0.005,
    queries: Any = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> RabitqSpec:
    """Put codes beside the rows of an open index, in the place of earlier ones, and use them from now on.

    Where the rows are codes of 1 bit of faiss's own (``IVF…,RaBitQ``), these are taken over: nothing is coded anew.

    Routers that are open go on as they are. The codes belong to this generation: copies and later builds have none.

    Args:
        bits: of a dimension: 1, 2 or 4.
        recall_loss: share of recall@k, against searches of the rows, that a search may lose on average. It decides the
            candidates.
        queries: (n, dim) float32, of which up to 512 measure the candidates; None: sampled rows with a little noise
            stand for them. Real queries can lie further from the rows, and need more candidates.
        seed: of the rotation and of what is sampled.
        progress: ``progress(stage, done, total)`` with the stages compress (rows), candidates (nprobe) and checksum of
            codes (bytes).

    Raises:
        InvalidInputError: names the argument; or the index is closed.
        UnsupportedIndexError: rows of this codec cannot be coded.
        CorruptIndexError: rows are damaged.
        BuildError: another process is writing, or the generation was removed. DiskFullError: no room. NotWritableError.
        In each case what was there before stays.
    """
    bits, recall_loss, seed = check_bits(bits), _check_loss(recall_loss), _check_seed(seed)
    source = _rows_of(index, bits)
    given = None if queries is None else _given_queries(index, queries, seed)
    form = _choose_format(source, bits, seed)
    with index.integrity.all_whole(), _writing(index) as folder:
        meter, measured_with = _meter(source, form, given, seed)
        spec = _write(folder, source, form, meter, recall_loss, progress or no_progress)
        spec = dataclasses.replace(spec, measured_with=measured_with)
        _commit(folder, spec)
    ivf = index.open_faiss()
    index.rabitq, index.rabitq_problem = find_codes(
        folder, index.manifest, index.list_sizes, lambda: centroids_of(ivf), whole=False
    )
    return spec


def remove_codes(index: IVFIndex) -> int:
    """Remove the codes of an open index, damaged ones too; returns their bytes. Open routers keep what they read.

    Raises:
        InvalidInputError: the index is closed.
        BuildError: another process is writing, or something cannot be removed.
    """
    index.mapped_model()  # is it open?
    with _writing(index) as folder:
        nbytes = remove_additions(folder, SPEC_FILE, "rabitq*")
    index.rabitq, index.rabitq_problem = None, ""
    return nbytes


@contextmanager
def _writing(index: IVFIndex) -> Iterator[Path]:
    """The folder of the open generation, with the writers' lock; leaves no file there that nothing names."""
    folder = index.integrity.folder
    with adding_to_generation(index.path, folder):
        try:
            yield folder
        finally:
            _remove_strays(folder)


def _remove_strays(folder: Path) -> None:
    """What the last commit does not name. Nothing, where that cannot be asked."""
    try:
        named = parse_spec(filesystem.read_bytes(folder / SPEC_FILE), SPEC_FILE).file
    except UnsupportedIndexError:
        # Another version's: it may need each of them.
        named = None
    except (MissingFileError, IndexFormatError):  # nothing that anybody could use
        named = SPEC_FILE
    except FileError as error:
        _log.warning("files that no codes need may be left: %s", error)
        return
    with suppress(FileError):  # a later call finds them
        for file in filesystem.list_folder(folder, "rabitq*"):
            if file.name not in (SPEC_FILE, named) and (
                named is not None or file.name in (_BEING_WRITTEN, f"{SPEC_FILE}.new")
            ):
                filesystem.discard(file)


class _Rows:
    """Decoded rows of an open index, and how they are coded."""

    source: CodeSource = "rows"

    def __init__(self, index: IVFIndex, codec: DeviceCodec | None) -> None:
        self.index, self._codec = index, codec
        self._reader = index.extent_reader()
        self.centroids = index.centroids

    @property
    def metric(self) -> Metric:
        """Of the estimates."""
        return self.index.metric

    def decode(self, list_id: int, start: int, stop: int) -> F32:
        """(stop - start, scan_dim) float32."""
        assert self._codec is not None
        codes = self._reader.rows(list_id, start, stop)
        return self._codec.decode(codes[: stop - start], self.centroids[list_id])

    def factors(self, list_id: int, stop: int, flips: F32, bits: int) -> tuple[F32, F32]:
        """f and g of the first rows of a list, (stop,) float32 each."""
        rows = self.decode(list_id, 0, stop)
        with np.errstate(over="ignore", invalid="ignore"):
            _, f, towards, along = factors(rows, self.centroids[list_id], flips, bits)
            return f, towards - f * along

    def encode(self, list_id: int, start: int, rows: F32, flips: F32, form: CodeFormat) -> U8:
        """Blocks of decoded rows of a list from ``start`` on."""
        return encode_list(rows, self.centroids[list_id], flips, form)

    def squares(self, list_id: int, start: int, stop: int) -> F32 | None:
        """As :meth:`hybridindex.index.rabitq.candidates.CandidateMeter.add` takes them."""
        return None


class _FaissRows(_Rows):
    """Codes of faiss's own, which are taken over."""

    source: CodeSource = "faiss"

    def __init__(self, index: IVFIndex) -> None:
        super().__init__(index, None)

    @property
    def metric(self) -> Metric:
        return "l2"

    def _codes(self, list_id: int, start: int, stop: int) -> FaissCodes:
        return FaissCodes.of(self._reader.rows(list_id, start, stop)[: stop - start], self.index.scan_dim)

    def decode(self, list_id: int, start: int, stop: int) -> F32:
        return self._codes(list_id, start, stop).rows(self.centroids[list_id])

    def factors(self, list_id: int, stop: int, flips: F32, bits: int) -> tuple[F32, F32]:
        f = self._codes(list_id, 0, stop).f.astype(np.float32)
        return f, np.zeros_like(f)

    def encode(self, list_id: int, start: int, rows: F32, flips: F32, form: CodeFormat) -> U8:
        return self._codes(list_id, start, start + len(rows)).blocks(self.centroids[list_id], form)

    def squares(self, list_id: int, start: int, stop: int) -> F32 | None:
        return self._codes(list_id, start, stop).squares(self.centroids[list_id])


def _rows_of(index: IVFIndex, bits: int) -> _Rows:
    """Raises as :func:`_check_rows`."""
    _check_rows(index, bits)
    return _FaissRows(index) if index.codec == FAISS_CODEC else _Rows(index, index.device_codec())


def _check_rows(index: IVFIndex, bits: int) -> None:
    """Refuse rows that can be neither coded nor taken over.

    Raises:
        UnsupportedIndexError: names the codec.
        InvalidInputError: they cannot be coded with these bits.
    """
    if index.codec != FAISS_CODEC:
        check_codec(index.codec)
        return
    if not can_take_over(index):
        raise UnsupportedIndexError(
            f"codec {index.codec!r} has several bits a dimension here, {index.code_size} bytes a row: only codes of 1 "
            "bit are taken over; faiss scans these"
        )
    if bits != 1:
        raise InvalidInputError(
            f"bits is {bits}; codec {index.codec!r} holds codes of 1 bit and has no rows to encode again"
        )


def _given_queries(index: IVFIndex, queries: Any, seed: int) -> F32:
    checked = index.check_queries(queries)
    if len(checked) == 0:
        raise InvalidInputError("queries is empty; expected some hundred")
    if len(checked) < _FEW_QUERIES:
        _log.warning("candidates measured with %d queries may be too few; give some hundred", len(checked))
    if len(checked) > _MOST_QUERIES:
        checked = checked[np.random.default_rng(seed).choice(len(checked), _MOST_QUERIES, replace=False)]
    return index.transform(np.ascontiguousarray(checked))


def _choose_format(source: _Rows, bits: int, seed: int) -> CodeFormat:
    """The scales come from rows of some lists."""
    index = source.index
    dims, rounds = pad_dim(index.scan_dim), ROUNDS if source.source == "rows" else 0
    flips = signs(dims, seed, rounds)
    sizes = index.list_sizes
    chosen = np.random.default_rng(seed).permutation(np.flatnonzero(sizes))[:_SAMPLED_LISTS]
    largest_f = largest_g = 0.0
    for list_id in chosen.tolist():
        f, g = source.factors(list_id, min(int(sizes[list_id]), _SAMPLED_ROWS), flips, bits)
        largest_f = max(largest_f, _largest(f))
        largest_g = max(largest_g, _largest(g))
    return CodeFormat(
        bits=bits,
        dim=index.scan_dim,
        padded_dim=dims,
        metric=source.metric,
        seed=seed,
        rounds=rounds,
        f_scale=_scale(largest_f),
        g_scale=_scale(largest_g),
    )


def _largest(values: F32) -> float:
    sizes = np.abs(values)
    return float(sizes[np.isfinite(sizes)].max(initial=0))


def _scale(largest: float) -> float:
    if largest == 0:
        return 1.0
    return math.ldexp(1.0, min(100, max(-100, math.frexp(largest)[1] - _SCALE_BITS)))


def _meter(source: _Rows, form: CodeFormat, given: F32 | None, seed: int) -> tuple[CandidateMeter, str]:
    index = source.index
    queries, own = (given, None) if given is not None else _sample_queries(source, seed)
    probes = index.quantize(queries, min(index.nlist, _MOST_PROBES))[0]
    meter = CandidateMeter(queries, probes, index.list_sizes, form, own)
    return meter, "queries" if own is None else "sampled rows"


def _sample_queries(source: _Rows, seed: int) -> tuple[F32, I64]:
    """Rows with noise, (n, scan_dim) float32, and the list and row of each, (n, 2) int64."""
    index, rng = source.index, np.random.default_rng(seed)
    picked = np.sort(rng.choice(index.count, min(index.count, _MOST_QUERIES), replace=False))
    stops = np.cumsum(index.list_sizes)
    lists = np.searchsorted(stops, picked, side="right")
    places = picked - (stops - index.list_sizes)[lists]
    pairs = zip(lists.tolist(), places.tolist(), strict=True)
    rows = [source.decode(list_id, row, row + 1)[0] for list_id, row in pairs]
    queries = np.array(rows, dtype=np.float32).reshape(-1, index.scan_dim)
    away = np.linalg.norm(queries - source.centroids[lists], axis=1, keepdims=True) / math.sqrt(index.scan_dim)
    noisy = queries + _NOISE * away * rng.standard_normal(queries.shape)
    return noisy.astype(np.float32), np.stack([lists, places], axis=1)


def _write(
    folder: Path, source: _Rows, form: CodeFormat, meter: CandidateMeter, recall_loss: float, progress: Progress
) -> RabitqSpec:
    """Writes and syncs the file of codes under its temporary name; what there is to say of it."""
    index = source.index
    out = OutFile(folder / _BEING_WRITTEN)
    size = form.file_bytes_for(index.list_sizes)
    try:
        out.reserve(size)
        _encode(out, source, form, meter, progress)
        out.sync()
    finally:
        out.close()
    table = meter.table(recall_loss, lambda done, total: progress("candidates", done, total))
    if table.r[-1][-1] == MAX_CANDIDATES:
        _log.warning(
            "%d candidates, the maximum, lose more than %g of recall; codes of more bits need fewer candidates",
            MAX_CANDIDATES,
            recall_loss,
        )
    digest = digest_file(out.path, progress=lambda done: progress("checksum of codes", done, size))
    spec = RabitqSpec(
        **dataclasses.asdict(form),
        generation=index.generation,
        count=index.count,
        nlist=index.nlist,
        rows_xxh3_128=index.manifest.files[LISTS_FILE].xxh3_128,
        file=bin_name(digest),
        file_bytes=size,
        file_xxh3_128=digest,
        recall_loss=recall_loss,
        candidates=table,
        measured_with="",
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds"),
        versions=versions(),
        source=source.source,
    )
    if reason := spec.hardly_pays(index.nprobe):
        _log.warning(
            "codes of %s hardly pay, so precision 'auto' scans rows: %s; codes of more bits need fewer candidates%s",
            index.path,
            reason,
            ", and so do vectors and queries whose mean was taken off" if form.metric == "l2" else "",
        )
    return spec


def _encode(out: OutFile, source: _Rows, form: CodeFormat, meter: CandidateMeter, progress: Progress) -> None:
    flips = signs(form.padded_dim, form.seed, form.rounds)
    step = max(BLOCK_ROWS, _CHUNK_BYTES // (4 * form.padded_dim) // BLOCK_ROWS * BLOCK_ROWS)
    done, count = 0, source.index.count
    for list_id, size in enumerate(source.index.list_sizes.tolist()):
        centroid = source.centroids[list_id]
        for start in range(0, size, step):
            rows = source.decode(list_id, start, min(start + step, size))
            blocks = source.encode(list_id, start, rows, flips, form)
            out.append(blocks)
            if meter.wants(list_id):
                coded = decode_blocks(blocks, len(rows), form)
                meter.add(list_id, start, rows, coded, centroid, source.squares(list_id, start, start + len(rows)))
            done += len(rows)
            progress("compress", done, count)


def _commit(folder: Path, spec: RabitqSpec) -> None:
    filesystem.replace(folder / _BEING_WRITTEN, folder / spec.file)
    filesystem.sync_folder(folder)
    filesystem.replace_file(folder / SPEC_FILE, render_spec(spec))
