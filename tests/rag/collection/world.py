"""Texts whose vectors follow from them, so that a row that has another's text is seen."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from hybridindex.api import open_index
from hybridindex.rag.collection import Collection, Item
from hybridindex.rag.collection.present import are_there
from hybridindex.rag.ingest import GivenText, Outcome, Reading, find_sources, update
from hybridindex.types import F32

__all__ = [
    "COLUMNS",
    "DIM",
    "Embedder",
    "check",
    "chunks_of",
    "given_texts",
    "ingest",
    "items",
    "put",
    "state",
    "vectors_of",
]

DIM = 12
COLUMNS = {"year": "int", "lang": "string"}


def vectors_of(texts: Iterable[str]) -> F32:
    seeds = [int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") for text in texts]
    return np.stack([np.random.default_rng(seed).standard_normal(DIM) for seed in seeds]).astype(np.float32)


class Embedder:
    """Of :func:`vectors_of`."""

    name = "toy"

    def embed(self, texts: Sequence[str], /) -> F32:
        return vectors_of(texts)


def given_texts(version: str) -> list[GivenText]:
    """Three of some chunks each, of which the first is the same in every version."""
    return [
        GivenText(
            name=f"text {n}",
            text="\n\n".join([f"# same {n}", "words", *(f"# {version} {n} {m}\n\nwords" for m in range(n + 1))]),
            metadata={"year": 2000 + n, "lang": version},
        )
        for n in range(3)
    ]


def ingest(collection: Collection, folder: Path) -> Outcome:
    return update(collection, find_sources([folder]), [folder], Embedder(), Reading(words=3))


def chunks_of(path: Path) -> dict[str, list[tuple[str, str]]]:
    """Of each source, the texts and metadata of its chunks, one following the other."""
    with Collection(path) as collection:
        every = {item.id: item for item in collection.items()}
        followed = {item.successor for item in every.values()}
        found: dict[str, list[tuple[str, str]]] = {}
        for item in every.values():
            # Records of one file follow nobody.
            here = None if item.id in followed else item
            while here is not None:
                said = json.dumps(here.metadata, sort_keys=True)
                found.setdefault(here.ref, []).append((here.text, said))
                here = None if here.successor is None else every.get(here.successor)
        assert sum(map(len, found.values())) == len(every), "chunks follow each other in a circle, or are lost"
        return found


def items(numbers: Iterable[int], version: str = "first") -> list[Item]:
    return [
        Item(
            key=f"k{n}", text=f"{version} {n}", ref=f"doc{n % 3}",
            metadata={"year": 2000 + n, "lang": version, "more": [n, version]},
        )
        for n in numbers
    ]  # fmt: skip


def put(collection: Collection, numbers: Iterable[int], version: str = "first") -> list[int]:
    given = items(numbers, version)
    return collection.put(given, vectors_of(item.text for item in given))


def state(path: Path) -> dict[str, str]:
    """Key -> text."""
    with Collection(path) as collection:
        return {str(item.key): item.text for item in collection.items()}


def check(path: Path, *, recovered: bool = True) -> None:
    """No row is without a text; and, behind a recovery, no text without its row, which is that of its vector."""
    with open_index(path) as index, Collection(path) as collection:
        every = np.arange(5000, dtype=np.int64)
        rows = set(every[are_there(index.ivf, every)].tolist())
        texts = {item.id: item for item in collection.items()}
        assert rows <= set(texts), "a row has no text"
        assert collection.count() == len(texts)
        if recovered:
            assert rows == set(texts)
            for item in texts.values():
                (hits,) = collection.search(vectors_of([item.text]), 1)
                assert (hits[0].item.text, round(hits[0].score, 3)) == (item.text, 1)
                if "year" not in item.metadata:
                    continue
                year = item.metadata["year"]
                (hits,) = collection.search(vectors_of([item.text]), 300, where=f"year = {year}")
                assert {hit.item.metadata["year"] for hit in hits} == {year}
                assert item in [hit.item for hit in hits]
