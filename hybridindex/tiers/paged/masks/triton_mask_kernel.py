"""The Triton kernel that leaves out what filters do not leave: between the distances and the selection of the best.

Importing this module imports triton. Offsets are as in :mod:`hybridindex.tiers.paged.triton_kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["leave_out"]


@triton.jit
def leave_out(ints, floats, at_slot, at_rows, at_word, at_bit, at_out, BLOCK: tl.constexpr):
    """Distances of one pair's rows whose bit is not set become no number: the selection takes that for no candidate.

    A pair's bits begin at bit ``at_bit`` of word ``at_word``, both of the pair.
    """
    pair = tl.program_id(0)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = row < tl.load(ints + at_rows + pair)
    bit = tl.load(ints + at_bit + pair) + row
    word = tl.load(ints + tl.load(ints + at_word + pair) + (bit >> 5), mask=live, other=-1)
    out = live & (((word >> (bit & 31)) & 1) == 0)
    tl.store(floats + at_out + tl.load(ints + at_slot + pair) + row, float("nan"), mask=out)
