"""What the kernels of a device scan are compiled for: their constants and options, as scans launch them.

``python -m benchmarks.device.compiled`` compiles all of them without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hybridindex.index.codec import DeviceCodec
from hybridindex.tiers.paged.tables.scan_tables import ALIGNED, GROUP, Selection

__all__ = [
    "LEAST_HEAVY_ROWS",
    "MASKED_ROWS",
    "Shape",
    "heavy_shape",
    "light_shape",
    "mask_shape",
    "selection_shape",
    "split_shape",
    "split_sizes",
]

#: float32 values of decoded rows that one thread of the 128 keeps in registers, and rows that a program holds at most.
_VALUES_PER_THREAD = 96
_THREADS = 128
_MAX_ROWS = 64
#: Columns that it holds at most. Each piece of them is an instruction of its own: the compiler takes long over many.
_MOST_COLUMNS = 1024
#: Registers of a light program's thread: four programs fit a multiprocessor of 65,536 then, instead of two or three,
#: and all their loads are in flight together. At 384 and 768 dimensions hardly a value leaves the registers for it.
_LIGHT_REGISTERS = 128
#: Rows of a heavy program at least: a narrower product of matrix units takes as long.
LEAST_HEAVY_ROWS = 16
#: Columns of a sum of matrix units, which cuts bits off; those that a program splits at once.
_SUM_COLUMNS, _SPLIT_COLUMNS = 64, 512
#: Rows of a program that leaves rows out.
MASKED_ROWS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A kernel, and what it is compiled for."""

    kernel: Any
    #: Its last parameters, in their order.
    constants: dict[str, Any]
    values: tuple[Any, ...]
    options: dict[str, Any]
    #: Always the same options with them.
    key: tuple[Any, ...]

    @classmethod
    def of(cls, kernel: Any, constants: dict[str, Any], **options: Any) -> Shape:
        values = tuple(constants.values())
        return cls(kernel=kernel, constants=constants, values=values, options=options, key=(kernel, *values))


def light_shape(codec: DeviceCodec, page_rows: int, keep_max: bool) -> Shape:
    """Distances of lists that few queries probe. ``keep_max``: inner products."""
    from hybridindex.tiers.paged import triton_kernels

    cols = _columns(codec.dim)
    pieces = -(-codec.dim // (cols * -(-codec.dim // _MOST_COLUMNS)))
    rows = _rows_at_once(pieces * cols, page_rows)
    constants = {**_of_rows(codec, page_rows), "KEEP_MAX": keep_max, "ROWS": rows, "COLS": cols, "PIECES": pieces}
    return Shape.of(triton_kernels.scan_light, constants, num_warps=_THREADS // 32, maxnreg=_LIGHT_REGISTERS)


def heavy_shape(codec: DeviceCodec, page_rows: int, on_gpu: bool) -> Shape:
    """Inner products of lists that many queries probe."""
    from hybridindex.tiers.paged import triton_kernels

    # Parts of more float32 rows do not fit the registers beside the sums.
    most = _MAX_ROWS // 2 if codec.kind == "f32" else _MAX_ROWS
    rows = min(most, max(LEAST_HEAVY_ROWS, 1 << (page_rows - 1).bit_length()))
    split, words = split_sizes(codec.dim)
    constants = {"WIDE": not on_gpu, "ROWS": rows, "COLS": _SUM_COLUMNS, "SPLIT": split, "WORDS": words}
    return Shape.of(triton_kernels.scan_heavy, {**_of_rows(codec, page_rows), **constants}, num_warps=4)


def split_shape(codec: DeviceCodec) -> Shape:
    """Queries as :func:`heavy_shape` reads them."""
    from hybridindex.tiers.paged import triton_kernels

    split, words = split_sizes(codec.dim)
    constants = {"D": codec.dim, "SPLIT": split, "WORDS": words, "KIND": codec.kind, "COLS": _SPLIT_COLUMNS}
    return Shape.of(triton_kernels.split_queries, constants, num_warps=4)


def split_sizes(dim: int) -> tuple[int, int]:
    """Numbers of a query's part, and words of the scratch that its parts and one more number take."""
    split = -(-dim // _SUM_COLUMNS) * _SUM_COLUMNS
    return split, split * 3 // 2 + ALIGNED


def selection_shape(from_distances: bool, keep_max: bool, selection: Selection) -> Shape:
    """One level of the selection of the best."""
    from hybridindex.tiers.paged import triton_kernels

    constants = {
        "FROM_DISTANCES": from_distances,
        "KEEP_MAX": keep_max,
        "CHUNK": selection.chunk,
        "KEPT": selection.kept,
    }
    return Shape.of(triton_kernels.select_best, constants, num_warps=4 if selection.chunk <= 2048 else 8)


def mask_shape() -> Shape:
    """Leaves out what filters do not leave."""
    from hybridindex.tiers.paged.masks import triton_mask_kernel

    return Shape.of(triton_mask_kernel.leave_out, {"BLOCK": MASKED_ROWS}, num_warps=4)


def _of_rows(codec: DeviceCodec, page_rows: int) -> dict[str, Any]:
    shape = {"D": codec.dim, "PAGE_ROWS": page_rows, "GROUP": GROUP}
    return {**shape, "KIND": codec.kind, "RESIDUAL": codec.by_residual}


def _columns(dim: int) -> int:
    """Elements of a row that are taken together: at most 64, so that a query's are fewer than the threads (triton then
    loads them where they are needed), and such that little of the last piece is empty."""
    for cols in (64, 32, 16):
        if -dim % cols <= dim // 8:
            return cols
    return 8


def _rows_at_once(columns: int, rows_per_page: int) -> int:
    """Rows that a light item holds in registers: a power of two."""
    fitting = max(1, _VALUES_PER_THREAD * _THREADS // columns)
    return min(_MAX_ROWS, 1 << (fitting.bit_length() - 1), 1 << (rows_per_page - 1).bit_length())
