"""A daemon's sockets, and its address file beside the index. One daemon per index.

A lock that ends with the process guards the address file, so a killed daemon does not block the next one.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import stat
from dataclasses import asdict
from pathlib import Path

from filelock import Timeout

from hybridindex import filesystem
from hybridindex.errors import FileError, ServiceError
from hybridindex.index.storage.standing import ADDRESS_FILE, ADDRESS_LOCK, RunningDaemon, find_daemon
from hybridindex.processes import lock_file

__all__ = ["DaemonAddress", "RunningDaemon", "bind_tcp", "bind_unix", "find_daemon"]


_log = logging.getLogger(__name__)

_NO_ROOM = (errno.EROFS, errno.ENOSPC, errno.EDQUOT)


class DaemonAddress:
    """The lock and address file of one served index, held while the process lives.

    Searches need neither: where the file system is read-only or full, that is logged, and clients need the URL.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ServiceError: another daemon serves the index, or the folder cannot be written for another reason."""
        self._file = folder / ADDRESS_FILE
        # find_daemon holds the lock for a moment.
        self._lock = lock_file(folder / ADDRESS_LOCK, timeout_s=1)
        try:
            self._lock.acquire()
        except Timeout:
            other = find_daemon(folder)
            who = f" (pid {other.pid})" if other is not None else ""
            raise ServiceError(f"another daemon{who} serves {folder}; stop it first (hybridindex drain)") from None
        except FileError as error:
            if error.errno not in _NO_ROOM:
                raise ServiceError(f"{error}; the daemon keeps its address there") from error
            _log.error(
                "%s; the daemon keeps its address there: commands need --url, and nothing keeps a second daemon away",
                error,
            )
            return
        # A killed daemon may have left its addresses.
        filesystem.discard(self._file)

    def announce(self, urls: tuple[str, ...], generation: int | None = None, *, index: str | None = None) -> None:
        """Writes the address file, whole or not at all; again when another generation or router serves.

        ``index``: its name in the daemon.
        """
        served = RunningDaemon(pid=os.getpid(), urls=urls, generation=generation, index=index)
        try:
            filesystem.replace_file(self._file, json.dumps(asdict(served)) + "\n")
        except FileError as error:
            _log.error("%s: commands need --url", error)

    def leave(self) -> None:
        """Removes the address file and the lock. Calling it twice is harmless."""
        if self._lock.is_locked:
            filesystem.discard(self._file)
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
        if filesystem.exists(path):
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
    if not stat.S_ISSOCK(filesystem.lstat(path).st_mode):
        raise ServiceError(f"uds {path} exists and is not a socket; remove it or choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            filesystem.unlink(path)
            return
        except OSError as error:
            raise ServiceError(f"uds {path} cannot be examined ({error.strerror or error})") from error
    raise ServiceError(f"uds {path} is listened on by another process; stop it or choose another path")
