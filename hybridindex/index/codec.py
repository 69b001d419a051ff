"""Which codecs a build may ask for, and how a device decodes them. Names and numbers only; no faiss, no I/O."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from hybridindex.errors import InvalidInputError
from hybridindex.index.pq.form import PqForm
from hybridindex.index.rabitq.spec import CodeFormat
from hybridindex.index.storage.layout import Layout
from hybridindex.types import F32, U8

__all__ = [
    "CODEC_NAMES",
    "DEVICE_KINDS",
    "CodecKind",
    "CodecSpec",
    "DeviceCodec",
    "DeviceKind",
    "device_kind",
    "max_abs_of",
    "parse_codec",
    "pq_shape",
]

CodecKind = Literal["flat", "fp16", "bf16", "sq8", "pq", "pqfs"]

#: How the paged tier decodes a row; "rabitq": it estimates from codes, in blocks; "pq": it adds up entries of tables.
DeviceKind = Literal["f32", "f16", "bf16", "sq8", "rabitq", "pq"]
#: Codec of rows -> :data:`DeviceKind`, of the codecs that the paged tier decodes.
DEVICE_KINDS: dict[str, DeviceKind] = {"flat": "f32", "fp16": "f16", "bf16": "bf16", "sq8": "sq8"}

CODEC_NAMES = ("flat", "fp16", "bf16", "sq8", "pq", "pqM", "pqfs", "pqfsM")
#: Sums of a byte for each part fit 16 bits.
_MOST_PARTS = 65_535
_PQ_NAME = re.compile(r"(pqfs|pq)([1-9][0-9]{0,4})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpec:
    """A codec that we train ourselves, with every choice made."""

    #: What the manifest says: "flat", "fp16", "bf16", "sq8", "pq48", "pqfs96".
    name: str
    kind: CodecKind
    #: Sub-quantizers of pq and pqfs; 0 otherwise.
    m: int
    #: Bytes of one vector's code.
    code_size: int
    #: Codes hold vector minus centroid. Only pq: a residual fast scan (pqfs) would make a query's distances depend on
    #: which lists are scanned together, so pqfs codes whole vectors.
    by_residual: bool

    @property
    def layout(self) -> Layout:
        """The layout that faiss scans this codec in."""
        return "pqfs32" if self.kind == "pqfs" else "rows"

    @property
    def max_abs(self) -> float | None:
        """Largest absolute value of an element that the codec can hold; ``None`` where float32 is the limit."""
        return max_abs_of(self.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCodec:
    """How a device turns one stored row into floats.

    ``f32``: the row is dim float32. ``f16``: dim IEEE halves. ``bf16``: dim bfloat16. ``sq8``: dim bytes, value =
    vmin + vdiff*(byte+0.5)/255 = offset + scale*byte. With ``by_residual`` the list's centroid is added afterwards.
    ``rabitq``: no floats; blocks of rows as ``form`` says, see :mod:`hybridindex.index.rabitq`. ``pq``: numbers of
    codewords as ``pq`` says, see :mod:`hybridindex.index.pq`.
    """

    kind: DeviceKind
    dim: int
    #: Bytes of one row.
    code_size: int
    by_residual: bool
    #: (dim,) float32, host; empty unless sq8.
    vmin: F32 = field(default_factory=lambda: np.empty(0, np.float32))
    #: (dim,) float32, host; empty unless sq8.
    vdiff: F32 = field(default_factory=lambda: np.empty(0, np.float32))
    #: Of rabitq alone.
    form: CodeFormat | None = None
    #: Of pq alone.
    pq: PqForm | None = None

    @property
    def scale(self) -> F32:
        """(dim,) float32; empty unless sq8."""
        return self.vdiff / np.float32(255)

    @property
    def offset(self) -> F32:
        """(dim,) float32; empty unless sq8."""
        return self.vmin + self.vdiff * np.float32(0.5 / 255)

    def decode(self, codes: U8, centroid: F32) -> F32:
        """Rows of one list: (n, code_size) uint8 -> (n, dim) float32; ``centroid``: (dim,) float32, of the list."""
        if self.kind == "f32":
            rows: F32 = codes.view(np.float32)
        elif self.kind == "f16":
            rows = codes.view(np.float16).astype(np.float32)
        elif self.kind == "bf16":
            rows = (codes.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            assert self.kind == "sq8", "codes of rabitq and pq are not decoded"
            rows = self.offset + self.scale * codes.astype(np.float32)
        return rows + centroid if self.by_residual else rows


def parse_codec(name: str, dim: int) -> CodecSpec:
    """Resolve a codec name for vectors of ``dim`` dimensions.

    ``pq`` takes the largest divisor of dim up to dim/4 as its number of sub-quantizers (8 bits each), ``pqfs`` the
    largest up to dim/2 (4 bits each); ``pq48`` and ``pqfs96`` say it themselves.

    Raises:
        InvalidInputError: unknown name, or M does not divide dim.
    """
    if not isinstance(name, str):
        raise InvalidInputError(f"codec is {name!r}; expected one of {', '.join(CODEC_NAMES)}")
    row_bytes = {"flat": 4 * dim, "fp16": 2 * dim, "bf16": 2 * dim, "sq8": dim}
    if name in row_bytes:
        kind: CodecKind = name  # type: ignore[assignment]
        return CodecSpec(name=name, kind=kind, m=0, code_size=row_bytes[name], by_residual=False)
    match = _PQ_NAME.fullmatch(name)
    if match is None:
        raise InvalidInputError(f"codec is {name!r}; expected one of {', '.join(CODEC_NAMES)}")
    fast = match[1] == "pqfs"
    if match[2] is None:
        limit = max(1, dim // 2 if fast else dim // 4)
        m = next(m for m in range(limit, 0, -1) if dim % m == 0)
    else:
        m = int(match[2])
        if m > dim or dim % m:
            near = min((c for c in range(1, dim + 1) if dim % c == 0), key=lambda c: abs(c - m))
            raise InvalidInputError(f"codec is {name!r}; M must divide dim {dim}, for example {match[1]}{near}")
    return CodecSpec(
        name=f"{match[1]}{m}",
        kind="pqfs" if fast else "pq",
        m=m,
        code_size=(m + 1) // 2 if fast else m,
        by_residual=not fast,
    )


def max_abs_of(codec: str) -> float | None:
    """Largest absolute value of an element that a codec can hold; ``None`` where float32 is the limit."""
    return 65504.0 if codec == "fp16" else None


def device_kind(codec: str) -> DeviceKind | None:
    """How the paged tier scans rows of ``codec``, as builds and manifests name it; None: it does not."""
    return DEVICE_KINDS.get(codec) or ("pq" if _PQ_NAME.fullmatch(codec) else None)


def pq_shape(codec: str) -> tuple[int, int] | None:
    """(sub-quantizers, bits of each) of a manifest's codec "pq48" or "pqfs96" that our scans take; None: another."""
    match = _PQ_NAME.fullmatch(codec)
    if match is None or match[2] is None or int(match[2]) > _MOST_PARTS:
        return None
    return int(match[2]), 4 if match[1] == "pqfs" else 8
