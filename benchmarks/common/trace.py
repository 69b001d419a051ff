"""RAGPulse, days 0 to 3: real arrivals and what was retrieved, turned into queries of a synthetic corpus.

The trace (arXiv 2511.12979) names passages and holds no vectors. **The mapping**: passages with neighbouring ids mostly
come from one document, so blocks of 64 ids become families of centres (:mod:`benchmarks.common.clusters`) by a seeded
permutation, and the passage's place in its block its place in the family. A request asks one query per passage that it
retrieved: the centre of the passage and noise that follows from the request's and passage's numbers. The same trace
gives the same queries everywhere.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import ROOT
from hybridindex.types import F32

__all__ = ["DAY_S", "TRACE", "Arrival", "queries_of_arrival", "read_trace"]

#: Beside the checkout; not part of the repository.
TRACE = ROOT.parent / "shared" / "data" / "ragpulse" / "days0-3.jsonl"
DAY_S = 86_400
#: Passage ids are below.
N_PASSAGES = 8302
_BLOCK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request."""

    number: int
    #: Seconds since the start of the week.
    at_s: float
    passages: tuple[int, ...]


def read_trace(file: Path) -> list[Arrival]:
    """Requests that retrieved something, in order."""
    found = []
    with file.open() as lines:
        for number, line in enumerate(lines):
            row = json.loads(line)
            if row["passages"]:
                found.append(Arrival(number=number, at_s=float(row["t"]), passages=tuple(row["passages"])))
    return found


def queries_of_arrival(arrival: Arrival, centres: F32, *, noise: float, seed: int = 0) -> F32:
    """(passages, dim) unit float32; see the top of this file. ``noise``: its length over the centre's, typically."""
    blocks = np.random.default_rng(seed).permutation(-(-N_PASSAGES // _BLOCK))
    passages = np.asarray(arrival.passages)
    place = blocks[passages // _BLOCK] * _BLOCK + passages % _BLOCK
    rng = np.random.default_rng((seed, arrival.number))
    dim = centres.shape[1]
    around = rng.standard_normal((len(passages), dim)) * (noise / np.sqrt(dim))
    found = centres[place % len(centres)] + around
    return np.asarray(found / np.linalg.norm(found, axis=1, keepdims=True), dtype=np.float32)
