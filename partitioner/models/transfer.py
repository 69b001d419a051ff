"""Time of a host-to-device copy against its bytes, fitted to measured copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybridindex.errors import ProfileError
from hybridindex.partitioner.models.scan_models import relative_nnls
from hybridindex.types import TransferSample

__all__ = ["TransferModel", "fit_transfers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferModel:
    """Seconds of one copy: latency + bytes / bandwidth."""

    latency_s: float
    bytes_per_s: float
    #: Copies from page-locked host memory.
    pinned: bool
    devices: tuple[str, ...]
    #: Median relative error on its own samples.
    error: float

    def predict(self, nbytes: float) -> float:
        return self.latency_s + nbytes / self.bytes_per_s


def fit_transfers(samples: Sequence[TransferSample], *, pinned: bool) -> TransferModel:
    """Fit the copies from page-locked memory (``pinned``), or the others.

    Raises:
        ProfileError: there are none.
    """
    used = [sample for sample in samples if sample.pinned == pinned]
    if not used:
        kind = "from page-locked memory" if pinned else "from ordinary memory"
        raise ProfileError(f"the profile has no copies {kind} to a device; profile with devices=[...]")
    nbytes = np.array([sample.nbytes for sample in used], dtype=np.float64)
    seconds = np.array([sample.seconds for sample in used], dtype=np.float64)
    (latency, per_byte), error = relative_nnls(np.column_stack((np.ones_like(nbytes), nbytes)), seconds)
    return TransferModel(
        latency_s=float(latency),
        # Copies of one size may say nothing of bandwidth. Then use the rate of the largest one.
        bytes_per_s=float(1.0 / per_byte) if per_byte > 0 else float(nbytes.max() / seconds.max()),
        pinned=pinned,
        devices=tuple(sorted({sample.device for sample in used})),
        error=error,
    )
