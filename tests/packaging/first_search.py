"""What a wheel must do on a machine that has nothing but Python and faiss: build, profile, search. Run by its path."""

from __future__ import annotations

import tempfile

import numpy as np

import hybridindex as hx

vectors = np.random.default_rng(1).standard_normal((4000, 48), dtype=np.float32)
with tempfile.TemporaryDirectory() as folder, hx.build(vectors, f"{folder}/index", nlist=64) as index:
    index.profile(vectors[:200], nprobe=8, max_seconds=2)
    with index.router() as router:
        found = router.search(vectors[:100], k=3, nprobe=8)
assert (found.ids[:, 0] == np.arange(100)).all(), "a vector of the index is its own nearest neighbour"
print("first search: ok")
