import numpy as np
import numpy.typing as npt

_Part = tuple[int, npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.int64]]

def split_probes(
    probes: npt.NDArray[np.int64],
    coarse: npt.NDArray[np.float32],
    list_device: npt.NDArray[np.int16],
    list_bytes: npt.NDArray[np.int64],
    n_devices: int,
) -> tuple[list[_Part], npt.NDArray[np.float32], npt.NDArray[np.int32]]: ...
def merge_topk(
    best_distances: npt.NDArray[np.float32],
    best_ids: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int32],
    distances: npt.NDArray[np.float32],
    ids: npt.NDArray[np.int64],
    keep_max: bool,
) -> None: ...
