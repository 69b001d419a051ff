"""What is carried over a fork says so at once; the parent does not notice. Locks are for those who may write."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
from filelock import FileLock, Timeout

from hybridindex.errors import BuildError, FileError
from hybridindex.index.storage.generation import writers_lock
from hybridindex.processes import KeptLock, lock_file
from hybridindex.service.auth import KeyFile
from hybridindex.service.daemon_address import DaemonAddress, find_daemon
from hybridindex.store import ControlStore
from tests.clustered import small_index

#: Runs in a process of its own, so that a child that hangs is found by time, and torch and OpenMP are its own.
_HEAD = """
import os, sys, threading
from pathlib import Path
import numpy as np
import hybridindex as hx
from hybridindex.errors import ForkedError
from hybridindex.router import Router
from tests.clustered import NLIST, clustered, hand_made_plan

path = Path(sys.argv[1])
index = hx.open(path)
queries = clustered(40, seed=3)

def in_child(check):
    child = os.fork()
    if child == 0:
        try:
            check()
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(3)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

def refused(call):
    try:
        call()
    except ForkedError as error:
        assert f"process {parent}" in str(error) and "after the fork" in str(error), error
    else:
        raise AssertionError("it was not refused")

parent = os.getpid()
"""

_ROUTER = """
plan = hand_made_plan(index.ivf, np.arange(NLIST) % 2 - 1)
router = Router(index.ivf, plan=plan, devices=["cpu"])
before = router.search(queries, 10)
session = router.session()
session.lookahead(queries[:2]).result()
search, future, tier = router.search, router.submit(queries), router.devices[0]
# As if the fork came while other threads hold locks.
router._served.engine._close_lock.acquire()
router._served.engine._turn.acquire()

def check():
    import asyncio
    for call in (
        lambda: router.search(queries, 10), lambda: search(queries), lambda: router.submit(queries),
        lambda: router.session(),
        lambda: router.stats, lambda: session.search(queries), lambda: session.lookahead(queries), lambda: router.plan,
        lambda: asyncio.run(router.asearch(queries)), lambda: router.apply_plan(plan), lambda: router.__enter__(),
        lambda: setattr(router, "on_batch", []), lambda: tier.load([0], None), lambda: tier.used_bytes,
    ):
        refused(call)
    assert isinstance(router, Router) and str(parent) in repr(router)
    session.close()
    router.settle()
    tier.close()
    router.close()
    router.close()
    with hx.open(path) as again, again.router(devices=["cpu"], device_budget_bytes=16 << 20) as mine:
        assert np.array_equal(mine.search(queries, 10).ids, before.ids)
        # A child of the child.
        in_grandchild = os.fork()
        if in_grandchild == 0:
            try:
                mine.search(queries)
            except ForkedError as error:
                os._exit(0 if str(os.getppid()) in str(error) else 4)
            os._exit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(in_grandchild, 0)[1]) == 0

threading.Timer(0, lambda: None).start()
in_child(check)
router._served.engine._close_lock.release()
router._served.engine._turn.release()
future.result(300)
assert np.array_equal(router.search(queries, 10).ids, before.ids)
assert session.search(queries, 10).ids.shape == (40, 10)
router.check_invariants()
session.close()
router.close()
index.close()
"""

_WITH = """
with index.router() as router, router.session() as session:
    before = router.search(queries, 10)
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert np.array_equal(router.search(queries, 10).ids, before.ids)
if child:
    index.close()
    sys.exit(status)
# The child leaves the block as it ends, as does whoever forgot that it is one, and runs what is registered for its end.
"""

_SERVICE = """
from hybridindex.refresh import Refresher
from hybridindex.refresh.planner_process import PlanningProcess
from hybridindex.service.config import ServiceConfig
from hybridindex.service.core import Service

service = Service.open(path, ServiceConfig(plan="none"))
store = index.store()
planning = PlanningProcess(index.ivf, timeout_s=300, nice=0)
router = Router(index.ivf, plan=hand_made_plan(index.ivf, np.zeros(NLIST)), devices=["cpu"])
refresher = Refresher.__new__(Refresher)  # a whole one needs a measured plan
store._idle.acquire()

def check():
    for call in (
        lambda: service.router, lambda: service.admission, lambda: planning.prepare(), lambda: planning.pid,
        lambda: refresher.observe(queries, 0.1, [0.5]),
        lambda: refresher.status(), lambda: store.list_plans(), lambda: store.check_writable(),
    ):
        refused(call)
    for one in (refresher, planning, service, store):
        one.close()
    with index.store() as mine:
        mine.check_writable()

in_child(check)
store._idle.release()
planning.prepare()
planning.close()
assert service.router.search(queries).ids.shape == (40, 10)
store.check_writable()
store.check_invariants()
store.close()
service.close()
router.close()
index.close()
"""

_CLIENT = """
import asyncio
from hybridindex.client import AsyncClient, Client, RetryPolicy
from hybridindex.client.async_client import AsyncRemoteSession
from hybridindex.client.client import RemoteSession
from hybridindex.errors import UnreachableError

once = RetryPolicy(attempts=1)
client, later = Client("unix:/nowhere", retry=once), AsyncClient("unix:/nowhere", retry=once)
session, session_later = RemoteSession(client, "s"), AsyncRemoteSession(later, "s")

def check():
    # One connection for two processes would mix up their answers.
    for call in (
        lambda: client.search(queries), lambda: session.search(queries), lambda: client.__enter__(),
        lambda: asyncio.run(later.search(queries)), lambda: asyncio.run(session_later.search(queries)),
    ):
        refused(call)
    client.close()
    session.close()
    asyncio.run(later.close())
    asyncio.run(session_later.close())

in_child(check)
try:
    client.search(queries)
except UnreachableError:
    client.close()
    index.close()
else:
    raise AssertionError("somebody answered")
"""


_INDEX = """
with Router(index.ivf) as router:
    before = router.search(queries, 10)
    # As a scrub does nearly always.
    index.ivf.integrity.looking.acquire()
    index.ivf.integrity._lock.acquire()

    def check():
        with Router(index.ivf) as mine:
            assert mine.scrub().ok
            assert np.array_equal(mine.search(queries, 10).ids, before.ids)

    in_child(check)
    index.ivf.integrity.looking.release()
    index.ivf.integrity._lock.release()
    assert router.scrub().ok
index.close()
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("idx") / "i"
    small_index(path).close()
    return path


@pytest.mark.parametrize(
    "script", [_ROUTER, _WITH, _SERVICE, _CLIENT, _INDEX], ids=["router", "with", "service", "client", "index"]
)
def test_a_fork_refuses_what_has_threads_and_does_not_hang(path, script):
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _HEAD + script, path],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def index_folder(tmp_path):
    """An index with every lock file that there is, made under a usual umask."""
    before = os.umask(0o022)
    try:
        path = tmp_path / "i"
        small_index(path, n=300).close()
        with ControlStore.open(path / "control.sqlite") as store:
            store.check_writable()
        DaemonAddress(path).leave()
        KeyFile(path / "keys.json").add("one", "admin")
        yield path
    finally:
        os.umask(before)


def locks(path: Path) -> dict[str, int]:
    names = {".lock", "daemon.lock", "control.sqlite", "control.sqlite.lock", "keys.json.lock"}
    assert names <= {entry.name for entry in path.iterdir()}
    return {name: stat.S_IMODE((path / name).stat().st_mode) for name in sorted(names)}


def test_nobody_else_can_open_what_is_locked(index_folder):
    assert set(locks(index_folder).values()) == {0o600}
    with ControlStore.open(index_folder / "control.sqlite") as store:
        store.check_writable()
        for name in ("control.sqlite-wal", "control.sqlite-shm"):
            assert stat.S_IMODE((index_folder / name).stat().st_mode) == 0o600


def test_files_of_an_older_version_are_closed_to_others_and_still_exclude(index_folder):
    for name in locks(index_folder):
        (index_folder / name).chmod(0o644)
    # An older version holds the lock.
    with (
        FileLock(index_folder / ".lock"),
        pytest.raises(BuildError, match="another process"),
        writers_lock(index_folder),
    ):
        pass
    with ControlStore.open(index_folder / "control.sqlite"), writers_lock(index_folder):
        DaemonAddress(index_folder).leave()
        KeyFile(index_folder / "keys.json").revoke("one")
        with pytest.raises(TimeoutError):
            FileLock(index_folder / ".lock", timeout=0).acquire()
    assert set(locks(index_folder).values()) == {0o600}


def test_a_group_that_may_write_the_folder_may_lock(index_folder):
    index_folder.chmod(0o775)
    with lock_file(index_folder / ".lock", timeout_s=0):
        pass
    assert locks(index_folder)[".lock"] == 0o660


def is_free(path):
    try:
        with lock_file(path, timeout_s=0):
            return True
    except Timeout:
        return False


def test_a_lock_that_is_kept_keeps_others_out_while_it_is_held(tmp_path):
    path = tmp_path / ".lock"
    lock = KeptLock(path, timeout_s=0.02)
    for _ in range(3):
        with lock:
            assert not is_free(path)
        assert is_free(path)
    with lock_file(path, timeout_s=0), pytest.raises(Timeout), lock:
        pass
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with lock:
        before = len(os.listdir("/dev/fd"))
    del lock
    assert len(os.listdir("/dev/fd")) == before - 1


def test_a_lock_that_is_kept_waits_for_its_turn(tmp_path):
    path, lock, took = tmp_path / ".lock", KeptLock(tmp_path / ".lock", timeout_s=30), threading.Event()

    def take():
        with lock:
            took.set()

    waiting = threading.Thread(target=take)
    with lock_file(path, timeout_s=0):
        waiting.start()
        assert not took.wait(0.05)
    waiting.join(30)
    assert took.is_set()


def test_a_lock_that_is_kept_is_that_of_the_name(tmp_path):
    """Somebody moved the folder, and put another one there."""
    path, lock = tmp_path / ".lock", KeptLock(tmp_path / ".lock", timeout_s=1)
    with lock:
        path.rename(tmp_path / "old")
    with lock:
        assert path.exists()
        assert not is_free(path)
    path.unlink()
    with lock:
        assert not is_free(path)


def test_a_lock_that_is_kept_is_given_back_where_taking_it_fails(tmp_path, monkeypatch):
    path, lock = tmp_path / ".lock", KeptLock(tmp_path / ".lock", timeout_s=1)
    with monkeypatch.context() as patch:
        patch.setattr(os.path, "samestat", Mock(side_effect=PermissionError(13, "no")))
        with pytest.raises(FileError, match="cannot"), lock:
            pass
    assert is_free(path)
    with lock:
        assert not is_free(path)


def test_a_lock_that_is_kept_follows_no_link(tmp_path):
    (tmp_path / "elsewhere").touch()
    (tmp_path / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileError), KeptLock(tmp_path / ".lock", timeout_s=0):
        pass


def test_a_group_may_take_a_lock_that_is_kept_whatever_the_mask_says(tmp_path):
    tmp_path.chmod(0o770)
    before = os.umask(0o077)
    try:
        with KeptLock(tmp_path / ".lock", timeout_s=0):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / ".lock").stat().st_mode) == 0o660


def test_a_child_that_lives_longer_holds_no_kept_lock(index_folder):
    """The writer dies while it holds the log; its child has let go of it."""
    script = (
        "import os, sys, time\n"
        "import numpy as np, hybridindex as hx\n"
        "with hx.open(sys.argv[1], write=True) as index:\n"
        "    row = np.zeros((1, index.dim), np.float32)\n"
        "    index.add(row)\n"
        "    store = index.ivf.live\n"
        "    with store._lock_of_log:\n"
        "        child = os.fork()\n"
        "        if child == 0:\n"
        "            os.close(0); os.close(1); os.close(2); time.sleep(60); os._exit(0)\n"
        "        print(child, flush=True)\n"
        "        os._exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, index_folder], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    try:
        assert is_free(index_folder / ".log.lock")
    finally:
        os.kill(int(done.stdout), signal.SIGKILL)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_cannot_block_a_build(index_folder, tmp_path):
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and len(folder.parts) > 2:
            folder.chmod(folder.stat().st_mode | 0o055)
    script = (
        "import fcntl, os, sys; os.setgid(65534); os.setuid(65534); open(sys.argv[1] + '/CURRENT')\n"
        "for name in sys.argv[2:]:\n"
        "    try: open(os.path.join(sys.argv[1], name), 'rb')\n"
        "    except PermissionError: continue\n"
        "    sys.exit('opened ' + name)"
    )
    done = subprocess.run([sys.executable, "-c", script, index_folder, *locks(index_folder)], capture_output=True)
    assert done.returncode == 0, done.stderr


def test_a_daemon_is_found_while_it_holds_its_lock(index_folder):
    address = DaemonAddress(index_folder)
    address.announce(("unix:/run/x",))
    found = find_daemon(index_folder)
    assert found is not None
    assert found.pid == os.getpid()
    address.leave()
    assert find_daemon(index_folder) is None
