from typing import Any

import numpy as np
import numpy.typing as npt

_Part = tuple[int, int, npt.NDArray[np.int32] | None, npt.NDArray[np.int64] | None, npt.NDArray[np.float32] | None]

def split_probes(
    probes: npt.NDArray[np.int64],
    coarse: npt.NDArray[np.float32],
    list_device: npt.NDArray[np.int16],
    list_bytes: npt.NDArray[np.int64],
    n_devices: int,
    hit_rate: npt.NDArray[np.float32],
    n_parts: npt.NDArray[np.int32],
    n_probes: npt.NDArray[np.int32],
    where: npt.NDArray[np.int16] | None = None,
    n_nodes: int = 0,
    work: npt.NDArray[np.int64] | None = None,
    lost: npt.NDArray[np.int64] | None = None,
) -> list[_Part]: ...
def cover_probes(
    probes: npt.NDArray[np.int64],
    here: npt.NDArray[np.bool_],
    holders: npt.NDArray[np.uint64],
    usable: int,
    to_do: npt.NDArray[np.float64] | None,
    places: npt.NDArray[np.int64],
    turn: int,
    found: npt.NDArray[np.int16],
) -> None: ...
def matching_rows(
    mask: npt.NDArray[np.uint8],
    first: npt.NDArray[np.int64],
    probes: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
) -> None: ...
def merge_topk(
    best_distances: npt.NDArray[np.float32],
    best_ids: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int32],
    distances: npt.NDArray[np.float32],
    ids: npt.NDArray[np.int64],
    keep_max: bool,
) -> None: ...
def leave_out(
    best_distances: npt.NDArray[np.float32],
    best_ids: npt.NDArray[np.int64],
    distances: npt.NDArray[np.float32],
    ids: npt.NDArray[np.int64],
    gone: npt.NDArray[np.int64],
    keep_max: bool,
) -> bool: ...
def finish_topk(distances: npt.NDArray[np.float32], ids: npt.NDArray[np.int64], keep_max: bool) -> None: ...
def move_extents(
    from_: npt.NDArray[np.uint8],
    to: npt.NDArray[np.uint8],
    code_size: int,
    before: npt.NDArray[np.int64],
    after: npt.NDArray[np.int64],
    gone_starts: npt.NDArray[np.int64],
    gone: npt.NDArray[np.int64],
) -> None: ...
def put_rows(
    to: npt.NDArray[np.uint8],
    codes: npt.NDArray[np.uint8],
    order: npt.NDArray[np.int64],
    at: npt.NDArray[np.int64],
) -> None: ...
def touch_ahead(to: npt.NDArray[np.uint8], start: int, nbytes: int) -> None: ...
def group_probes(
    probes: npt.NDArray[np.int64], extents: npt.NDArray[np.int64], places: bool = False
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.int64]]: ...
def page_scratch_need(code: str, dim: int, residual: bool, k: int) -> tuple[int, int]: ...
def scan_pages(
    arena: npt.NDArray[np.uint8],
    rows_per_page: int,
    code: str,
    scale: npt.NDArray[np.float32],
    offset: npt.NDArray[np.float32],
    list_ids: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    page_starts: npt.NDArray[np.int64],
    pages: npt.NDArray[np.int32],
    member_starts: npt.NDArray[np.int64],
    members: npt.NDArray[np.int32],
    centroids: npt.NDArray[np.float32],
    queries: npt.NDArray[np.float32],
    keep_max: bool,
    distances: npt.NDArray[np.float32],
    positions: npt.NDArray[np.int64],
    kernels: str = "",
    mask: npt.NDArray[np.uint8] | None = None,
    first_rows: npt.NDArray[np.int64] | None = None,
) -> None: ...

class CoarseQuantizer:
    kernels: str
    def __init__(self, centroids: npt.NDArray[np.float32], keep_max: bool, kernels: str) -> None: ...
    def quantize(
        self,
        queries: npt.NDArray[np.float32],
        probes: npt.NDArray[np.int64],
        distances: npt.NDArray[np.float32],
        pool: Any = None,
    ) -> None: ...

class Watch:
    watching: bool
    def __init__(self, address: int, nbytes: int, fd: int, name: str, marks: npt.NDArray[np.int64]) -> None: ...
    def take_gone(self) -> list[tuple[int, int]]: ...
    def clear(self) -> None: ...

def count(marks: npt.NDArray[np.int64]) -> None: ...
def ask_for_rows(
    data: npt.NDArray[np.uint8],
    extents: npt.NDArray[np.int64],
    row_bytes: int,
    positions: npt.NDArray[np.int64],
    rows: bool,
    seen: bool,
) -> int: ...

class CodePages:
    def __init__(
        self,
        signs: npt.NDArray[np.float32],
        bits: int,
        dim: int,
        f_scale: float,
        g_scale: float,
        l2: bool,
        kernels: str = "",
    ) -> None: ...
    def scratch_need(self, k: int) -> tuple[int, int]: ...
    def scan(
        self,
        arena: npt.NDArray[np.uint8],
        rows_per_page: int,
        list_ids: npt.NDArray[np.int64],
        sizes: npt.NDArray[np.int64],
        page_starts: npt.NDArray[np.int64],
        pages: npt.NDArray[np.int32],
        member_starts: npt.NDArray[np.int64],
        members: npt.NDArray[np.int32],
        centre_products: npt.NDArray[np.float32],
        centre_squares: npt.NDArray[np.float32],
        queries: npt.NDArray[np.float32],
        estimates: npt.NDArray[np.float32],
        positions: npt.NDArray[np.int64],
    ) -> None: ...

def rabitq_encode(
    rows: npt.NDArray[np.float32],
    centroid: npt.NDArray[np.float32],
    signs: npt.NDArray[np.float32],
    bits: int,
    f_scale: float,
    g_scale: float,
    l2: bool,
    out: npt.NDArray[np.uint8],
) -> None: ...
def rabitq_queries(
    queries: npt.NDArray[np.float32],
    signs: npt.NDArray[np.float32],
    bits: int,
    f_scale: float,
    whole: npt.NDArray[np.int8],
    u: npt.NDArray[np.float32],
) -> None: ...
def distances_in_pages(
    arena: npt.NDArray[np.uint8],
    code: str,
    scale: npt.NDArray[np.float32],
    offset: npt.NDArray[np.float32],
    centroids: npt.NDArray[np.float32],
    sizes: npt.NDArray[np.int64],
    first_pages: npt.NDArray[np.int64],
    page_counts: npt.NDArray[np.int32],
    page_numbers: npt.NDArray[np.int32],
    queries: npt.NDArray[np.float32],
    positions: npt.NDArray[np.int64],
    keep_max: bool,
    distances: npt.NDArray[np.float32],
    kernels: str = "",
) -> None: ...
def distances_in_pages_need(code: str, dim: int) -> int: ...
def pair_products(
    queries: npt.NDArray[np.float32],
    centroids: npt.NDArray[np.float32],
    probes: npt.NDArray[np.int64],
    out: npt.NDArray[np.float32],
    kernels: str = "",
) -> None: ...

class PqForm:
    kernels: str
    def __init__(
        self,
        codewords: npt.NDArray[np.float32],
        middle: npt.NDArray[np.float32],
        parts: int,
        l2: bool,
        residual: bool,
        kernels: str = "",
    ) -> None: ...
    def tables(self, queries: npt.NDArray[np.float32], out: npt.NDArray[np.float32]) -> None: ...
    def bases(
        self,
        queries: npt.NDArray[np.float32],
        centroids: npt.NDArray[np.float32],
        probes: npt.NDArray[np.int64],
        out: npt.NDArray[np.float32],
    ) -> None: ...
    def terms(
        self, codes: npt.NDArray[np.uint8], centroid: npt.NDArray[np.float32], out: npt.NDArray[np.float32]
    ) -> None: ...
    def scratch_need(self, k: int) -> tuple[int, int]: ...
    def scan_pages(
        self,
        arena: npt.NDArray[np.uint8],
        rows_per_page: int,
        list_ids: npt.NDArray[np.int64],
        sizes: npt.NDArray[np.int64],
        page_starts: npt.NDArray[np.int64],
        pages: npt.NDArray[np.int32],
        member_starts: npt.NDArray[np.int64],
        members: npt.NDArray[np.int32],
        centroids: npt.NDArray[np.float32],
        all_ids: npt.NDArray[np.int64],
        id_starts: npt.NDArray[np.int64],
        queries: npt.NDArray[np.float32],
        distances: npt.NDArray[np.float32],
        ids: npt.NDArray[np.int64],
        mask: npt.NDArray[np.uint8] | None = None,
        first_rows: npt.NDArray[np.int64] | None = None,
    ) -> None: ...

def first_absent(
    probes: npt.NDArray[np.int64],
    list_sizes: npt.NDArray[np.int64],
    list_device: npt.NDArray[np.int16],
    device: int,
) -> int: ...

class FreeRuns:
    """Free pages of an arena; one thread at a time."""
    def __init__(self) -> None: ...
    @property
    def n_free(self) -> int: ...
    @property
    def end(self) -> int: ...
    def allocate(self, n: int, whole: bool) -> npt.NDArray[np.int32] | None: ...
    def allocate_each(self, counts: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int32], list[bool]]: ...
    def add(self, start: int, n: int) -> None: ...
    def free(self, pages: npt.NDArray[np.int32]) -> None: ...
    def withdraw(self, start: int, n: int) -> bool: ...
    def pages(self) -> npt.NDArray[np.int32]: ...

def merge_runs(
    pages: npt.NDArray[np.int32],
    counts: npt.NDArray[np.int64],
    sources: npt.NDArray[np.int64],
    regions: npt.NDArray[np.int64],
    base: int,
    page_bytes: int,
    most: int,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]: ...
def start_copies(
    targets: npt.NDArray[np.int64],
    sources: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    copy: int,
    batch: int,
    stream: int,
) -> int: ...

class ScanTables:
    """Tables of device scans, made by one thread at a time."""
    def __init__(self, rows_per_page: int, group: int) -> None: ...
    def take(self, probes: npt.NDArray[np.int64], list_sizes: npt.NDArray[np.int64], max_pages: int) -> int: ...
    def tiles(self, per_row: float, per_item: int, per_pair: int, per_query: int, limit: int) -> list[int]: ...
    def write(
        self,
        start: int,
        end: int,
        list_log: npt.NDArray[np.int64],
        page_log: npt.NDArray[np.int32],
        heavy_from: int,
        chunk: int,
        kept: int,
        out: npt.NDArray[np.int32],
    ) -> tuple[
        int, int, int, int, int, int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]
    ]: ...
    def answers(
        self,
        keys: npt.NDArray[np.int64],
        keep_max: bool,
        distances: npt.NDArray[np.float32],
        positions: npt.NDArray[np.int64],
    ) -> int: ...
    def member_probes(self) -> npt.NDArray[np.int64]: ...
    def stretch_lists(self) -> npt.NDArray[np.int64]: ...
    def pairs(self) -> tuple[npt.NDArray[np.int64], ...]: ...
