"""faiss's 4-bit fast-scan blocks in pure numpy: 32 codes a block, two sub-quantizers at a time.

A flat code holds sub-quantizer 2j in the low and 2j+1 in the high half of byte j. A block has 32 bytes per byte j of
the flat code: 16 bytes for sub-quantizer 2j, then 16 for 2j+1; byte t of the 16 holds vector ``_LANES[t]`` in its low
half and vector ``_LANES[t] + 16`` in its high half. Tests compare this with faiss's own packer.
"""

from __future__ import annotations

import numpy as np

from hybridindex.types import U8

__all__ = ["pack_pqfs", "unpack_pqfs"]

_LANES = np.array([0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15])


def pack_pqfs(rows: U8) -> U8:
    """Pack flat codes (n, code_size) uint8 into (ceil(n/32), 32*code_size) uint8, zero padded."""
    n, code_size = rows.shape
    blocks = -(-n // 32)
    padded = np.zeros((blocks * 32, code_size), dtype=np.uint8)
    padded[:n] = rows
    lanes = padded.reshape(blocks, 2, 16, code_size)[:, :, _LANES, :]
    low, high = lanes & 15, lanes >> 4
    even = low[:, 0] | (low[:, 1] << 4)
    odd = high[:, 0] | (high[:, 1] << 4)
    packed = np.concatenate([even, odd], axis=1)  # (blocks, 32, code_size): 16 bytes even, 16 bytes odd
    return np.ascontiguousarray(packed.transpose(0, 2, 1)).reshape(blocks, 32 * code_size)


def unpack_pqfs(blocks: U8, n: int) -> U8:
    """Undo :func:`pack_pqfs`: the first ``n`` flat codes, (n, code_size) uint8."""
    code_size = blocks.shape[1] // 32
    packed = blocks.reshape(len(blocks), code_size, 32).transpose(0, 2, 1)
    even, odd = packed[:, :16], packed[:, 16:]
    rows = np.empty((len(blocks), 2, 16, code_size), dtype=np.uint8)
    rows[:, 0, _LANES] = (even & 15) | (odd << 4)
    rows[:, 1, _LANES] = (even >> 4) | (odd & 0xF0)
    return rows.reshape(-1, code_size)[:n]
