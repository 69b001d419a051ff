"""An ingest that is killed again and again in its middle, or whose daemon is, ends as one that nobody disturbed."""

from __future__ import annotations

import json
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from hybridindex.api import open_index
from hybridindex.rag.collection import Collection
from hybridindex.rag.collection.present import are_there
from tests.durability.launcher import Child, Launcher
from tests.llm_double import LLMDouble
from tests.rag.collection.world import chunks_of, vectors_of

#: More than two batches.
RECORDS = 1100


class Embedder(LLMDouble):
    """Tells of each request when it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = 0
        self.told: Callable[[int], None] = lambda _number: None
        self.vectors_of = self._vectors_of

    def _vectors_of(self, texts: list[str]) -> object:
        self.requests += 1
        self.told(self.requests)
        return vectors_of(texts)


@pytest.fixture
def double() -> Iterator[Embedder]:
    with Embedder() as running:
        yield running


def write_texts(folder: Path, version: int) -> None:
    folder.mkdir(exist_ok=True)
    changed = range(0, RECORDS, 1 + version)
    records = [{"text": f"record {n} of {version if n in changed else 0}", "year": 1900 + n} for n in range(RECORDS)]
    (folder / "many.jsonl").write_text("\n".join(map(json.dumps, records)))
    for n in range(40):
        parts = [f"# part {m}\n\nof {n}, {version if (n + m) % 3 else 0}" for m in range(version, 6 + version)]
        (folder / f"{n}.md").write_text("\n\n".join(parts))
    for n in range(20):
        (folder / f"of version {version}, {n}.md").write_text(f"text {n} of version {version}")
        (folder / f"of version {1 - version}, {n}.md").unlink(missing_ok=True)


def words(folder: Path, index: Path, double: Embedder) -> list[object]:
    embedder = ["--embedder", "openai:toy", "--embedder-url", double.url]
    return ["ingest", folder, index, *embedder, "--attributes", "year=int", "--json"]


def whole(launcher: Launcher, folder: Path, index: Path, double: Embedder) -> dict[str, list[tuple[str, str]]]:
    """What is there when it ended by itself."""
    child = launcher.start(*words(folder, index, double))
    assert child.wait() == 0, child.log
    with open_index(index) as opened, Collection(index) as collection:
        items = list(collection.items())
        assert opened.n_live == len(items)
        for start in range(0, len(items), 500):
            part = items[start : start + 500]
            found = collection.search(vectors_of([item.text for item in part]), 1)
            assert [hits[0].item.text for hits in found] == [item.text for item in part]
        # By their attributes, too.
        last = 1900 + RECORDS - 1
        ((hit,),) = collection.search(vectors_of(["x"]), 1, where=f"year >= {last}")
        assert hit.item.metadata == {"year": last}
    return chunks_of(index)


def no_row_is_without_its_text(index: Path) -> None:
    with open_index(index) as opened, Collection(index) as collection:
        texts = collection.store.all_ids()
        every = np.arange(20_000, dtype=np.int64)
        assert set(every[are_there(opened.ivf, every)].tolist()) <= set(texts.tolist())


def kill_at(victim: Child, child: Child, double: Embedder, number: int, after_s: float) -> None:
    """Kills a process some time after so many further requests for embeddings came, or when ``child`` has ended."""
    reached, first = threading.Event(), double.requests
    double.told = lambda count: reached.set() if count - first >= number else None
    while child.alive and not reached.wait(0.02):
        pass
    time.sleep(after_s)
    victim.end()
    double.told = lambda _count: None


@pytest.mark.parametrize("beside", ["alone", "beside a daemon", "its daemon"])
def test_an_ingest_that_is_killed_is_ended_by_the_next(launcher, double, tmp_path, beside):
    folder, index, other = tmp_path / "texts", tmp_path / "idx", tmp_path / "other"
    write_texts(folder, 0)
    before = whole(launcher, folder, index, double)
    write_texts(folder, 1)
    shutil.copytree(index, other, symlinks=True)
    after = whole(launcher, folder, other, double)
    assert before != after

    draw, kills, statuses = random.Random(beside), 0, []
    daemon = None if beside == "alone" else launcher.daemon(index, "--port", 0)
    served = None if daemon is None else daemon.__enter__()[0]
    try:
        for _ in range(6):
            child = launcher.start(*words(folder, index, double))
            victim = served if beside == "its daemon" else child
            kill_at(victim, child, double, draw.choice((1, 2, 8, 9)), draw.random() * 0.1)
            statuses.append(child.wait())
            kills += statuses[-1] != 0
            if beside == "its daemon":
                daemon = launcher.daemon(index, "--port", 0)
                served = daemon.__enter__()[0]
            if beside == "alone":
                no_row_is_without_its_text(index)
        assert kills > 1, statuses
        if beside != "its daemon":
            assert set(statuses) <= {0, -signal.SIGKILL}
        child = launcher.start(*words(folder, index, double))
        assert child.wait() == 0, child.log
    finally:
        if daemon is not None:
            daemon.__exit__(None, None, None)
    # Nothing is left to do, and it is as if nothing had happened.
    requests = double.requests
    assert whole(launcher, folder, index, double) == after
    assert double.requests == requests
    no_row_is_without_its_text(index)
