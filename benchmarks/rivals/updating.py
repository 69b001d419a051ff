"""Systems that rows are added to, each in a process of its own that stands still (SIGSTOP) while another one works."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from benchmarks import ROOT
from benchmarks.common.clusters import Clusters

__all__ = ["PEERS", "Data", "Peer", "Side", "SideError"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One system, durable or not."""

    name: str
    #: As ``update_side`` calls it.
    system: str
    durable: bool = True
    #: Rows that take so long to load that it begins with few; fewer rows flatter it.
    is_slow: bool = False
    #: Whether it is held against us: it is durable, and an index.
    is_rival: bool = True


PEERS = (
    Peer(name="hybridindex", system="hybridindex", is_rival=False),
    Peer(name="hybridindex, again", system="hybridindex", is_rival=False),
    Peer(name="faiss IVF,Flat", system="faiss"),
    Peer(name="hnswlib HNSW", system="hnswlib", is_slow=True),
    Peer(name="LanceDB IVF_FLAT", system="lancedb"),
    Peer(name="Chroma HNSW", system="chromadb", is_slow=True),
    Peer(name="Milvus Lite IVF_FLAT", system="milvus"),
    Peer(name="pgvector IVFFlat", system="pgvector"),
    Peer(name="hybridindex, not synced", system="hybridindex", durable=False, is_rival=False),
    Peer(name="faiss IVF,Flat, in memory", system="faiss", durable=False, is_rival=False),
    Peer(name="hnswlib HNSW, in memory", system="hnswlib", durable=False, is_slow=True, is_rival=False),
    Peer(name="LanceDB IVF_FLAT, not synced", system="lancedb", durable=False, is_rival=False),
    Peer(name="Milvus Lite IVF_FLAT, not synced", system="milvus", durable=False, is_rival=False),
    Peer(name="write and fsync", system="disk", is_rival=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Vectors as files that every side reads."""

    folder: Path
    count: int
    #: Those that slow peers begin with.
    few: int
    nlist: int
    digest: str
    #: Folder of what takes long to load.
    cache: Path

    @classmethod
    def written(cls, clusters: Clusters, folder: Path, count: int, few: int, cache: Path) -> Data:
        """``clusters`` in ``folder``; ``count`` rows are there first."""
        np.save(folder / "vectors.npy", clusters.vectors)
        np.save(folder / "lists.npy", clusters.lists.astype(np.int64))
        np.save(folder / "centres.npy", clusters.centres)
        digest = xxhash.xxh3_64_hexdigest(clusters.vectors.data)
        return cls(folder=folder, count=count, few=few, nlist=len(clusters.centres), digest=digest, cache=cache)


class SideError(Exception):
    """A side is not there, or failed."""


class Side:
    """One system in its process."""

    def __init__(self, peer: Peer, data: Data, scratch: Path, python: Path | None = None) -> None:
        """``python``: that of the peers; None: this one."""
        ours = peer.system in ("hybridindex", "disk", "faiss")
        count = data.few if peer.is_slow else data.count
        options = {
            "count": count,
            "nlist": data.nlist,
            "digest": data.digest,
            "cache": str(data.cache),
            "durable": peer.durable,
        }
        self.peer, self.count = peer, count
        script = Path(__file__).with_name("update_side.py")
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
        interpreter = sys.executable if ours or python is None else str(python)
        self._process = subprocess.Popen(
            [interpreter, script, peer.system, data.folder, scratch, json.dumps(options)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            said = self._read()
            if "missing" in said:
                raise SideError(f"{peer.name} is not installed: {said['missing']}")
        except BaseException:
            self.close()
            raise
        self.durability, self.what = str(said["durability"]), str(said["what"])
        self._process.send_signal(signal.SIGSTOP)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SideError(f"{self.peer.name} ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def turn(self, do: str, **asked: Any) -> dict[str, Any]:
        """As ``update_side.Turns`` answers it.

        Raises:
            SideError: it failed.
        """
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps({"do": do, **asked}) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        self._process.send_signal(signal.SIGSTOP)
        if "error" in answer:
            raise SideError(f"{self.peer.name}: {answer['error']}")
        return answer

    def close(self) -> None:
        """Ends it; a side that does not end is killed."""
        process = self._process
        process.send_signal(signal.SIGCONT)
        try:
            # Closes its standard input, and reads what is left.
            process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
