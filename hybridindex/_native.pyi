import numpy as np
import numpy.typing as npt

_Part = tuple[int, npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.int64], int]

def split_probes(
    probes: npt.NDArray[np.int64],
    coarse: npt.NDArray[np.float32],
    list_device: npt.NDArray[np.int16],
    list_bytes: npt.NDArray[np.int64],
    n_devices: int,
) -> tuple[list[_Part], npt.NDArray[np.float32], npt.NDArray[np.int32], npt.NDArray[np.int32]]: ...
def merge_topk(
    best_distances: npt.NDArray[np.float32],
    best_ids: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int32],
    distances: npt.NDArray[np.float32],
    ids: npt.NDArray[np.int64],
    keep_max: bool,
) -> None: ...
def finish_topk(distances: npt.NDArray[np.float32], ids: npt.NDArray[np.int64], keep_max: bool) -> None: ...
def group_probes(
    probes: npt.NDArray[np.int64], extents: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int32]]: ...
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
) -> None: ...
