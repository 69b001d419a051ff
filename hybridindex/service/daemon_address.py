"""A daemon's sockets, and its address file beside the index. One daemon per index.

A lock that ends with the process guards the address file, so a killed daemon does not block the next one.
"""

from __future__ import annotations

import json
import os
import socket
import stat
from dataclasses import asdict
from pathlib import Path

from filelock import Timeout

from hybridindex.errors import ServiceError
from hybridindex.index.storage.standing import ADDRESS_FILE, ADDRESS_LOCK, RunningDaemon, find_daemon
from hybridindex.processes import lock_file

__all__ = ["DaemonAddress", "RunningDaemon", "bind_tcp", "bind_unix", "find_daemon"]


class DaemonAddress:
    """The lock and address file of one served index, held while the process lives."""

    def __init__(self, folder: Path) -> None:
        """Raises ServiceError: another daemon serves the index, or the folder cannot be written."""
        self._file = folder / ADDRESS_FILE
        # find_daemon holds the lock for a moment.
        self._lock = lock_file(folder / ADDRESS_LOCK, timeout_s=1)
        try:
            self._lock.acquire()
        except Timeout:
            other = find_daemon(folder)
            who = f" (pid {other.pid})" if other is not None else ""
            raise ServiceError(f"another daemon{who} serves {folder}; stop it first (hybridindex drain)") from None
        except OSError as error:
            raise ServiceError(
                f"{folder} cannot be written ({error.strerror}); the daemon keeps its address there"
            ) from error
        # A killed daemon may have left its addresses.
        self._file.unlink(missing_ok=True)

    def announce(self, urls: tuple[str, ...], generation: int | None = None, *, index: str | None = None) -> None:
        """Writes the address file, whole or not at all; again when another generation is served.

        ``index``: its name in the daemon.
        """
        beside = self._file.with_name(f".{ADDRESS_FILE}.new")
        served = RunningDaemon(pid=os.getpid(), urls=urls, generation=generation, index=index)
        beside.write_text(json.dumps(asdict(served)) + "\n")
        beside.replace(self._file)

    def leave(self) -> None:
        """Removes the address file and the lock. Calling it twice is harmless."""
        if self._lock.is_locked:
            self._file.unlink(missing_ok=True)
            self._lock.release()


def bind_tcp(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        ServiceError: the address is taken, or none of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off (it delays answers by 40 ms) only where the protocol is named.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(2048)
    except OSError as error:
        bound.close()
        raise ServiceError(f"host {host} port {port} cannot be listened on ({error.strerror or error})") from error
    bound.setblocking(False)
    return bound


def bind_unix(path: Path) -> socket.socket:
    """A listening socket that only this user can open. Replaces the socket of a dead daemon.

    Raises:
        ServiceError: another process listens there, or the path is no socket.
    """
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket() or path.exists():
            _remove_stale(path)
        # Made with its mode: others can connect at no moment.
        before = os.umask(0o177)
        try:
            bound.bind(str(path))
        finally:
            os.umask(before)
        bound.listen(2048)
    except OSError as error:
        bound.close()
        raise ServiceError(f"uds {path} cannot be listened on ({error.strerror or error})") from error
    except ServiceError:
        bound.close()
        raise
    bound.setblocking(False)
    return bound


def _remove_stale(path: Path) -> None:
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise ServiceError(f"uds {path} is there and no socket; remove it or choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:
            raise ServiceError(f"uds {path} cannot be examined ({error.strerror or error})") from error
    raise ServiceError(f"uds {path} is listened on by another process; stop it or choose another path")
