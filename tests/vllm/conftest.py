"""One vLLM for all files here: it starts once, with the router inside it, over an index of texts with a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import hybridindex as hx
from hybridindex.client import Client
from hybridindex.rag.documents import DOCUMENTS_FILE, DocumentStore
from hybridindex.rag.embed import EMBEDDER
from hybridindex.types import F32
from tests.rag.world import TOPICS, WORDS, build_world, query_embedder
from tests.vllm.server import Served
from tests.vllm.serving import serve
from tests.vllm.sides import YES, Side
from tests.vllm.tiny_llama import make_tiny_llama

NLIST, NPROBE = 32, 8
PER_TOPIC = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """An index, and the store of its texts within it."""

    index: Path
    documents: Path


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Words of the texts are tokens of it, so that what it says can be searched."""
    folder = tmp_path_factory.mktemp("model") / "tiny-llama"
    make_tiny_llama(folder, words=(*WORDS, YES), weights=True, chat=True)
    return folder


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    folder = tmp_path_factory.mktemp("library")
    built, documents, _ = build_world(folder, per_topic=PER_TOPIC, nlist=NLIST, nprobe=NPROBE, name=EMBEDDER)
    built.close()
    return Library(index=built.path, documents=documents.rename(built.path / DOCUMENTS_FILE))


@pytest.fixture(scope="session")
def queries(library: Library) -> Callable[..., F32]:
    """``queries(n, seed=0)``: vectors of texts as the library's, of one topic each."""

    def draw(n: int, *, seed: int = 0) -> F32:
        rng = np.random.default_rng(seed)
        topics = [words.split() for words in TOPICS.values()]
        with DocumentStore(library.documents) as store:
            return query_embedder(store).embed([" ".join(rng.choice(topics[n % 4], size=12)) for n in range(n)])

    return draw


@pytest.fixture(scope="session")
def served(
    model: Path, library: Library, queries: Callable[..., F32], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """vLLM with the router inside it; the plan is for the stand-in device."""
    with hx.open(library.index) as index:
        profile = index.profile(queries(200, seed=2), NPROBE, max_seconds=2, devices=["cpu"])
        index.apply_plan(index.plan(50, 8 << 20, profile, coverage=0.3))
    inside = {"VLLM_PLUGINS": "hybridindex", "HYBRIDINDEX_INDEX": str(library.index), "HYBRIDINDEX_DEVICES": "cpu"}
    with serve(model, tmp_path_factory.mktemp("served"), HYBRIDINDEX_THREADS="1", **inside) as running:
        yield running


@pytest.fixture(scope="session")
def near(library: Library) -> Iterator[Side]:
    """A router of this process, with a stand-in device that keeps nothing when sessions end."""
    with (
        hx.open(library.index) as index,
        index.router(None, ["cpu"], device_budget_bytes=16 << 20, cache_fraction=0, threads=1) as router,
        DocumentStore(library.documents) as documents,
    ):
        yield Side(
            name="beside",
            source=router,
            documents=documents,
            mode="completions",
            sessions=lambda: 0,
            lists=lambda: max(router.residency.n_resident, sum(tier.used_bytes for tier in router.devices)),
        )
        router.check_invariants()


@pytest.fixture(scope="session")
def far(served: Served, library: Library) -> Iterator[Side]:
    """The router inside vLLM."""
    with Client(f"{served.url}/hybridindex") as client, DocumentStore(library.documents) as documents:

        def beside_cache() -> int:
            status = client.status()
            return int(status["residency"]["lists"] - status["router"]["cached_lists"])

        planned = beside_cache()
        yield Side(
            name="inside",
            source=client,
            documents=documents,
            mode="chat",
            sessions=lambda: client.status()["sessions"]["open"],
            lists=lambda: beside_cache() - planned,
        )


@pytest.fixture(params=["near", "far"])
def side(request: pytest.FixtureRequest) -> Side:
    found: Side = request.getfixturevalue(request.param)
    return found
