"""Stores to test on: a fresh SQLite file, and a schema in a throw-away PostgreSQL where a server is installed."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybridindex
from hybridindex.store import ControlStore
from hybridindex.types import (
    AccessSample,
    HardwareInfo,
    Profile,
    RecallPoint,
    StageSample,
    TransferSample,
)


def make_profile(*, seed: int = 0, nlist: int = 16, nprobe: int = 3, **changes: Any) -> Profile:
    rng = np.random.default_rng(seed)
    hardware = HardwareInfo(
        fingerprint="hw-a",
        cpu_model="Some CPU",
        cpu_flags=("avx2", "fma"),
        cores=2,
        memory_bytes=24 << 30,
        devices=("cuda:0 Some GPU 141 GB",),
        versions={"numpy": np.__version__},
    )
    values: dict[str, Any] = {
        "created_at": "2030-01-31T12:00:00+00:00",
        "index_fingerprint": "ix-a",
        "hardware": hardware,
        "metric": "ip",
        "codec": "flat",
        "dim": 8,
        "count": 1000,
        "nlist": nlist,
        "nprobe": nprobe,
        "k": 10,
        "scanner": "faiss",
        "threads": 2,
        "omp_wait_policy": "PASSIVE",
        "load_average": 0.25,
        "seed": seed,
        "list_bytes": rng.integers(0, 1 << 40, nlist),
        "list_sizes": rng.integers(0, 1000, nlist),
        "access": AccessSample(
            fit_probes=rng.integers(-1, nlist, (7, nprobe), dtype=np.int32),
            held_probes=rng.integers(-1, nlist, (5, nprobe), dtype=np.int32),
            list_accesses=rng.random(nlist),
        ),
        "stages": (
            StageSample(stage="coarse", batch=4, seconds=0.1 + seed),
            StageSample(
                stage="host_scan",
                batch=4,
                seconds=1 / 3,
                probes=12,
                work_bytes=1 << 41,
                max_work_bytes=5,
                unique_bytes=6,
                coverage=0.5,
                min_hit_rate=0.25,
                device="cpu (stand-in)",
            ),
        ),
        "transfers": (TransferSample(device="cuda:0", pinned=True, nbytes=1 << 33, seconds=1e-9),),
        "recall": (RecallPoint(nprobe=3, recall=0.9, ndcg=0.8, k=10, n_queries=50),),
        "notes": {"source": "a test", "load": [0.1, 0.2]},
    }
    return Profile(**{**values, **changes})


@pytest.fixture
def profile_of() -> Callable[..., Profile]:
    return make_profile


@pytest.fixture
def run_python() -> Callable[..., subprocess.Popen[str]]:
    """Start ``python -c script args``, able to import the package under test."""

    def start(script: str, *args: object) -> subprocess.Popen[str]:
        paths = [str(Path(hybridindex.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
        command = [sys.executable, "-W", "error", "-c", script, *map(str, args)]
        return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    return start


class Clock:
    """One second later at every look."""

    def __init__(self) -> None:
        self.now = datetime(2030, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        self.now += timedelta(seconds=1)
        return self.now


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new SQLite store. Copies of it cost less than making one."""
    path = tmp_path_factory.mktemp("empty") / "control.sqlite"
    ControlStore.open(path).close()
    return path


@pytest.fixture
def store(store_url: str, empty_store: Path) -> Iterator[ControlStore]:
    if "://" not in store_url:
        shutil.copy(empty_store, store_url)
    with ControlStore.open(store_url, busy_timeout_s=5, clock=Clock()) as opened:
        yield opened
        opened.check_invariants()


@pytest.fixture
def sqlite_path(tmp_path: Path) -> Path:
    return tmp_path / "control.sqlite"


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest) -> str:
    """An address where no store is yet; each test runs on both back ends."""
    name = "sqlite_path" if request.param == "sqlite" else "postgresql_url"
    return str(request.getfixturevalue(name))


@pytest.fixture
def postgresql_url(postgresql_server: str) -> str:
    import psycopg

    with psycopg.connect(postgresql_server, autocommit=True) as connection:
        connection.execute("DROP SCHEMA IF EXISTS hybridindex CASCADE")
    return postgresql_server


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[str]:
    """A cluster in a temporary directory, reachable through a Unix socket there and nowhere else."""
    bin_dir = _postgresql_bin()
    if bin_dir is None:
        pytest.skip("no PostgreSQL server here (initdb neither in PATH nor in /usr/lib/postgresql/*/bin)")
    # PostgreSQL refuses to run as root.
    user: dict[str, Any] = {}
    if os.geteuid() == 0:
        owner = _unprivileged_user()
        if owner is None:
            pytest.skip("PostgreSQL does not run as root, and there is neither a user postgres nor nobody")
        user = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
    root = Path(tempfile.mkdtemp(prefix="hx-pg-", dir="/tmp"))  # short: socket paths hold 107 bytes
    try:
        if user:
            os.chown(root, user["user"], user["group"])

        def run(*command: str) -> None:
            with open(root / "setup.log", "ab") as log:
                subprocess.run(command, cwd=root, check=True, stdout=log, stderr=log, timeout=300, **user)

        data = str(root / "data")
        try:
            run(str(bin_dir / "initdb"), "-D", data, "-U", "hx", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
            options = f"-k {root} -c listen_addresses='' -c fsync=off -c shared_buffers=16MB -c max_connections=40"
            run(str(bin_dir / "pg_ctl"), "-D", data, "-o", options, "-l", str(root / "server.log"), "-w", "start")
        except (OSError, subprocess.SubprocessError) as error:  # one that is there has to start
            pytest.fail(f"PostgreSQL could not be started: {error}\n{_read(root / 'setup.log')}")
        try:
            yield f"postgresql://hx@/postgres?host={root}"
        finally:
            run(str(bin_dir / "pg_ctl"), "-D", data, "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _postgresql_bin() -> Path | None:
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: p.parent.name.zfill(4))
    for candidate in reversed(versions):
        if (candidate / "initdb").exists():
            return candidate
    found = shutil.which("initdb")
    return Path(found).resolve().parent if found else None


def _unprivileged_user() -> pwd.struct_passwd | None:
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    return None


def _read(path: Path) -> str:
    return path.read_text(errors="replace")[-2000:] if path.exists() else ""
