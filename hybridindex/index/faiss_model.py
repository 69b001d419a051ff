"""The trained, empty faiss index of a generation: making, training, storing, loading it, and mapping lists into it.

faiss trains, quantizes, encodes and scans; we own the lists. Everything that touches faiss objects in this room goes
through here. Importing this module does not import faiss.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hybridindex import filesystem
from hybridindex.errors import CorruptIndexError, MissingDependencyError, UnsupportedIndexError, how_to_install
from hybridindex.extension import native
from hybridindex.index.codec import CodecSpec
from hybridindex.index.on_disk_lists import on_disk_names
from hybridindex.types import F32, I64, U8, Metric

__all__ = [
    "BLAS_CHOICE",
    "LoadedModel",
    "apply_transforms",
    "blas_kernels",
    "centroids_of",
    "decode",
    "empty_lists",
    "empty_shard",
    "encode",
    "faiss_message",
    "load_model",
    "map_lists",
    "new_model",
    "peel",
    "pq_codewords",
    "quantize",
    "require_faiss",
    "stream_index",
    "train_model",
    "undo_transforms",
    "write_empty_model",
]

_WRITE_CHUNK_BYTES = 1 << 20
#: OpenBLAS's names of the kernels for an instruction set.
_BLAS_KERNELS = {"amx": "SkylakeX", "avx512": "SkylakeX", "avx2": "Haswell"}
#: The environment variable that chooses them, read when OpenBLAS is loaded.
BLAS_CHOICE = "OPENBLAS_CORETYPE"
_FAISS_PLACE = re.compile(r"^Error in .* at \S+:[0-9]+: ")


def require_faiss() -> Any:
    """The faiss module.

    Raises:
        MissingDependencyError: neither faiss-cpu nor faiss-gpu is installed: the error's ``name`` is faiss. Or it is
            there and does not load: ``name`` is None, and the cause says why.
    """
    try:
        with _fast_blas():
            import faiss
    except (ImportError, OSError) as error:
        if not isinstance(error, ModuleNotFoundError) or error.name != "faiss":
            raise MissingDependencyError(
                f"faiss is installed, but does not load: {error}; install what this names, or faiss anew"
            ) from error
        raise MissingDependencyError(
            f"faiss is needed to train, quantize and scan: {how_to_install('cpu')}; on a machine with a CUDA device "
            f"instead: {how_to_install('gpu')}",
            name="faiss",
        ) from error
    return faiss


def blas_kernels() -> str:
    """The kernels that OpenBLAS should run on this CPU, by its name for them; empty: it knows best."""
    return "" if native is None else _BLAS_KERNELS.get(native.kernels_here()[0], "")


@contextmanager
def _fast_blas() -> Iterator[None]:
    """Names the kernels to an OpenBLAS that is loaded within. The one in faiss's wheels gives every CPU that is newer
    than itself kernels of 2004, with which training takes several times as long. A user's own choice stands."""
    kernels = blas_kernels()
    if "faiss" in sys.modules or BLAS_CHOICE in os.environ or not kernels:
        yield
        return
    os.environ[BLAS_CHOICE] = kernels
    try:
        yield
    finally:
        os.environ.pop(BLAS_CHOICE, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A faiss index and its parts; they share memory, so keep all of them together."""

    #: The whole: an IndexPreTransform, or the IVF index itself.
    outer: Any
    #: The IVF index, downcast. It keeps ``outer`` alive.
    ivf: Any
    #: Pre-transforms in the order of application.
    transforms: tuple[Any, ...]


def new_model(spec: CodecSpec, *, dim: int, nlist: int, metric: Metric, normalize: bool) -> LoadedModel:
    """An untrained index with a flat coarse quantizer; ``normalize`` puts faiss's L2 normalisation in front."""
    faiss = require_faiss()
    code = faiss.METRIC_INNER_PRODUCT if metric == "ip" else faiss.METRIC_L2
    quantizer = faiss.IndexFlat(dim, code)
    if spec.kind == "flat":
        ivf = faiss.IndexIVFFlat(quantizer, dim, nlist, code)
    elif spec.kind == "pq":
        ivf = faiss.IndexIVFPQ(quantizer, dim, nlist, spec.m, 8, code)
        # The table of centroid-codeword products can take 2 GiB and is not needed to build.
        ivf.use_precomputed_table = -1
    elif spec.kind == "pqfs":
        ivf = faiss.IndexIVFPQFastScan(quantizer, dim, nlist, spec.m, 4, code)
        ivf.by_residual = False
    else:
        kinds = {"fp16": "QT_fp16", "bf16": "QT_bf16", "sq8": "QT_8bit"}
        qtype = getattr(faiss.ScalarQuantizer, kinds[spec.kind])
        ivf = faiss.IndexIVFScalarQuantizer(quantizer, dim, nlist, qtype, code, False)
    if not normalize:
        return LoadedModel(outer=ivf, ivf=ivf, transforms=())
    norm = faiss.NormalizationTransform(dim, 2.0)
    return LoadedModel(outer=faiss.IndexPreTransform(norm, ivf), ivf=ivf, transforms=(norm,))


def train_model(model: LoadedModel, sample: F32, *, encoder_rows: int, seed: int, niter: int) -> None:
    """Train coarse quantizer and codec on ``sample`` (n, scan_dim) f32, already transformed.

    K-means is set as faiss's factory sets it: for inner product the centroids are scaled to length 1 in every
    iteration (spherical), for l2 they are plain means. All rows of the sample are used, so faiss's warnings about
    too many or too few rows per centroid say nothing new and are turned off.
    """
    faiss = require_faiss()
    ivf, ptr, n = model.ivf, faiss.swig_ptr, len(sample)
    spherical = ivf.metric_type == faiss.METRIC_INNER_PRODUCT
    _set_clustering(ivf.cp, seed=seed, niter=niter, rows=n)
    ivf.cp.spherical = spherical
    ivf.train_q1(n, ptr(sample), False, ivf.metric_type)
    part = np.ascontiguousarray(sample[:: -(-n // encoder_rows)])
    lists = quantize(ivf, part, 1)[0][:, 0].copy()
    if hasattr(ivf, "pq"):
        part, lists = _at_least(part, lists, int(ivf.pq.ksub))
        _set_clustering(ivf.pq.cp, seed=seed, niter=25, rows=len(part))
    if ivf.by_residual:
        part = part - centroids_of(ivf)[lists]
    ivf.train_encoder(len(part), ptr(part), ptr(lists))
    ivf.is_trained = True
    model.outer.is_trained = True


def _set_clustering(parameters: Any, *, seed: int, niter: int, rows: int) -> None:
    parameters.seed = seed
    parameters.niter = niter
    parameters.min_points_per_centroid = 1
    parameters.max_points_per_centroid = max(1, rows)


def _at_least(part: F32, lists: I64, rows: int) -> tuple[F32, I64]:
    # A product quantizer wants at least as many rows as codewords; repeated rows train a small index just as well.
    if len(part) >= rows:
        return part, lists
    take = np.arange(rows) % len(part)
    return np.ascontiguousarray(part[take]), np.ascontiguousarray(lists[take])


def quantize(ivf: Any, x: F32, nprobe: int) -> tuple[I64, F32]:
    """Nearest centroids of ``x`` (n, scan_dim): lists (n, nprobe) int64, -1 = none found, and distances f32."""
    faiss = require_faiss()
    distances = np.empty((len(x), nprobe), dtype=np.float32)
    lists = np.empty((len(x), nprobe), dtype=np.int64)
    ptr = faiss.swig_ptr
    # The C call: the Python wrapper would do the same checks again.
    ivf.quantizer.search_c(len(x), ptr(x), nprobe, ptr(distances), ptr(lists))
    return lists, distances


def encode(ivf: Any, x: F32, lists: I64) -> U8:
    """Codes of ``x`` (n, scan_dim) f32 assigned to ``lists`` (n,) int64: (n, code_size) uint8, one row per vector."""
    faiss = require_faiss()
    if isinstance(ivf, faiss.IndexIVFFlat):
        return x.view(np.uint8).reshape(len(x), -1)
    codes = np.empty((len(x), ivf.code_size), dtype=np.uint8)
    ptr = faiss.swig_ptr
    ivf.encode_vectors(len(x), ptr(x), ptr(lists), ptr(codes), False)
    return codes


def decode(ivf: Any, codes: U8, lists: I64) -> F32:
    """Undo :func:`encode`, up to what the codec lost: (n, scan_dim) f32."""
    faiss = require_faiss()
    codes, lists = np.ascontiguousarray(codes), np.ascontiguousarray(lists)
    if isinstance(ivf, faiss.IndexIVFPQFastScan):  # has no decode_vectors
        decoded: F32 = ivf.pq.decode(codes)
        return decoded + centroids_of(ivf)[lists] if ivf.by_residual else decoded
    x = np.empty((len(codes), ivf.d), dtype=np.float32)
    ptr = faiss.swig_ptr
    ivf.decode_vectors(len(codes), ptr(codes), ptr(lists), ptr(x))
    return x


def apply_transforms(transforms: tuple[Any, ...], x: F32) -> F32:
    """Run ``x`` (n, dim) through the pre-transforms: (n, scan_dim) f32."""
    for transform in transforms:
        x = transform.apply(x)
    return x


def undo_transforms(transforms: tuple[Any, ...], x: F32) -> F32 | None:
    """Vectors (n, dim) that :func:`apply_transforms` takes to ``x`` (n, scan_dim); None: faiss finds none."""
    before = x
    try:
        for transform in reversed(transforms):
            before = transform.reverse_transform(before)
    except RuntimeError:  # it has no inverse
        return None
    gap = np.abs(apply_transforms(transforms, before) - x).max(initial=0)
    return before if gap <= 1e-3 * np.abs(x).max(initial=0) else None


def centroids_of(ivf: Any, first: int = 0, n: int | None = None) -> F32:
    """(n, scan_dim) f32 centroids from the ``first`` on, whatever the coarse quantizer is; None: all that follow."""
    n = ivf.nlist - first if n is None else n
    return np.asarray(ivf.quantizer.reconstruct_n(first, n), dtype=np.float32)


def pq_codewords(ivf: Any) -> F32:
    """(scan_dim, words) f32: a dimension of all codewords of its sub-quantizer."""
    pq = ivf.pq
    words = require_faiss().vector_to_array(pq.centroids).reshape(pq.M, pq.ksub, pq.dsub)
    return np.ascontiguousarray(words.transpose(0, 2, 1).reshape(pq.d, pq.ksub), dtype=np.float32)


def peel(index: Any) -> tuple[LoadedModel, I64 | None]:
    """Take a faiss index apart: pre-transforms, id maps, IVF. The id map is (ntotal,) int64, or ``None``.

    Raises:
        UnsupportedIndexError: something else than these is wrapped around the lists, or there are none.
    """
    faiss = require_faiss()
    transforms: list[Any] = []
    id_map: I64 | None = None
    found: list[str] = []
    current = faiss.downcast_index(index)
    while not isinstance(current, faiss.IndexIVF):
        found.append(type(current).__name__)
        if isinstance(current, faiss.IndexIDMap) and id_map is None:
            id_map = faiss.vector_to_array(current.id_map).astype(np.int64)
        elif isinstance(current, faiss.IndexPreTransform):
            transforms += [faiss.downcast_VectorTransform(current.chain.at(i)) for i in range(current.chain.size())]
        else:
            raise UnsupportedIndexError(
                f"the faiss index is {' of '.join(found)}; expected an IVF index, bare or behind pre-transforms or an "
                "id map (IndexPreTransform, IndexIDMap)"
            )
        current = faiss.downcast_index(current.index)
    for part in (current, *transforms):
        # Borrowed pointers into ``index``; this is the one attribute that faiss lets us set.
        part.referenced_objects = [index]
    return LoadedModel(outer=index, ivf=current, transforms=tuple(transforms)), id_map


def empty_lists(ivf: Any) -> None:
    """Put empty lists into ``ivf``; the old ones are released if it owned them."""
    faiss = require_faiss()
    if isinstance(ivf, faiss.IndexIVFFastScan):
        old = faiss.downcast_InvertedLists(ivf.invlists)
        per_block, block_bytes = (
            (old.n_per_block, old.block_size) if isinstance(old, faiss.BlockInvertedLists) else (32, 32 * ivf.code_size)
        )
        lists = faiss.BlockInvertedLists(ivf.nlist, per_block, block_bytes)
    else:
        lists = faiss.ArrayInvertedLists(ivf.nlist, ivf.code_size)
    lists.this.disown()
    ivf.replace_invlists(lists, True)


def with_centroids(model: LoadedModel, centroids: F32) -> None:
    """Gives a model whose quantizer is a flat one other centroids, (nlist, scan_dim) float32; its lists are emptied."""
    faiss = require_faiss()
    quantizer = faiss.downcast_index(model.ivf.quantizer)
    quantizer.reset()
    quantizer.add(np.ascontiguousarray(centroids))
    model.ivf.nlist = len(centroids)
    empty_lists(model.ivf)


def write_empty_model(outer: Any, ivf: Any, write: Callable[[bytes], None]) -> None:
    """Streams ``outer`` without vectors to ``write``; the lists of its ``ivf`` are released. Makes no second copy."""
    empty_lists(ivf)
    ivf.ntotal = outer.ntotal = 0
    stream_index(outer, write)


def stream_index(index: Any, write: Callable[[bytes], None]) -> None:
    """What ``faiss.write_index`` would put into a file, to ``write``. ``index`` stays as it is; no second copy."""
    faiss = require_faiss()
    failure: list[BaseException] = []

    def guarded(data: bytes) -> None:
        # Nothing may be raised through C++: the first failure is kept, and the rest of the bytes goes nowhere.
        if not failure:
            try:
                write(data)
            except BaseException as error:  # noqa: BLE001
                failure.append(error)

    buffered = faiss.BufferedIOWriter(faiss.PyCallbackIOWriter(guarded, _WRITE_CHUNK_BYTES), _WRITE_CHUNK_BYTES)
    faiss.write_index(index, buffered)
    del buffered  # flushes
    if failure:
        raise failure[0]


def load_model(path: Path, *, precompute: bool = True) -> LoadedModel:
    """Read ``model.faiss``. Its checksum must have been verified: faiss trusts the bytes it parses.

    ``precompute=False`` leaves out the table with which faiss takes residual pq distances under l2 apart into sums:
    they lose digits where vectors are far from the origin, and the table costs memory. The scan is barely slower.

    Raises:
        CorruptIndexError: faiss cannot read it although the checksum is right.
        UnsupportedIndexError: this faiss does not know the index kind, or the model names another file.
        FileError: it cannot be read.
    """
    faiss = require_faiss()
    if names := on_disk_names(path):
        raise UnsupportedIndexError(f"{path} names another file, {names[0]!r}; expected one that names none")
    try:
        with filesystem.performing("faiss", path):
            outer = faiss.read_index(str(path), 0 if precompute else faiss.IO_FLAG_SKIP_PRECOMPUTE_TABLE)
    except (RuntimeError, MemoryError) as error:
        raise CorruptIndexError(f"faiss {faiss.__version__} cannot read {path}: {faiss_message(error)}") from error
    model, id_map = peel(outer)
    if id_map is not None:
        raise UnsupportedIndexError(f"{path} holds an id map; expected a bare trained index")
    if not precompute and isinstance(model.ivf, faiss.IndexIVFPQ):
        model.ivf.use_precomputed_table = -1  # nor later
    return model


def empty_shard(model: U8, ivf: Any) -> Any:
    """An IVF index without vectors that searches as ``ivf`` does and shares its coarse quantizer.

    Args:
        model: (nbytes,) uint8, the bytes of ``model.faiss`` that ``ivf`` was read from. A second copy of the codec
            tables is made, and for a moment one of the quantizer.

    Raises:
        CorruptIndexError: faiss cannot read the bytes.
    """
    faiss = require_faiss()
    data, at = model.data, 0

    def read(nbytes: int) -> bytes:
        nonlocal at
        part = bytes(data[at : at + nbytes])
        at += len(part)
        return part

    reader = faiss.BufferedIOReader(faiss.PyCallbackIOReader(read, _WRITE_CHUNK_BYTES), _WRITE_CHUNK_BYTES)
    try:
        whole, _ = peel(faiss.read_index(reader, faiss.IO_FLAG_SKIP_PRECOMPUTE_TABLE))
    except (RuntimeError, MemoryError) as error:
        raise CorruptIndexError(f"faiss {faiss.__version__} cannot read the model: {faiss_message(error)}") from error
    shard = whole.ivf
    if isinstance(shard, faiss.IndexIVFPQ):
        shard.use_precomputed_table = -1  # costs memory and digits, see load_model
    own = shard.quantizer
    shard.quantizer = ivf.quantizer
    if shard.own_fields:
        own.this.own(True)  # deleted with this reference
    shard.own_fields = False
    empty_lists(shard)
    # The index that the file holds, behind its pre-transforms, and the one whose quantizer this is.
    shard.referenced_objects = [whole.outer, ivf]
    return shard


def map_lists(ivf: Any, path: Path, table: I64, *, code_size: int, nbytes: int) -> int:
    """Let ``ivf`` read its lists from the extents of ``path`` without a copy; the address of the mapping. Read-only;
    ``ivf`` owns it."""
    faiss = require_faiss()
    lists = faiss.OnDiskInvertedLists()
    lists.nlist = len(table)
    lists.code_size = code_size
    lists.filename = str(path)
    lists.totsize = nbytes
    lists.read_only = True
    # Pages are faulted in by the scan itself; faiss's prefetch threads would only compete with it.
    lists.prefetch_nthread = 0
    lists.lists.resize(len(table))
    rows = np.ascontiguousarray(table, dtype=np.int64)  # size, capacity, offset: the struct's own order
    faiss.memcpy(lists.lists.data(), faiss.swig_ptr(rows), rows.nbytes)
    lists.do_mmap()
    address = int(lists.ptr)
    lists.this.disown()
    ivf.replace_invlists(lists, True)
    ivf.ntotal = int(table[:, 0].sum())
    return address


def faiss_message(error: BaseException) -> str:
    """What a faiss error says, without the C++ signature and source line before it."""
    text = " ".join(str(error).split()) or type(error).__name__
    return _FAISS_PLACE.sub("", text)[:300]
