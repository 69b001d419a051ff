"""Machines with a network of their own, as network namespaces on this one: one bridge, and an address for each.

Only inside a process that ``unshare --user --map-root-user --net`` started: there it is root, and changes no network
but its own. All of it ends with the process.
"""

from __future__ import annotations

import ctypes
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["Machine", "allowed", "begin"]

T = TypeVar("T")

_ALONE = ("unshare", "--user", "--map-root-user", "--net")
_CLONE_NEWNET = 0x40000000


def allowed() -> bool:
    """Whether this kernel and its settings let us."""
    words = "ip link set lo up && ip link add a0 type veth peer name b0 && ip link add br0 type bridge"
    try:
        return (
            subprocess.run([*_ALONE, "sh", "-c", words], capture_output=True, timeout=20, check=False).returncode == 0
        )
    except OSError:
        return False


def begin(*words: str) -> list[str]:
    """A command that runs ``words`` in a network of its own."""
    return [*_ALONE, *words]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def make_bridge() -> None:
    """The network that joins the machines; this process is at 10.77.0.1."""
    _ip("link", "set", "lo", "up")
    _ip("link", "add", "br0", "type", "bridge")
    _ip("addr", "add", "10.77.0.1/24", "dev", "br0")
    _ip("link", "set", "br0", "up")


class Machine:
    """A namespace with one interface, ``eth0``, and one thread; what that starts, threads and processes, is in it."""

    def __init__(self, number: int) -> None:
        self.host, self._link = f"10.77.0.{10 + number}", f"m{number}"
        self._work: list[tuple[Future[object], Callable[[], object]]] = []
        self._more = threading.Semaphore(0)
        born: Future[int] = Future()
        threading.Thread(target=self._live, args=(born,), daemon=True).start()
        thread = born.result()
        _ip("link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", str(thread))
        _ip("link", "set", self._link, "master", "br0", "up")
        for words in (("link", "set", "lo", "up"), ("addr", "add", f"{self.host}/24", "dev", "eth0")):
            self.do(_ip, *words)
        self.do(_ip, "link", "set", "eth0", "up")

    def _live(self, born: Future[int]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_CLONE_NEWNET):
            born.set_exception(OSError(ctypes.get_errno(), "no network of its own"))
            return
        born.set_result(threading.get_native_id())
        while True:
            self._more.acquire()
            future, work = self._work.pop(0)
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - raised by who asked
                future.set_exception(error)

    def do(self, work: Callable[..., T], *args: object) -> T:
        """``work(*args)`` on this machine."""
        future: Future[object] = Future()
        self._work.append((future, lambda: work(*args)))
        self._more.release()
        return future.result()  # type: ignore[return-value]

    def cut(self) -> None:
        """From everything, as by a pulled cable: nothing is refused, nothing arrives."""
        _ip("link", "set", self._link, "nomaster")

    def join(self) -> None:
        _ip("link", "set", self._link, "master", "br0")

    def cut_from(self, other: Machine) -> None:
        """What it sends there goes to nobody."""
        self.do(_ip, "neigh", "replace", other.host, "lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent")

    def join_with(self, other: Machine) -> None:
        self.do(_ip, "neigh", "del", other.host, "dev", "eth0")
