"""Scan of resident codes on a GPU with our Triton kernels: the tables, the scratch and the selection of
:mod:`hybridindex.tiers.paged.triton_scanner` around the kernels of
:mod:`hybridindex.tiers.paged.codes.triton_code_kernels`.

Probes are put into order first: slots then ascend with positions, and the selection's ties with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hybridindex.config import MAX_K
from hybridindex.index.rabitq.estimate import MOST_WHOLE, code_queries
from hybridindex.index.rabitq.spec import CHUNK_DIMS, CodeFormat
from hybridindex.tiers.paged.codes.code_scanner import CodePageScanner
from hybridindex.tiers.paged.codes.torch_code_scanner import TorchCodeScanner
from hybridindex.tiers.paged.launch_shapes import Shape
from hybridindex.tiers.paged.tables.scan_tables import GROUP, Tile
from hybridindex.tiers.paged.triton_scanner import TABLES, TritonScanner, Work, Workspace
from hybridindex.types import F32, I64

if TYPE_CHECKING:
    import torch

__all__ = ["CodeWorkspace", "TritonCodeScanner", "heavy_shape", "light_shape"]

#: By bits: members from which a list is worth a matrix product, padded to GROUP. By counts of instructions, not yet
#: measured: to unpack a row for the matrix units takes as many as to count its bits for so many queries.
_HEAVY_FROM = {1: 7, 2: 5, 4: 4}
#: Rows of a program: few, because a page of codes holds many, and a batch probes few pages.
_LIGHT_ROWS, _HEAVY_ROWS = 256, 64
#: Words of a row that a program asks for before it uses one, at most; and those of a matrix product.
_LIGHT_CHUNKS, _HEAVY_CHUNKS = 16, 4
#: Each operation is rounded by itself: estimates are the same to the bit wherever a row is scanned.
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


class TritonCodeScanner(CodePageScanner):
    """Scans on a GPU. Scans of one arena take turns at its scratch.

    More than :data:`MAX_K` candidates are torch's: a program would have to hold a multiple of them to choose from.
    """

    name = "triton"

    unsupported = staticmethod(TritonScanner.unsupported)

    def _prepare(self) -> None:
        #: Where the scan runs.
        self.workspace: Workspace = CodeWorkspace.of(self._arena, self._codec, self._scratch_bytes)
        import torch

        data = self._arena.data.view(-1)
        self._elements = (data.view(torch.int32), data.view(torch.float16), data.view(torch.float32))

    def _scan_codes(self, queries: F32, probes: I64, products: F32, estimates: F32, positions: I64) -> None:
        if estimates.shape[1] > MAX_K:
            # As much memory as the scratch again, but for one scan at a time.
            with self.workspace.turn():
                TorchCodeScanner.beside(self)._scan_codes(queries, probes, products, estimates, positions)
            return
        form = self._form
        coded = code_queries(queries, self._codes.signs, form)
        slices = _bit_slices(coded.whole, _n_slices(form.bits))
        sums = coded.whole.sum(axis=1, dtype=np.int32)
        probes, products = _in_order(probes, products)
        flat = products.reshape(-1)
        nothing = np.empty(0, dtype=np.int32)

        lists = probes.reshape(-1)

        def operands(tile: Tile, tables: Any) -> dict[str, npt.NDArray[Any]]:
            rows = slice(tile.first_query, tile.first_query + tile.n_queries)
            probed = tables.member_probes()
            centre = flat[probed]
            square = self._codes.centroid_sq[lists[probed]]
            with np.errstate(over="ignore"):
                w = np.divide(centre, square, out=np.zeros_like(centre), where=square != 0) * np.float32(form.g_scale)
            return {
                "slices": slices[rows] if tile.n_light else nothing,
                "whole": coded.whole[rows].view(np.int32) if tile.n_light < tile.n_items else nothing,
                "sum": sums[rows],
                "u": coded.u[rows],
                "w": w,
                "centre": centre,
            }

        work = Work(
            elements=self._elements,
            keep_max=False,
            heavy_from=_HEAVY_FROM[form.bits],
            query_bytes=slices[:1].nbytes + coded.whole[:1].nbytes + 8,
            pair_bytes=8,
            operands=operands,
        )
        self.workspace.best(self._residency, self._index.list_sizes, probes, work, estimates, positions)


def _n_slices(bits: int) -> int:
    """Bits of a query's whole numbers, the sign's too."""
    return MOST_WHOLE[bits].bit_length() + 1


def _bit_slices(whole: npt.NDArray[np.int8], count: int) -> npt.NDArray[np.int32]:
    """(n, D) whole numbers -> (n, D / 32, count) words: bit i of word j of a chunk is bit j of its i-th number."""
    number = whole.view(np.uint8)[:, None, :] >> np.arange(count, dtype=np.uint8)[:, None]
    words = np.packbits(number & 1, axis=2, bitorder="little").view(np.int32)
    return np.ascontiguousarray(words.transpose(0, 2, 1))


def _in_order(probes: I64, products: F32) -> tuple[I64, F32]:
    """Both, by list in each row."""
    # Sorting whole keys is many times faster than argsort; the low bits say which probe it was.
    bits = max(1, (probes.shape[1] - 1).bit_length())
    key = probes << bits | np.arange(probes.shape[1])
    key.sort(axis=1)
    return key >> bits, np.take_along_axis(products, key & ((1 << bits) - 1), axis=1)


class CodeWorkspace(Workspace):
    """A workspace that launches the kernels of codes."""

    def launch(self, elements: tuple[torch.Tensor, ...], tile: Tile, at: dict[str, int], keep_max: bool) -> None:
        """Queues the estimates of an uploaded tile."""
        import torch

        assert self._codec.form is not None
        form = self._codec.form, self._rows_per_page
        light = self._shape("light", light_shape, *form, self._on_cuda)
        heavy = self._shape("heavy", heavy_shape, *form)
        most = min(self._rows_per_page, tile.most_rows)
        tensors = (*elements, self._ints, self._floats)
        names, terms = [at[name] for name in TABLES], [at[name] for name in ("sum", "u", "w", "centre", "out")]
        if tile.n_light:
            args: tuple[Any, ...] = (*tensors, *names, at["slices"], *terms)
            self._run(light, (tile.n_light, -(-most // light.constants["ROWS"]), 1), args)
        if n_heavy := tile.n_items - tile.n_light:
            args = (*tensors, self._ints.view(torch.int8), tile.n_light, *names, 4 * at["whole"], *terms)
            self._run(heavy, (n_heavy, -(-most // heavy.constants["ROWS"]), 1), args)


def light_shape(form: CodeFormat, page_rows: int, on_gpu: bool) -> Shape:
    """Estimates of lists that few queries probe."""
    from hybridindex.tiers.paged.codes import triton_code_kernels

    constants = _of_codes(form, page_rows)
    constants |= {
        "SLICES": _n_slices(form.bits),
        "ROWS": min(_LIGHT_ROWS, 1 << (page_rows - 1).bit_length()),
        "AT_ONCE": next(n for n in range(_LIGHT_CHUNKS, 0, -1) if constants["CHUNKS"] % n == 0),
        "COMPILED": on_gpu,
    }
    return Shape.of(triton_code_kernels.estimate_light, constants, **_OPTIONS)


def heavy_shape(form: CodeFormat, page_rows: int) -> Shape:
    """Estimates of lists that many queries probe."""
    from hybridindex.tiers.paged.codes import triton_code_kernels

    constants = _of_codes(form, page_rows)
    at_once = min(_HEAVY_CHUNKS, 1 << (constants["CHUNKS"] - 1).bit_length())
    return Shape.of(
        triton_code_kernels.estimate_heavy, {**constants, "ROWS": _HEAVY_ROWS, "AT_ONCE": at_once}, **_OPTIONS
    )


def _of_codes(form: CodeFormat, page_rows: int) -> dict[str, Any]:
    return {
        "BITS": form.bits,
        "CHUNKS": form.padded_dim // CHUNK_DIMS,
        "L2": form.metric == "l2",
        "PAGE_ROWS": page_rows,
        "GROUP": GROUP,
    }
