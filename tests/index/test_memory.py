"""A build stays under its memory budget, whatever the size of its input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.errors import InvalidInputError
from hybridindex.index.codec import parse_codec
from hybridindex.index.memory import divide_budget

_MEASURE = """
import json, sys, threading
import numpy as np
from hybridindex.index import build
import faiss

def anonymous_bytes():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))

def chunks(path):
    for start in range(0, 200_000, 10_000):
        yield np.array(np.load(path, mmap_mode="r")[start:start + 10_000])

import h5py, pandas, pyarrow.parquet  # libraries do not count; pyarrow loads pandas where it is installed
path, source, codec, budget = sys.argv[1:]
before = peak = anonymous_bytes()
stop = threading.Event()

def watch():
    global peak
    while not stop.wait(0.002):
        peak = max(peak, anonymous_bytes())

thread = threading.Thread(target=watch)
thread.start()
vectors = chunks(path + "/x.npy") if source == "iterator" else path + "/x." + source
ids = np.load(path + "/ids.npy", mmap_mode="r")
index = build(vectors, path + "/" + source + codec, nlist=128, codec=codec, ids=ids, train_size=6000,
              memory_budget_bytes=int(budget))
stop.set()
thread.join()
print(json.dumps({"grew": peak - before, "count": index.count}))
"""


@pytest.mark.parametrize(
    ("source", "codec"), [("npy", "flat"), ("iterator", "sq8"), ("npy", "pqfs"), ("parquet", "sq8"), ("h5", "flat")]
)
def test_anonymous_memory_stays_under_the_budget(tmp_path: Path, source: str, codec: str) -> None:
    make = """
import sys, numpy as np
rng = np.random.default_rng(0)
x = np.lib.format.open_memmap(sys.argv[1] + "/x.npy", "w+", np.float32, (200_000, 64))
for start in range(0, 200_000, 20_000):
    x[start:start + 20_000] = rng.standard_normal((20_000, 64), dtype=np.float32)
import h5py, pyarrow as pa, pyarrow.parquet
with h5py.File(sys.argv[1] + "/x.h5", "w") as file:
    file["x"] = x
# One row group, larger than the budget.
rows = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 64)
pyarrow.parquet.write_table(pa.table({"x": rows}), sys.argv[1] + "/x.parquet", row_group_size=200_000)
np.save(sys.argv[1] + "/ids.npy", rng.permutation(400_000)[:200_000])
"""
    subprocess.run([sys.executable, "-c", make, tmp_path], check=True)
    budget = 52 << 20  # the vectors alone are 51 MB
    command = [sys.executable, "-c", _MEASURE, tmp_path, source, codec, str(budget)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert result["count"] == 200_000
    assert result["grew"] < budget


@given(
    dim=st.integers(1, 4096),
    nlist=st.integers(1, 100_000),
    budget=st.integers(1, 1 << 34),
    codec=st.sampled_from(["flat", "sq8", "pq", "pqfs"]),
)
def test_a_budget_is_divided_within_itself_or_refused(dim: int, nlist: int, budget: int, codec: str) -> None:
    spec = parse_codec(codec, dim)
    try:
        memory = divide_budget(budget, dim=dim, nlist=nlist, spec=spec)
    except InvalidInputError:
        assert budget < 2 * (3 * 4 * dim * nlist + 64 * nlist + (64 << 20))
        return
    centroids = 3 * 4 * dim * nlist
    assert memory.train_rows >= 256
    assert memory.encoder_rows >= 256
    assert memory.chunk_rows >= 64
    sample = memory.train_rows * 4 * dim
    if memory.train_rows > 256:
        assert centroids + sample < budget
    if memory.chunk_rows > 64:
        assert centroids + memory.chunk_rows * (9 * dim + 2 * spec.code_size) < budget


def test_the_needed_budget_is_named_and_suffices() -> None:
    spec = parse_codec("flat", 384)
    with pytest.raises(InvalidInputError, match="needs ") as caught:
        divide_budget(1, dim=384, nlist=4096, spec=spec)
    needed = int(str(caught.value).split("needs ")[1].split()[0])
    divide_budget(needed, dim=384, nlist=4096, spec=spec)
