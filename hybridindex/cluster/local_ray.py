"""Ray on this machine alone, for a cluster of several nodes here."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hybridindex import filesystem
from hybridindex.errors import CorruptIndexError, FileError, MissingFileError, ServiceError

__all__ = ["LOCAL_FILE", "LocalRay", "read_local", "start_local", "stop_local"]

#: In the cluster's folder.
LOCAL_FILE = "ray.json"
#: A loopback address that Ray takes for a machine's: it replaces 127.0.0.1 by the address that others see.
_ADDRESS = "127.0.0.2"
_START_S, _END_S = 60.0, 20.0
#: That :func:`start_local` makes.
_OWN_FOLDER = re.compile(r"/tmp/hix-[0-9a-f]{12}")  # noqa: S108 - a random name, made by us or refused


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRay:
    """A Ray head that was started here."""

    address: str
    #: Whoever has it may run code as this user.
    token: str
    #: Of its process group, and Ray's folder.
    pid: int
    folder: str
    #: The machine that it was started on.
    host: str

    def runs(self) -> bool:
        """Whether a process of it is left. Ids of processes are used again, and its folder's name is not.

        Raises:
            ServiceError: it was started on another machine.
        """
        if self.host != socket.gethostname():
            raise ServiceError(
                f"a cluster of this index was started on {self.host}, with --local; stop it there, or remove "
                f"{LOCAL_FILE} from the cluster's folder if that machine is gone"
            )
        return any(self._owns(int(entry.name)) for entry in filesystem.list_folder("/proc", "[0-9]*"))

    def _owns(self, pid: int) -> bool:
        with suppress(ProcessLookupError, FileError):
            return os.getpgid(pid) == self.pid and self.folder.encode() in filesystem.read_bytes(f"/proc/{pid}/cmdline")
        return False

    def admit(self) -> None:
        """Lets this process in."""
        os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"] = "token", self.token


def read_local(folder: Path) -> LocalRay | None:
    """The one that a cluster's folder names; None: it has none."""
    try:
        found = LocalRay(**json.loads(filesystem.read_bytes(folder / LOCAL_FILE)))
        ours = _OWN_FOLDER.fullmatch(found.folder) and type(found.pid) is int and found.pid > 1
    except MissingFileError:
        return None
    except (FileError, ValueError, TypeError) as error:
        raise CorruptIndexError(f"{folder / LOCAL_FILE} cannot be used: {error}") from error
    if not ours:
        # Its processes are ended, and its folder is removed: an index may come from anybody.
        raise CorruptIndexError(
            f"{folder / LOCAL_FILE} cannot be used: it names folder {found.folder!r} and process {found.pid!r}, which "
            "are none of ours"
        )
    return found


def start_local(folder: Path) -> LocalRay:
    """Starts a Ray head with token authentication; ``folder``: of the cluster, which keeps its address.

    Raises:
        ServiceError: it does not start.
    """
    token = secrets.token_hex(32)
    # Sockets in it have a longest path.
    own = Path("/tmp") / f"hix-{secrets.token_hex(6)}"  # noqa: S108 - a random name, made by us or refused
    filesystem.make_folder(own)
    filesystem.chmod(own, 0o700)
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    }
    words = (
        *("start", "--head", "--block", "--port", "0", "--node-ip-address", _ADDRESS, "--num-cpus", "1"),
        *("--object-store-memory", str(80 << 20), "--include-dashboard", "false", "--disable-usage-stats"),
        *("--temp-dir", str(own)),
    )
    with filesystem.open_for_writing(own / "head.log") as log:
        process = subprocess.Popen(  # noqa: S603 - our own words
            [sys.executable, "-m", "ray.scripts.scripts", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        address = _address_of(process, own)
        found = LocalRay(address=address, token=token, pid=process.pid, folder=str(own), host=socket.gethostname())
        filesystem.replace_file(folder / LOCAL_FILE, json.dumps(asdict(found)), permissions=0o600)
    except BaseException:  # nobody would find it
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        filesystem.discard_tree(own)
        raise
    return found


def _address_of(process: subprocess.Popen[bytes], own: Path) -> str:
    """As soon as it has one. Raises ServiceError."""
    ends = time.monotonic() + _START_S
    while True:
        with suppress(MissingFileError):
            if address := filesystem.read_text(own / "ray_current_cluster").strip():
                return address
        if process.poll() is not None or time.monotonic() > ends:
            said = filesystem.read_text(own / "head.log", errors="replace").strip().splitlines()
            raise ServiceError(f"Ray did not start here: {said[-1] if said else 'it said nothing'}")
        time.sleep(0.05)


def stop_local(folder: Path) -> None:
    """Ends the Ray head that a cluster's folder names, and all its processes. Harmless where there is none.

    Raises:
        ServiceError: it was started on another machine.
    """
    found = read_local(folder)
    if found is None:
        return
    # Ray's head ends a part of its processes at SIGTERM, and keeps nothing that a kill would lose.
    ends_by = ((signal.SIGTERM, 1.0), (signal.SIGKILL, _END_S)) if found.runs() else ()
    for sent, limit_s in ends_by:
        with suppress(ProcessLookupError):
            os.killpg(found.pid, sent)
        ends = time.monotonic() + limit_s
        while _lives(found.pid) and time.monotonic() < ends:
            time.sleep(0.05)
    filesystem.discard_tree(found.folder)
    filesystem.unlink(folder / LOCAL_FILE, missing_ok=True)


def _lives(group: int) -> bool:
    """Whether any process of a group runs."""
    with suppress(ChildProcessError):
        os.waitpid(group, os.WNOHANG)
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
