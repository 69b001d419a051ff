from typing import Any

import numpy as np
import numpy.typing as npt

from hybridindex.types import F32, F64, I32, I64, U8

_Bools = npt.NDArray[np.bool_]
_I16 = npt.NDArray[np.int16]
_U64 = npt.NDArray[np.uint64]

_Part = tuple[int, int, I32 | None, I64 | None, F32 | None]

def split_probes(
    probes: I64,
    coarse: F32,
    list_device: _I16,
    list_bytes: I64,
    n_devices: int,
    hit_rate: F32,
    n_parts: I32,
    n_probes: I32,
    where: _I16 | None = None,
    n_nodes: int = 0,
    work: I64 | None = None,
    lost: I64 | None = None,
) -> list[_Part]: ...
def cover_probes(
    probes: I64, here: _Bools, holders: _U64, usable: int, to_do: F64 | None, places: I64, turn: int, found: _I16
) -> None: ...
def matching_rows(mask: U8, first: I64, probes: I64, positions: I64) -> None: ...
def merge_topk(best_distances: F32, best_ids: I64, rows: I32, distances: F32, ids: I64, keep_max: bool) -> None: ...
def leave_out(best_distances: F32, best_ids: I64, distances: F32, ids: I64, gone: I64, keep_max: bool) -> bool: ...
def finish_topk(distances: F32, ids: I64, keep_max: bool) -> None: ...
def move_extents(from_: U8, to: U8, code_size: int, before: I64, after: I64, gone_starts: I64, gone: I64) -> None: ...
def put_rows(to: U8, codes: U8, order: I64, at: I64) -> None: ...
def touch_ahead(to: U8, start: int, nbytes: int) -> None: ...
def group_probes(probes: I64, extents: I64, places: bool = False) -> tuple[I64, I64, I32, I64]: ...
def page_scratch_need(code: str, dim: int, residual: bool, k: int) -> tuple[int, int]: ...
def scan_pages(
    arena: U8,
    rows_per_page: int,
    code: str,
    scale: F32,
    offset: F32,
    list_ids: I64,
    sizes: I64,
    page_starts: I64,
    pages: I32,
    member_starts: I64,
    members: I32,
    centroids: F32,
    queries: F32,
    keep_max: bool,
    distances: F32,
    positions: I64,
    kernels: str = "",
    mask: U8 | None = None,
    first_rows: I64 | None = None,
) -> None: ...

class CoarseQuantizer:
    kernels: str
    def __init__(self, centroids: F32, keep_max: bool, kernels: str) -> None: ...
    def quantize(self, queries: F32, probes: I64, distances: F32, pool: Any = None) -> None: ...

class Watch:
    watching: bool
    def __init__(self, address: int, nbytes: int, fd: int, name: str, marks: I64) -> None: ...
    def take_gone(self) -> list[tuple[int, int]]: ...
    def clear(self) -> None: ...

def count(marks: I64) -> None: ...
def ask_for_rows(data: U8, extents: I64, row_bytes: int, positions: I64, rows: bool, seen: bool) -> int: ...

class CodePages:
    def __init__(
        self, signs: F32, bits: int, dim: int, f_scale: float, g_scale: float, l2: bool, kernels: str = ""
    ) -> None: ...
    def scratch_need(self, k: int) -> tuple[int, int]: ...
    def scan(
        self,
        arena: U8,
        rows_per_page: int,
        list_ids: I64,
        sizes: I64,
        page_starts: I64,
        pages: I32,
        member_starts: I64,
        members: I32,
        centre_products: F32,
        centre_squares: F32,
        queries: F32,
        estimates: F32,
        positions: I64,
    ) -> None: ...

def rabitq_encode(
    rows: F32, centroid: F32, signs: F32, bits: int, f_scale: float, g_scale: float, l2: bool, out: U8
) -> None: ...
def rabitq_queries(
    queries: F32, signs: F32, bits: int, f_scale: float, whole: npt.NDArray[np.int8], u: F32
) -> None: ...
def distances_in_pages(
    arena: U8,
    code: str,
    scale: F32,
    offset: F32,
    centroids: F32,
    sizes: I64,
    first_pages: I64,
    page_counts: I32,
    page_numbers: I32,
    queries: F32,
    positions: I64,
    keep_max: bool,
    distances: F32,
    kernels: str = "",
) -> None: ...
def distances_in_pages_need(code: str, dim: int) -> int: ...
def pair_products(queries: F32, centroids: F32, probes: I64, out: F32, kernels: str = "") -> None: ...

class PqForm:
    kernels: str
    def __init__(
        self, codewords: F32, middle: F32, parts: int, l2: bool, residual: bool, kernels: str = ""
    ) -> None: ...
    def tables(self, queries: F32, out: F32) -> None: ...
    def bases(self, queries: F32, centroids: F32, probes: I64, out: F32) -> None: ...
    def terms(self, codes: U8, centroid: F32, out: F32) -> None: ...
    def scratch_need(self, k: int) -> tuple[int, int]: ...
    def scan_pages(
        self,
        arena: U8,
        rows_per_page: int,
        list_ids: I64,
        sizes: I64,
        page_starts: I64,
        pages: I32,
        member_starts: I64,
        members: I32,
        centroids: F32,
        all_ids: I64,
        id_starts: I64,
        queries: F32,
        distances: F32,
        ids: I64,
        mask: U8 | None = None,
        first_rows: I64 | None = None,
    ) -> None: ...

def first_absent(probes: I64, list_sizes: I64, list_device: _I16, device: int) -> int: ...

class FreeRuns:
    """Free pages of an arena; one thread at a time."""
    def __init__(self) -> None: ...
    @property
    def n_free(self) -> int: ...
    @property
    def end(self) -> int: ...
    def allocate(self, n: int, whole: bool) -> I32 | None: ...
    def allocate_each(self, counts: I64) -> tuple[I32, list[bool]]: ...
    def add(self, start: int, n: int) -> None: ...
    def free(self, pages: I32) -> None: ...
    def withdraw(self, start: int, n: int) -> bool: ...
    def pages(self) -> I32: ...

def merge_runs(
    pages: I32, counts: I64, sources: I64, regions: I64, base: int, page_bytes: int, most: int
) -> tuple[I64, I64, I64]: ...
def start_copies(targets: I64, sources: I64, sizes: I64, copy: int, batch: int, stream: int) -> int: ...

class ScanTables:
    """Tables of device scans, made by one thread at a time."""
    def __init__(self, rows_per_page: int, group: int) -> None: ...
    def take(self, probes: I64, list_sizes: I64, max_pages: int) -> int: ...
    def tiles(self, per_row: float, per_item: int, per_pair: int, per_query: int, limit: int) -> list[int]: ...
    def write(
        self, start: int, end: int, list_log: I64, page_log: I32, heavy_from: int, chunk: int, kept: int, out: I32
    ) -> tuple[
        int, int, int, int, int, int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]
    ]: ...
    def answers(self, keys: I64, keep_max: bool, distances: F32, positions: I64) -> int: ...
    def member_probes(self) -> I64: ...
    def stretch_lists(self) -> I64: ...
    def pairs(self) -> tuple[I64, ...]: ...
