"""Part of ``benchmarks.host.updates``: bytes written over a turnover, for each byte of new rows."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.clusters import import_lists, make_clusters
from benchmarks.common.measure import show
from benchmarks.host.update_adds import Scale, verdict
from benchmarks.host.update_latency import Writing
from benchmarks.rivals.update_side import written
from hybridindex.api import open_index
from hybridindex.index.changes.compact import needs_compaction

__all__ = ["amplification"]

TARGET = 8.0


def amplification(scale: Scale, codecs: tuple[str, ...]) -> dict[str, Any]:
    """Deletes all rows and adds as many, in steps, with the writer's own maintenance. Patient: each step waits for the
    compaction that it brings, so that there are as many as there can be; else none waits."""
    clusters = make_clusters(scale.dim, 2 * scale.count * 4 * scale.dim, nlist=int(4 * np.sqrt(scale.count)))
    rows: list[dict[str, Any]] = []
    for codec in codecs:
        # The second codec differs in the size of rows alone.
        for patient in (True, False) if codec == codecs[0] else (True,):
            with tempfile.TemporaryDirectory(dir=scale.scratch) as folder:
                path = Path(folder) / "idx"
                n = scale.count
                import_lists(clusters.vectors[:n], clusters.lists[:n], clusters.centres, codec, "ip", path).close()
                before, began = written(), time.perf_counter()
                with open_index(path, write=True) as index:
                    change = 1_000
                    writing = Writing(index, clusters.vectors, n, change)
                    while writing.steps * change < n:
                        writing.step()
                        while patient and needs_compaction(index.ivf):
                            time.sleep(0.05)
                    while needs_compaction(index.ivf):
                        time.sleep(0.05)
                    compactions = index.writer.compactions
                    came = writing.steps * change * index.ivf.code_size
                    n_live = index.n_live
                taken = time.perf_counter() - began
                after = written()
            given, device = after["given"] - before["given"], after["device"] - before["device"]
            rows.append(
                {
                    "codec": codec,
                    "patient": patient,
                    "rows": n,
                    "n_live": n_live,
                    "compactions": compactions,
                    "seconds": taken,
                    "new_bytes": came,
                    "given_bytes": given,
                    "device_bytes": device,
                    "amplification": given / came,
                    "verdict": verdict(given / came, TARGET, 0.0),
                }
            )
    show(
        f"bytes written over a turnover of {scale.count:,} rows x {scale.dim}, for each byte of new rows",
        ("codec", "waits", "compactions", "seconds", "new MiB", "written MiB", "to the device", "times", "target"),
        [
            (
                row["codec"],
                "for each compaction" if row["patient"] else "never",
                row["compactions"],
                f"{row['seconds']:.1f}",
                f"{row['new_bytes'] / 2**20:,.0f}",
                f"{row['given_bytes'] / 2**20:,.0f}",
                f"{row['device_bytes'] / 2**20:,.0f}",
                f"{row['amplification']:.2f}",
                f"{TARGET:g}, {row['verdict']}",
            )
            for row in rows
        ],
    )
    return {"target": TARGET, "rows": rows}
