"""One system that rows are added to, in a process of its own: ``benchmarks.rivals.updating`` starts and asks it.

A script, run by any Python that has the system's package: it imports nothing of ``benchmarks``. Lines of JSON come in
and go out. Every system holds the same first rows, in an index that answers searches by lists or by a graph, and takes
the same rows after them.

Durable: the rows survive a power cut when the call returns. Who syncs by itself is left alone. For who does not, the
files that a call changed are synced behind it; where there is one file that is written as a whole, it is written and
synced.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

M, EF_CONSTRUCTION = 16, 100
#: Rows that a load hands over at once.
_LOAD = 5_000


class System(ABC):
    """From one thread, but for what :meth:`client` makes."""

    #: How rows become durable.
    durability = "syncs by itself"

    def __init__(self, data: Path, folder: Path, options: dict[str, Any]) -> None:
        self.data, self.folder, self.options = data, folder, options
        self.vectors = np.load(data / "vectors.npy", mmap_mode="r")
        self.count: int = options["count"]
        #: Whether calls shall be durable.
        self.durable: bool = options.get("durable", True)

    def rows(self, start: int, end: int) -> Any:
        """(end - start, d) float32, those of these ids."""
        order = np.arange(start, end) % len(self.vectors)
        return np.ascontiguousarray(self.vectors[order])

    def prepare(self) -> None:  # noqa: B027 - some need nothing
        """Writes what :meth:`open` opens, in ``folder``."""

    @abstractmethod
    def open(self) -> None:
        """Opens what :meth:`prepare` wrote."""

    @abstractmethod
    def add(self, start: int, end: int) -> None:
        """The rows of these ids."""

    def client(self) -> Callable[[int], None]:
        """What a thread of its own adds one row with, by its id."""
        return lambda row: self.add(row, row + 1)

    def maintain(self) -> None:  # noqa: B027 - some have none
        """What keeps searches as fast as they were, after a row."""

    def pending(self) -> int:
        """Rows that no list and no graph has yet."""
        return 0

    def close(self) -> None:  # noqa: B027 - some need nothing
        pass


def faiss_ivf(system: System) -> Any:
    """Rows in the lists that all IVF systems share."""
    import faiss

    data, count = system.data, system.count
    centres = np.load(data / "centres.npy")
    lists = np.ascontiguousarray(np.load(data / "lists.npy", mmap_mode="r")[:count])
    dim = centres.shape[1]
    quantizer = faiss.IndexFlatIP(dim)
    quantizer.add(centres)
    ivf: Any
    if system.options.get("codec", "flat") == "sq8":
        ivf = faiss.IndexIVFScalarQuantizer(
            quantizer, dim, len(centres), faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT
        )
    else:
        ivf = faiss.IndexIVFFlat(quantizer, dim, len(centres), faiss.METRIC_INNER_PRODUCT)
    ivf.by_residual = False
    ivf.train(np.ascontiguousarray(system.vectors[: count : -(-count // 65_536)]))
    rows = system.rows(0, count)
    ivf.add_core(count, faiss.swig_ptr(rows), None, faiss.swig_ptr(lists))
    return ivf


class Ours(System):
    """hybridindex."""

    def prepare(self) -> None:
        import faiss

        import hybridindex as hx

        file = self.folder / "idx.faiss"
        faiss.write_index(faiss_ivf(self), str(file))
        hx.from_faiss(file, self.folder / "idx").close()
        file.unlink()

    def open(self) -> None:
        import hybridindex as hx

        self.index = hx.open(self.folder / "idx", write=True, durability="synced" if self.durable else "written")

    def add(self, start: int, end: int) -> None:
        self.index.add(self.rows(start, end), np.arange(start, end))

    def maintain(self) -> None:
        self.index.ivf.live.rewrite()

    def pending(self) -> int:
        return int(self.index.n_added)

    def close(self) -> None:
        self.index.close()


class FaissIVF(System):
    """faiss, IVF,Flat; its file is written as a whole."""

    durability = "the whole file is written and synced"

    def open(self) -> None:
        self.index = faiss_ivf(self)
        self.lock = threading.Lock()

    def add(self, start: int, end: int) -> None:
        with self.lock:
            self._add(start, end)
            if self.durable:
                beside = self.folder / "index.new"
                self._write(beside)
                _sync_file(beside)
                beside.replace(self.folder / "index")
                _sync_file(self.folder)

    def _add(self, start: int, end: int) -> None:
        self.index.add_with_ids(self.rows(start, end), np.arange(start, end))

    def _write(self, file: Path) -> None:
        import faiss

        faiss.write_index(self.index, str(file))


class Hnswlib(FaissIVF):
    """hnswlib; its file is written as a whole."""

    def prepare(self) -> None:
        import hnswlib

        graph = hnswlib.Index(space="ip", dim=self.vectors.shape[1])
        graph.init_index(max_elements=self.count, M=M, ef_construction=EF_CONSTRUCTION, random_seed=0)
        for at in range(0, self.count, _LOAD):
            end = min(at + _LOAD, self.count)
            graph.add_items(self.rows(at, end), np.arange(at, end))
        graph.save_index(str(self.folder / "graph"))

    def open(self) -> None:
        import hnswlib

        self.index = hnswlib.Index(space="ip", dim=self.vectors.shape[1])
        self.index.load_index(str(self.folder / "graph"), max_elements=2 * self.count + (1 << 20))
        self.lock = threading.Lock()

    def _add(self, start: int, end: int) -> None:
        self.index.add_items(self.rows(start, end), np.arange(start, end))

    def _write(self, file: Path) -> None:
        self.index.save_index(str(file))


class Synced(System):
    """A library that leaves its files to the operating system."""

    durability = "the files that a call changed are synced behind it"

    def __init__(self, data: Path, folder: Path, options: dict[str, Any]) -> None:
        super().__init__(data, folder, options)
        self._synced: dict[str, tuple[int, int]] = {}
        self._syncing = threading.Lock()

    def sync(self) -> None:
        """What changed since the last time."""
        if not self.durable:
            return
        with self._syncing:
            folders = set()
            for place, _, names in os.walk(self.folder):
                for name in names:
                    path = os.path.join(place, name)
                    with contextlib.suppress(FileNotFoundError):
                        found = os.stat(path)
                        state = (found.st_size, found.st_mtime_ns)
                        if self._synced.get(path) != state:
                            _sync_file(Path(path))
                            self._synced[path] = state
                            folders.add(place)
            for place in folders:
                with contextlib.suppress(FileNotFoundError):
                    _sync_file(Path(place))


class Lance(Synced):
    """LanceDB, IVF_FLAT; added rows are in no list before optimize(), and are searched one by one."""

    def _table_of(self, start: int, end: int) -> Any:
        import pyarrow as pa

        rows = pa.FixedSizeListArray.from_arrays(pa.array(self.rows(start, end).ravel()), self.vectors.shape[1])
        return pa.table({"id": np.arange(start, end), "vector": rows})

    def prepare(self) -> None:
        import lancedb
        from lancedb.index import IvfFlat

        table: Any = lancedb.connect(str(self.folder)).create_table("vectors", self._table_of(0, self.count))
        n = len(np.load(self.data / "centres.npy", mmap_mode="r"))
        table.create_index("vector", config=IvfFlat(distance_type="dot", num_partitions=n))

    def open(self) -> None:
        import lancedb

        self.table: Any = lancedb.connect(str(self.folder)).open_table("vectors")
        self._indexed = self._rows = self.table.count_rows()
        self.sync()

    def add(self, start: int, end: int) -> None:
        self.table.add(self._table_of(start, end))
        self.sync()

    def client(self) -> Callable[[int], None]:
        import lancedb

        table: Any = lancedb.connect(str(self.folder)).open_table("vectors")

        def add(row: int) -> None:
            table.add(self._table_of(row, row + 1))
            self.sync()

        return add

    def maintain(self) -> None:
        self.table.optimize()
        self._indexed = self.table.count_rows()
        self.sync()

    def pending(self) -> int:
        return int(self.table.count_rows() - self._indexed)


class Chroma(System):
    """Chroma, HNSW, with SQLite's log."""

    def prepare(self) -> None:
        self.open()
        for at in range(0, self.count, _LOAD):
            self.add(at, min(at + _LOAD, self.count))

    def open(self) -> None:
        chromadb, config = import_module("chromadb"), import_module("chromadb.config")
        settings = config.Settings(anonymized_telemetry=False)
        client = chromadb.PersistentClient(str(self.folder), settings=settings)
        hnsw: Any = {"hnsw": {"space": "ip", "max_neighbors": M, "ef_construction": EF_CONSTRUCTION}}
        self.collection: Any = client.get_or_create_collection("vectors", embedding_function=None, configuration=hnsw)

    def add(self, start: int, end: int) -> None:
        self.collection.add(ids=[str(row) for row in range(start, end)], embeddings=self.rows(start, end))


class Milvus(Synced):
    """Milvus Lite, IVF_FLAT."""

    _milvus: Any = None

    def prepare(self) -> None:
        pymilvus = import_module("pymilvus")
        client = pymilvus.MilvusClient(str(self.folder / "milvus.db"))
        schema = client.create_schema(auto_id=False)
        schema.add_field("id", pymilvus.DataType.INT64, is_primary=True)
        schema.add_field("v", pymilvus.DataType.FLOAT_VECTOR, dim=self.vectors.shape[1])
        index = client.prepare_index_params()
        n = len(np.load(self.data / "centres.npy", mmap_mode="r"))
        index.add_index("v", index_type="IVF_FLAT", metric_type="IP", params={"nlist": n})
        client.create_collection("vectors", schema=schema, index_params=index)
        self._milvus = client
        for at in range(0, self.count, _LOAD):
            self._insert(at, min(at + _LOAD, self.count))
        client.flush("vectors")
        client.close()

    def open(self) -> None:
        self._milvus = import_module("pymilvus").MilvusClient(str(self.folder / "milvus.db"))
        self._milvus.load_collection("vectors")
        self.sync()

    def _insert(self, start: int, end: int) -> None:
        rows = zip(range(start, end), self.rows(start, end), strict=True)
        self._milvus.insert("vectors", [{"id": row, "v": vector} for row, vector in rows])

    def add(self, start: int, end: int) -> None:
        self._insert(start, end)
        self.sync()

    def close(self) -> None:
        self._milvus.close()


class Pgvector(System):
    """PostgreSQL with pgvector, IVFFlat, fsync and synchronous_commit on; many rows come by COPY."""

    def _start(self) -> None:
        self.server = import_module("pgserver").get_server(str(self.folder / "pg"))
        self.connection = self._connect()

    def _connect(self) -> Any:
        import psycopg

        connection: Any = psycopg.connect(self.server.get_uri(), autocommit=True)
        connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        import_module("pgvector.psycopg").register_vector(connection)
        return connection

    def prepare(self) -> None:
        self._start()
        run, n = self.connection.execute, len(np.load(self.data / "centres.npy", mmap_mode="r"))
        run(f"CREATE TABLE rows (id bigint PRIMARY KEY, v vector({self.vectors.shape[1]}))")
        self.add(0, self.count)
        run("SET maintenance_work_mem = '4GB'")
        run(f"CREATE INDEX ON rows USING ivfflat (v vector_ip_ops) WITH (lists = {n})")
        run("CHECKPOINT")
        self.close()

    def open(self) -> None:
        self._start()
        for setting in ("fsync", "synchronous_commit"):
            assert self.connection.execute(f"SHOW {setting}").fetchone()[0] == "on"

    def add(self, start: int, end: int) -> None:
        vectors = self.rows(start, end)
        with self.connection.cursor().copy("COPY rows (id, v) FROM STDIN WITH (FORMAT BINARY)") as copy:
            copy.set_types(["int8", "vector"])
            for row in range(start, end):
                copy.write_row((row, vectors[row - start]))

    def client(self) -> Callable[[int], None]:
        connection = self._connect()
        return lambda row: connection.execute("INSERT INTO rows VALUES (%s, %s)", (row, self.rows(row, row + 1)[0]))

    def close(self) -> None:
        self.connection.close()
        self.server.cleanup()


class Disk(System):
    """No index: the same bytes, written behind a file and synced. Nothing that is durable is faster."""

    durability = "write and fsync of the vectors alone"

    def open(self) -> None:
        self.file = os.open(self.folder / "bytes", os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self.lock = threading.Lock()

    def add(self, start: int, end: int) -> None:
        with self.lock:
            os.write(self.file, self.rows(start, end).tobytes())
            if self.durable:
                os.fsync(self.file)

    def close(self) -> None:
        os.close(self.file)


SYSTEMS: dict[str, type[System]] = {
    "hybridindex": Ours,
    "faiss": FaissIVF,
    "hnswlib": Hnswlib,
    "lancedb": Lance,
    "chromadb": Chroma,
    "milvus": Milvus,
    "pgvector": Pgvector,
    "disk": Disk,
}


def _sync_file(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def written() -> dict[str, int]:
    """Bytes that this process gave to write calls, and those that went to the block device for it."""
    said = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {"given": int(said["wchar"]), "device": int(said["write_bytes"])}


class Turns:
    """What is asked of one system; ids go on from turn to turn."""

    def __init__(self, system: System) -> None:
        self.system, self.next = system, system.count

    def add(self, *, batch: int, seconds: float, most: int) -> dict[str, Any]:
        """Batches, for so many seconds or rows."""
        taken: list[float] = []
        while sum(taken) < seconds and len(taken) * batch < most:
            began = time.perf_counter()
            self.system.add(self.next, self.next + batch)
            taken.append(time.perf_counter() - began)
            self.next += batch
        return {"seconds": taken, "rows": len(taken) * batch, "pending": self.system.pending()}

    def single(self, *, threads: int, seconds: float) -> dict[str, Any]:
        """Rows one by one from threads, each of which waits for its own."""
        adders = [self.system.client() for _ in range(threads)]
        taken: list[list[float]] = [[] for _ in range(threads)]
        errors: list[str] = []
        start, gate = self.next, threading.Barrier(threads + 1)
        end = [0.0]

        def work(number: int) -> None:
            row = start + number
            gate.wait()
            try:
                while time.perf_counter() < end[0]:
                    began = time.perf_counter()
                    adders[number](row)
                    taken[number].append(time.perf_counter() - began)
                    row += threads
            except Exception as error:  # noqa: BLE001 - told
                errors.append(repr(error)[:300])

        workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
        for worker in workers:
            worker.start()
        began = time.perf_counter()
        end[0] = began + seconds
        gate.wait()
        for worker in workers:
            worker.join()
        wall = time.perf_counter() - began
        self.next = start + threads * (1 + max(map(len, taken)))
        every = np.concatenate([np.array(each) for each in taken])
        return {
            "rows": len(every),
            "wall": wall,
            "p50_ms": 1e3 * float(np.median(every)) if len(every) else None,
            "p99_ms": 1e3 * float(np.percentile(every, 99)) if len(every) else None,
            "errors": errors,
        }

    def one(self, *, repeats: int) -> dict[str, Any]:
        """One row and maintenance, several times."""
        ms, given, device = [], [], []
        for _ in range(repeats):
            before, began = written(), time.perf_counter()
            self.system.add(self.next, self.next + 1)
            self.system.maintain()
            ms.append(1e3 * (time.perf_counter() - began))
            after = written()
            self.next += 1
            given.append(after["given"] - before["given"])
            device.append(after["device"] - before["device"])
        return {"ms": ms, "given": given, "device": device}


def _opened(name: str, data: Path, folder: Path, options: dict[str, Any]) -> System:
    """What was prepared once, as a copy."""
    kept = Path(options["cache"]) / f"{name}-{options['count']}-{options['nlist']}-{options['digest']}"
    if not kept.exists():
        part = kept.with_name(kept.name + f".{os.getpid()}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        maker = SYSTEMS[name](data, part, options)
        maker.prepare()
        del maker
        part.replace(kept)
    here = folder / name
    shutil.copytree(kept, here, symlinks=True)
    if (here / "pg").exists():
        _keep_owner(kept / "pg", here / "pg")
    system = SYSTEMS[name](data, here, options)
    system.open()
    return system


def _keep_owner(old: Path, new: Path) -> None:
    """PostgreSQL refuses files of others."""
    for path in [old, *old.rglob("*")]:
        found = path.lstat()
        os.chown(new / path.relative_to(old), found.st_uid, found.st_gid, follow_symlinks=False)


def main(name: str, data: str, scratch: str, options: str) -> None:
    os.environ.setdefault("LANCE_LOG", "error")
    # Libraries print to it.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        # PostgreSQL runs as another user.
        os.chmod(folder, 0o755)
        try:
            system = _opened(name, Path(data), Path(folder), json.loads(options))
        except ImportError as error:
            tell({"missing": str(error)})
            return
        turns = Turns(system)
        tell({"durability": system.durability, "what": (type(system).__doc__ or "").strip().rstrip(".")})
        for line in sys.stdin:
            asked = json.loads(line)
            try:
                answer = getattr(turns, asked.pop("do"))(**asked)
            except Exception as error:  # noqa: BLE001 - told
                answer = {"error": f"{type(error).__name__}: {error}"[:500]}
            tell(answer)
        system.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
