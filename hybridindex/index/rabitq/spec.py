"""``rabitq.json``: what the codes of a generation are. Parsing, writing and the arithmetic of sizes; no other I/O."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, get_args

import numpy as np

from hybridindex.config import MAX_CANDIDATES
from hybridindex.errors import CorruptIndexError
from hybridindex.index.storage.signed_json import parse_signed, render_signed
from hybridindex.types import I64, Metric

__all__ = [
    "BLOCK_ROWS",
    "FORMAT_VERSION",
    "MIN_FILE_BYTES",
    "ROUNDS",
    "SPEC_FILE",
    "SUPPORTED_BITS",
    "CandidateTable",
    "CodeFormat",
    "CodeSource",
    "RabitqSpec",
    "bin_name",
    "pad_dim",
    "parse_spec",
    "render_spec",
]

FORMAT = "hybridindex rabitq"
FORMAT_VERSION = 2
#: That codes are written in whose rows are vectors: older readers use them.
_OF_VECTORS = 1
SPEC_FILE = "rabitq.json"
SUPPORTED_BITS = (1, 2, 4)
#: Rounds of a rotation.
ROUNDS = 4
#: Rows of a block.
BLOCK_ROWS = 16
#: "rows": vectors, which were coded. "faiss": codes of faiss's own, which were taken over.
CodeSource = Literal["rows", "faiss"]
#: A block of memory holds this many dimensions of a plane for all its rows.
CHUNK_DIMS = 32
MIN_FILE_BYTES = 64
#: More of the probed rows as candidates take longer than a scan of the rows, but for a number that takes no time.
_MOST_COMPARED, _FEW_CANDIDATES = 0.25, 256
_USUAL_K = 10


def bin_name(digest: str) -> str:
    """Of the file of codes with that digest."""
    return f"rabitq-{digest[:8]}.bin"


def pad_dim(dim: int) -> int:
    """Dimensions of a code: a multiple of 32."""
    return -(-dim // CHUNK_DIMS) * CHUNK_DIMS


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeFormat:
    """How vectors are coded: all that encoding and scanning need to know."""

    #: Of a dimension: 1, 2 or 4.
    bits: int
    #: Of rows, centroids and queries, after the pre-transforms.
    dim: int
    padded_dim: int
    #: Of the estimates, as blocks have it: "l2" where codes were taken over, whatever the index's is.
    metric: Metric
    #: Of the rotation; no rounds where codes were taken over.
    seed: int
    rounds: int
    #: Powers of two: what the stored halves are multiples of.
    f_scale: float
    g_scale: float

    @property
    def factor_bytes(self) -> int:
        """Of a block of rows, behind its planes."""
        return 64 if self.metric == "ip" else 128

    @property
    def block_bytes(self) -> int:
        """Planes and factors of a block of rows."""
        return self.bits * (self.padded_dim // CHUNK_DIMS) * 64 + self.factor_bytes

    def block_starts(self, list_sizes: I64) -> I64:
        """(nlist + 1,) int64: the first block of each list, and the number of all blocks."""
        starts = np.zeros(len(list_sizes) + 1, dtype=np.int64)
        np.cumsum(-(-list_sizes // BLOCK_ROWS), out=starts[1:])
        return starts

    def file_bytes_for(self, list_sizes: I64) -> int:
        """Size of the file of codes."""
        return max(MIN_FILE_BYTES, int(self.block_starts(list_sizes)[-1]) * self.block_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateTable:
    """How many candidates of a search keep the loss of recall within what was allowed; measured."""

    #: Ascending.
    k: tuple[int, ...]
    #: Ascending.
    nprobe: tuple[int, ...]
    #: ``r[i][j]``: for ``k[i]`` and ``nprobe[j]``; grows along both.
    r: tuple[tuple[int, ...], ...]

    def candidates_for(self, k: int, nprobe: int) -> int:
        """Those of the next larger k and nprobe in the table; beyond it they grow in proportion. At least k."""
        row = next((i for i, known in enumerate(self.k) if known >= k), len(self.k) - 1)
        column = next((j for j, known in enumerate(self.nprobe) if known >= nprobe), len(self.nprobe) - 1)
        grow = max(1.0, k / self.k[row]) * max(1.0, nprobe / self.nprobe[column])
        return max(k, math.ceil(self.r[row][column] * grow))


@dataclass(frozen=True, slots=True, kw_only=True)
class RabitqSpec(CodeFormat):
    """The codes of one generation."""

    #: Of the index.
    generation: int
    count: int
    nlist: int
    #: Digest of the ``lists.bin`` whose rows were coded.
    rows_xxh3_128: str
    #: Name of the file of codes, its size and digest.
    file: str
    file_bytes: int
    file_xxh3_128: str
    #: Of recall@k, that the candidates were chosen for.
    recall_loss: float
    candidates: CandidateTable
    #: What the candidates were measured with: "queries" or "sampled rows".
    measured_with: str
    #: ISO 8601, UTC.
    created_at: str
    #: Package name -> version that wrote this.
    versions: Mapping[str, str]
    source: CodeSource = "rows"

    def candidates_for(self, k: int, nprobe: int) -> int:
        """Candidates of a search: as :meth:`CandidateTable.candidates_for`, at most all rows and
        ``config.MAX_CANDIDATES``, but at least k."""
        return max(k, min(self.count, MAX_CANDIDATES, self.candidates.candidates_for(k, nprobe)))

    def hardly_pays(self, nprobe: int) -> str:
        """Why searches by codes may take longer than by rows: a large part of the probed rows are candidates. Empty
        where they are few, and where the rows are no vectors that could be scanned in the place of codes."""
        number, probed = self.candidates_for(_USUAL_K, nprobe), self.count * min(nprobe, self.nlist) / self.nlist
        if self.source != "rows" or number <= max(_FEW_CANDIDATES, probed * _MOST_COMPARED):
            return ""
        return (
            f"searches by them compare {number:,} candidates for k {_USUAL_K} at nprobe {nprobe}, of some "
            f"{probed:,.0f} rows probed"
        )


def render_spec(spec: RabitqSpec) -> bytes:
    """Canonical bytes of ``rabitq.json``."""
    content = dataclasses.asdict(spec)
    if spec.source == "rows":
        del content["source"]
    return render_signed(FORMAT, _OF_VECTORS if spec.source == "rows" else FORMAT_VERSION, content)


def parse_spec(raw: bytes, where: str) -> RabitqSpec:
    """Read and check ``rabitq.json``; ``where`` names it in errors.

    Raises:
        CorruptIndexError: not the bytes that were written.
        UnsupportedIndexError: not ours, or of a newer format version.
    """
    cure = "upgrade it, or compress the index again"
    content = parse_signed(raw, where, FORMAT, FORMAT_VERSION, cure=cure)
    try:
        return _from_content(content)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptIndexError(f"{where} lacks or misstates a field: {error}") from error


def _from_content(content: dict[str, Any]) -> RabitqSpec:
    content = {"source": "rows", **content}
    values = {field.name: content[field.name] for field in dataclasses.fields(RabitqSpec)}
    table = values["candidates"]
    values["candidates"] = CandidateTable(
        k=tuple(table["k"]), nprobe=tuple(table["nprobe"]), r=tuple(tuple(row) for row in table["r"])
    )
    spec = RabitqSpec(**values)
    if spec.source not in get_args(CodeSource) or spec.rounds != (ROUNDS if spec.source == "rows" else 0):
        raise ValueError(f"source {spec.source!r} or rounds {spec.rounds!r} is unknown")
    if spec.bits not in SUPPORTED_BITS or spec.metric not in get_args(Metric):
        raise ValueError(f"bits {spec.bits!r} or metric {spec.metric!r} is unknown")
    if spec.padded_dim != pad_dim(spec.dim):
        raise ValueError(f"padded_dim is {spec.padded_dim}, dim {spec.dim}")
    if spec.file != bin_name(spec.file_xxh3_128):
        raise ValueError(f"file is {spec.file!r}")
    if not all(math.frexp(scale)[0] == 0.5 for scale in (spec.f_scale, spec.g_scale)):
        raise ValueError(f"f_scale {spec.f_scale!r} or g_scale {spec.g_scale!r} is not a power of two")
    shape = (len(spec.candidates.k), len(spec.candidates.nprobe))
    if min(shape) < 1 or np.array(spec.candidates.r).shape != shape:
        raise ValueError(f"candidates are not {shape[0]} rows of {shape[1]}")
    numbers = (*spec.candidates.k, *spec.candidates.nprobe, *chain.from_iterable(spec.candidates.r))
    if not all(type(number) is int and number >= 1 for number in numbers):
        raise ValueError("candidates are not numbers of 1 or more")
    if type(spec.seed) is not int or not 0 <= spec.seed < 1 << 64:
        raise ValueError(f"seed is {spec.seed!r}")
    return spec
