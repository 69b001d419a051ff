"""The probe split of one batch of 64 x 256 probes. Target: at most 300 microseconds."""

from __future__ import annotations

from functools import partial

import numpy as np

from benchmarks.common.measure import arguments, interleave, show, write
from hybridindex.router.batch.split import split_probes, split_probes_reference

TARGET_US = 300.0


def main() -> None:
    args = arguments(__doc__)
    rng = np.random.default_rng(0)
    rows = []
    for n, p, nlist, n_devices in [(64, 256, 65_536, 1), (64, 256, 65_536, 8), (64, 256, 4096, 2), (1, 64, 4096, 1)]:
        probes = np.stack([rng.permutation(nlist)[:p] for _ in range(n)])
        coarse = rng.random((n, p), dtype=np.float32)
        list_device = np.where(rng.random(nlist) < 0.3, rng.integers(0, n_devices, nlist), -1).astype(np.int16)
        list_bytes = rng.integers(1000, 500_000, nlist)
        call = (probes, coarse, list_device, list_bytes, n_devices)
        timed = interleave(
            {"native": partial(split_probes, *call), "numpy": partial(split_probes_reference, *call)},
            repeats=31,
            calls=10,
        )
        us = timed["native"].median * 1e6
        rows.append((n, p, nlist, n_devices, us, timed["numpy"].median * 1e6, "yes" if us <= TARGET_US else "NO"))
    columns = ("queries", "probes", "nlist", "devices", "native us", "numpy us", f"<= {TARGET_US:g} us")
    show("split_probes", columns, rows)
    write(
        args.json, "split_probes", {"target_us": TARGET_US, "rows": [dict(zip(columns, r, strict=True)) for r in rows]}
    )


if __name__ == "__main__":
    main()
