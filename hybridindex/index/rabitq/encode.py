"""Codes of the rows of one list, in the blocks of the file: by ``native.rabitq_encode``, and its reference.

A row o of the list with centroid c has the residual r = o - c, and V, a vector of odd whole numbers that points nearly
as the rotated r does. Factors f and g make of a scalar product with V one with o::

    f = |r|^2 / <V, r'>        g = <r, c> - f <V, c'>        <q, o>  is about  f <V, q'> + g <q, c> / |c|^2 + <q, c>
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybridindex.extension import native
from hybridindex.index.rabitq.rotation import dot, pad, rotate
from hybridindex.index.rabitq.spec import BLOCK_ROWS, CHUNK_DIMS, CodeFormat
from hybridindex.types import F32, U8

__all__ = [
    "STEPS",
    "Blocks",
    "Halves",
    "as_half",
    "decode_blocks",
    "encode_list",
    "encode_reference",
    "factors",
    "level_signs",
    "pack_blocks",
]

Halves = npt.NDArray[np.float16]

#: Of more than one bit: distances of neighbouring whole numbers that are tried, in root mean squares of r'. The first
#: of the best is taken.
STEPS: dict[int, F32] = {
    2: np.arange(9, 25, dtype=np.float32) / np.float32(16),
    4: np.arange(9, 25, dtype=np.float32) / np.float32(48),
}
_HALF_MAX = np.float32(65504)


def level_signs(rotated: F32, squares: F32, bits: int) -> npt.NDArray[np.int8]:
    """V of rotated residuals: (n, D) int8 odd numbers. ``squares``: (n,) float32, |r|^2."""
    negative = rotated < 0
    size = np.abs(rotated)
    levels = np.ones(rotated.shape, dtype=np.int8)
    if bits > 1:
        top = np.float32(2 ** (bits - 1) - 1)
        rms = np.sqrt(squares / np.float32(rotated.shape[1]))
        best = np.full(len(rotated), -1, dtype=np.float32)
        for step in STEPS[bits]:
            wide = step * rms
            inverse = np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide > 0)
            tried = np.float32(2) * np.minimum(np.floor(size * inverse[:, None]), top) + np.float32(1)
            score = dot(tried, size)
            score = score * score / dot(tried, tried)
            better = score > best
            best[better] = score[better]
            levels[better] = tried[better].astype(np.int8)
    return np.where(negative, -levels, levels)


def factors(rows: F32, centroid: F32, signs: F32, bits: int) -> tuple[npt.NDArray[np.int8], F32, F32, F32]:
    """V (n, D) int8, and what the factors of (n, d) rows follow from, (n,) float32 each: f, <r, c> and <V, c'>."""
    dims = signs.shape[1]
    residual = rows - centroid
    padded = pad(residual, dims)
    squares = dot(padded, padded)
    rotated = rotate(residual, signs)
    levels = level_signs(rotated, squares, bits)
    wide = levels.astype(np.float32)
    along = dot(wide, rotated)
    f = np.divide(squares, along, out=np.zeros_like(squares), where=along > 0)
    return levels, f, dot(padded, pad(centroid[None], dims)[0]), dot(wide, rotate(centroid[None], signs)[0])


def as_half(x: F32, scale: float) -> Halves:
    """Multiples of ``scale``, within the finite halves; 0 for what is no number."""
    scaled = x / np.float32(scale)
    scaled[np.isnan(scaled)] = 0
    halves: Halves = np.clip(scaled, -_HALF_MAX, _HALF_MAX).astype(np.float16)
    return halves


def encode_list(rows: F32, centroid: F32, signs: F32, form: CodeFormat) -> U8:
    """Blocks of (n, d) float32 decoded rows of a list: (ceil(n/16) * block_bytes,) uint8, by the extension where it
    is there. A call with the first 16 i rows and one with the others give the same blocks as one with all."""
    if native is None:
        return encode_reference(rows, centroid, signs, form)
    out = np.zeros(-(-len(rows) // BLOCK_ROWS) * form.block_bytes, dtype=np.uint8)
    rows, centroid = np.ascontiguousarray(rows), np.ascontiguousarray(centroid)
    native.rabitq_encode(rows, centroid, signs, form.bits, form.f_scale, form.g_scale, form.metric == "l2", out)
    return out


def encode_reference(rows: F32, centroid: F32, signs: F32, form: CodeFormat) -> U8:
    """:func:`encode_list` in numpy."""
    if len(rows) == 0:
        return np.empty(0, dtype=np.uint8)
    # What is no number or out of range becomes 0 or the largest half.
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        levels, f, towards, along = factors(rows, centroid, signs, form.bits)
        f16 = as_half(f, form.f_scale)
        g = towards - f16.astype(np.float32) * np.float32(form.f_scale) * along
        g16 = as_half(g, form.g_scale)
        padded = pad(rows, form.padded_dim)
        h = dot(padded, padded)
    whole = (levels.astype(np.int16) + (2**form.bits - 1)) // 2  # plane 0 is its highest bit
    planes = [
        np.packbits(((whole >> (form.bits - 1 - plane)) & 1).astype(np.uint8), axis=1, bitorder="little")
        for plane in range(form.bits)
    ]
    return pack_blocks(planes, f16, g16, h, form)


def pack_blocks(planes: Sequence[U8], f: Halves, g: Halves, h: F32, form: CodeFormat) -> U8:
    """Blocks of n rows: (ceil(n/16) * block_bytes,) uint8.

    Args:
        planes: of each bit, the top one first: (n, bytes) uint8, the lowest bit of a byte first; what they lack of
            padded_dim is 0.
        f, g: (n,) multiples of the scales. h: (n,), of l2 alone.
    """
    n = len(f)
    blocks, chunks = -(-n // BLOCK_ROWS), form.padded_dim // CHUNK_DIMS
    out = np.zeros((blocks, form.block_bytes), dtype=np.uint8)
    for number, plane in enumerate(planes):
        rows = np.zeros((blocks * BLOCK_ROWS, chunks * 4), dtype=np.uint8)
        rows[:n, : plane.shape[1]] = plane
        packed = rows.reshape(blocks, BLOCK_ROWS, chunks, 4).transpose(0, 2, 1, 3)
        out[:, number * chunks * 64 : (number + 1) * chunks * 64] = packed.reshape(blocks, -1)
    at = form.bits * chunks * 64
    for values in (f, g, h) if form.metric == "l2" else (f, g):
        row = np.zeros(blocks * BLOCK_ROWS, dtype=values.dtype)
        row[:n] = values
        part = row.view(np.uint8).reshape(blocks, -1)
        out[:, at : at + part.shape[1]] = part
        at += part.shape[1]
    return out.reshape(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """What the blocks of a list say of its rows."""

    #: V: (n, D) int8.
    levels: npt.NDArray[np.int8]
    #: (n,) float32, as multiples of the scales.
    f: F32
    g: F32
    #: (n,) float32, |o|^2; zeros where the metric is ip.
    h: F32


def decode_blocks(data: U8, n: int, form: CodeFormat) -> Blocks:
    """Of the blocks of a list of ``n`` rows."""
    blocks = data.reshape(-1, form.block_bytes)
    chunks = form.padded_dim // CHUNK_DIMS
    planes = blocks[:, : form.bits * chunks * 64].reshape(len(blocks), form.bits, chunks, BLOCK_ROWS, 4)
    packed = planes.transpose(1, 0, 3, 2, 4).reshape(form.bits, len(blocks) * BLOCK_ROWS, -1)[:, :n]
    levels = np.zeros((n, form.padded_dim), dtype=np.int8)
    for plane in np.unpackbits(np.ascontiguousarray(packed), axis=2, bitorder="little").astype(np.int8):
        levels = 2 * levels + (2 * plane - 1)
    factors = np.ascontiguousarray(blocks[:, form.bits * chunks * 64 :])
    halves = factors[:, :64].copy().view(np.float16).astype(np.float32).reshape(len(blocks), 2, BLOCK_ROWS)
    h = factors[:, 64:].copy().view(np.float32).reshape(-1)[:n] if form.metric == "l2" else np.zeros(n, np.float32)
    return Blocks(levels=levels, f=halves[:, 0].reshape(-1)[:n], g=halves[:, 1].reshape(-1)[:n], h=h)
