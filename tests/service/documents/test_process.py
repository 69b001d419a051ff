"""A daemon as a process of its own that is killed while documents come: each is as it was or as it was sent, what was
answered is there, and sent again everything is as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path

import pytest

from hybridindex.client import Client, RetryPolicy
from hybridindex.errors import HybridIndexError
from hybridindex.rag.collection import Collection
from hybridindex.rag.ingest import GivenText, put_texts
from tests.rag.collection.world import COLUMNS, DIM, vectors_of
from tests.router.slow_copies import until
from tests.service.documents.conftest import EMBEDDER, Toy
from tests.service.test_daemon import daemon

N_WRITERS = 3


def text_of(writer: int, name: int, version: int) -> str:
    """Some chunks, of which some are those of the version before."""
    draw = random.Random(1000 * writer + name)
    parts = [f"# part {n}\n\nof {writer} {name}" for n in range(draw.randrange(1, 5))]
    return "\n\n".join([*parts, *(f"# new {n}\n\n{version} of {writer} {name}" for n in range(version % 3))])


def chunks_of(path) -> dict[str, list[str]]:
    """Text of each source, part by part, in the order of their successors; each row is found by its text."""
    with Collection(path) as collection:
        collection.recover()
        items = {item.id: item for item in collection.items()}
        assert collection.index.n_live == len(items)
        for item in items.values():
            (hits,) = collection.search(vectors_of([item.text]), 1)
            assert hits[0].item.text == item.text
        followed = {item.successor for item in items.values()}
        found: dict[str, list[str]] = {}
        for item in items.values():
            if item.id in followed:
                continue
            parts, here = [], item
            while here is not None:
                parts.append(here.text)
                here = items.get(here.successor)
            assert item.ref not in found, "a source has two beginnings"
            found[item.ref] = parts
        assert sum(map(len, found.values())) == len(items)
        return found


@pytest.mark.parametrize("seed", range(3))
def test_what_was_answered_survives_a_kill_in_the_middle(tmp_path, double, seed):
    path = tmp_path / "idx"
    with Collection(path, columns=COLUMNS, embedder=EMBEDDER) as collection:
        collection.create(DIM)
    #: Versions of each source that were sent, the last one that was answered first.
    sent: dict[str, list[int]] = {}
    answered = [0]

    def write(url: str, writer: int) -> None:
        draw = random.Random(100 * seed + writer)
        with Client(url, retry=RetryPolicy(attempts=1)) as client:
            for step in range(10_000):
                names = draw.sample(range(6), 2)
                version = step + 1
                for name in names:
                    sent.setdefault(f"{writer}/{name}", [0]).append(version)
                try:
                    client.add_documents(
                        {"source": f"{writer}/{name}", "text": text_of(writer, name, version)} for name in names
                    )
                except HybridIndexError:
                    return
                for name in names:
                    sent[f"{writer}/{name}"] = [version]
                answered[0] += 1
                if draw.random() < 0.2:
                    gone = f"{writer}/{names[0]}"
                    sent[gone].append(0)
                    try:
                        assert client.delete_documents([gone]) == 1
                    except HybridIndexError:
                        return
                    sent[gone] = [0]

    with daemon(path, "--port", 0, "--embedder-url", double.url) as (process, urls):
        threads = [threading.Thread(target=write, args=(urls[0], each)) for each in range(N_WRITERS)]
        # Its log would fill the pipe.
        threads.append(threading.Thread(target=process.stderr.read))
        for thread in threads:
            thread.start()
        until(lambda: answered[0] >= 12 + 5 * seed)
        tasks = Path(f"/proc/{process.pid}/task").iterdir()
        children = [child for task in tasks for child in (task / "children").read_text().split()]
        assert children, "texts are embedded by another process"
        process.send_signal(signal.SIGKILL)
        for thread in threads:
            thread.join(60)
    # It ends with the daemon.
    until(lambda: not any(os.path.exists(f"/proc/{child}/exe") for child in children))

    def wanted(name: str, version: int) -> list[str]:
        writer, number = map(int, name.split("/"))
        return [f"# {part}" for part in text_of(writer, number, version).split("# ")[1:]] if version else []

    found = chunks_of(path)
    assert set(found) <= set(sent)
    for name, versions in sent.items():
        choices = [[part.rstrip() for part in wanted(name, version)] for version in versions]
        assert sorted(found.get(name, [])) in map(sorted, choices), name

    # Sent again, everything is as it should be, whatever was interrupted.
    with daemon(path, "--port", 0, "--embedder-url", double.url) as (process, urls), Client(urls[0]) as client:
        last = {name: versions[-1] for name, versions in sent.items()}
        for name, version in last.items():
            writer, number = map(int, name.split("/"))
            if version:
                client.add_documents([{"source": name, "text": text_of(writer, number, version)}])
            else:
                client.delete_documents([name])
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    with Collection(tmp_path / "other", columns=COLUMNS, embedder=EMBEDDER) as collection:
        collection.create(DIM)
        for name, version in last.items():
            if version:
                writer, number = map(int, name.split("/"))
                put_texts(collection, [GivenText(name=name, text=text_of(writer, number, version))], Toy())
    assert chunks_of(path) == chunks_of(tmp_path / "other")
