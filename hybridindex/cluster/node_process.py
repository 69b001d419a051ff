"""The daemon of one node: made its share, started, watched, started again when it dies or hangs."""

from __future__ import annotations

import json
import logging
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridindex import filesystem
from hybridindex.client.client import Client
from hybridindex.cluster.nodes.calls import NodeCalls
from hybridindex.errors import (
    CorruptIndexError,
    HybridIndexError,
    InvalidInputError,
    MissingFileError,
    ServiceError,
    UnsupportedIndexError,
)
from hybridindex.index import read_manifest
from hybridindex.index.share.share import create_share, renew_share
from hybridindex.index.share.source import FolderSource
from hybridindex.service.auth import KeyFile, Role
from hybridindex.service.cluster.handed_plan import note_taken, store_plan, take_plan
from hybridindex.service.cluster.member import KEY_VARIABLE

__all__ = ["HUNG_AFTER_S", "NodeProcess", "NodeSpec"]

_log = logging.getLogger(__name__)

#: For a daemon to listen.
_START_S = 120.0
#: Between two starts; twice as long after each that fails.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 10.0
#: Between two pings, and for how long the daemon may answer none.
_PING_EVERY_S, HUNG_AFTER_S = 2.0, 20.0
#: For a daemon to end by itself; and between two looks whether it has ended, or answers.
_END_S, _LOOK_S = 40.0, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """What a node is started with."""

    name: str
    #: The whole index, as this machine sees it.
    index: str
    #: Folder for the share; it stays there for the next start.
    data: str
    memory_bytes: int
    #: The key that all nodes and the manager show.
    key: str
    #: One that allows to change rows, and one that allows to search, and no more; None: there is none.
    write_key: str | None = None
    search_key: str | None = None
    host: str = "127.0.0.1"
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None
    #: Of the index, which the cluster serves; None: the current one.
    generation: int | None = None
    #: Where the plan of the index is handed out; None: the node was given another control store.
    plans: str | None = None
    #: Further words of ``hybridindex serve``.
    options: tuple[str, ...] = ()
    #: It is started again after its machine was: only where its share is.
    returns: bool = False


class NodeProcess:
    """Owner of the daemon's process. :meth:`close` ends it."""

    def __init__(self, spec: NodeSpec) -> None:
        """Returns when it listens.

        Raises:
            HybridIndexError: the share cannot be made, or the daemon does not start; its last words are in the message.
        """
        self._spec = spec
        self._folder = Path(spec.data).absolute()
        self._share = self._folder / "share"
        if spec.returns and not filesystem.is_dir(self._share):
            raise ServiceError(f"its share {self._share} is not there")
        filesystem.make_folder(self._folder, parents=True, exist_ok=True)
        filesystem.chmod(self._folder, 0o700)
        self._make_share()
        self._take_plan()
        self._keys = self._make_keys()
        self._port = self._choose_port()
        self._log_file = self._folder / "daemon.log"
        self._tls = None if spec.tls_ca is None else ssl.create_default_context(cafile=spec.tls_ca)
        self.n_starts = 0
        self._ending = threading.Event()
        #: Held by who has the daemon started again; and whether that is why it ends.
        self._restarting = threading.Lock()
        self._is_wanted_again = False
        self._process: subprocess.Popen[str] | None = None
        self.url = ""
        self._failure: BaseException | None = None
        self._listens = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hybridindex-node", daemon=True)
        self._thread.start()
        self._wait_until_it_listens()

    def _make_share(self) -> None:
        """The share of an earlier start, with the attributes that the index has now, where it is of the generation that
        this node is started for; or of any other, where it was started for the same before, and went on from that. Else
        a new one."""
        source = FolderSource(self._spec.index, generation=self._generation(), is_followed=True)
        if filesystem.is_dir(self._share):
            try:
                renew_share(self._share, source)
            except (CorruptIndexError, InvalidInputError, UnsupportedIndexError) as error:
                _log.warning("the share of an earlier start is not used: %s", error)
            else:
                return
            filesystem.remove_tree(self._share)
        create_share(self._share, source)

    def _take_plan(self) -> None:
        if self._spec.plans is not None:
            take_plan(Path(self._spec.plans), self._share)

    def _generation(self) -> int | None:
        """To start with; None: the current one of the index. The cluster may serve another one by now: its manager says
        so."""
        index, asked, file = self._spec.index, self._spec.generation, self._folder / "generation"
        if asked is None:
            asked = read_manifest(index).generation
        try:
            before = filesystem.read_text(file)
        except MissingFileError:
            before = ""
        filesystem.replace_file(file, str(asked))
        with suppress(CorruptIndexError, InvalidInputError, UnsupportedIndexError):
            kept = read_manifest(self._share)
            if before == str(asked) and kept == read_manifest(index, kept.generation):
                return kept.generation
        try:
            return read_manifest(index, asked).generation
        except CorruptIndexError:
            return None  # it was removed since

    def _make_keys(self) -> Path:
        """A key file with the cluster's keys alone."""
        path = self._folder / "keys.json"
        filesystem.unlink(path, missing_ok=True)
        KeyFile(path).add_known("cluster", Role.ADMIN, self._spec.key)
        for role, key in ((Role.WRITE, self._spec.write_key), (Role.SEARCH, self._spec.search_key)):
            if key is not None:
                KeyFile(path).add_known(role.value, role, key)
        return path

    def _choose_port(self) -> int:
        """The port of an earlier start, where it is free: others know it."""
        file = self._folder / "port"
        try:
            port = int(filesystem.read_text(file))
        except (MissingFileError, ValueError):
            port = 0
        found = self._free_port(port) or self._free_port(0)
        if found is None:
            raise InvalidInputError(f"host is {self._spec.host!r}, where this machine cannot listen")
        filesystem.replace_file(file, str(found))
        return found

    def _free_port(self, port: int) -> int | None:
        """This one, or for 0 any; None: it is taken."""
        with socket.socket(socket.AF_INET6 if ":" in self._spec.host else socket.AF_INET) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind((self._spec.host, port))
            except (OSError, OverflowError):
                return None
            return int(tried.getsockname()[1])

    def _start(self) -> str:
        spec = self._spec
        words = [
            *("serve", str(self._share), "--node", spec.name, "--node-source", spec.index),
            *("--node-memory", str(spec.memory_bytes), "--host", spec.host, "--port", str(self._port)),
            *("--keys", str(self._keys), "--json"),
        ]
        for option, value in (("--tls-cert", spec.tls_cert), ("--tls-key", spec.tls_key), ("--node-ca", spec.tls_ca)):
            if value is not None:
                words += [option, value]
        with filesystem.open_for_writing(self._log_file) as log:
            self._process = process = subprocess.Popen(  # noqa: S603 - our own words, and an administrator's
                [sys.executable, "-m", "hybridindex.cluster.tied", str(os.getpid()), *words, *spec.options],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**_environment(), KEY_VARIABLE: spec.key, "OMP_WAIT_POLICY": "PASSIVE"},
            )
        self.n_starts += 1
        assert process.stdout is not None
        timer = threading.Timer(_START_S, process.kill)
        timer.start()
        try:
            line = process.stdout.readline()  # the only one that it writes there
        finally:
            timer.cancel()
            process.stdout.close()
        try:
            said: dict[str, Any] = json.loads(line)
        except ValueError:
            said = {}
        if "urls" not in said:
            process.kill()
            process.wait()
            why = said["error"]["message"] if "error" in said else self._last_words()
            raise ServiceError(f"node {spec.name} did not start: {why}")
        url: str = said["urls"][0]
        return url

    def _last_words(self) -> str:
        text = filesystem.read_text(self._log_file, errors="replace").strip()
        return text.splitlines()[-1][-500:] if text else "it said nothing"

    def _run(self) -> None:
        """On the thread that lives as long as the daemon may: the kernel ends it with the *thread* that started it."""
        try:
            self.url = self._start_first()
        except BaseException as error:  # noqa: BLE001 - raised again by who makes this
            self._failure = error
            return
        finally:
            self._listens.set()
        self._watch()

    def _start_first(self) -> str:
        """On another port where somebody took the one that was free; nobody knows it yet."""
        try:
            return self._start()
        except ServiceError:
            if self._free_port(self._port) is not None:
                raise
            self._port = self._choose_port()
            return self._start()

    def _wait_until_it_listens(self) -> None:
        self._listens.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure

    def _watch(self) -> None:
        wait_s = _FIRST_WAIT_S
        while not self._ending.is_set():
            process = self._process
            assert process is not None
            began = time.monotonic()
            self._wait(process)
            if self._ending.is_set():
                return
            if self._is_wanted_again:
                self._is_wanted_again = False
                self._renew()
            else:
                _log.warning(
                    "the daemon of node %s ended with %d; it is started again", self._spec.name, process.returncode
                )
                if time.monotonic() - began > _START_S:
                    wait_s = _FIRST_WAIT_S
                if self._ending.wait(wait_s):
                    return
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            self._take_plan()
            try:
                self.url = self._start()
            except Exception as error:  # noqa: BLE001 - of the system, too, that is short of something: it is tried again
                _log.error("the daemon of node %s could not be started: %s", self._spec.name, error)

    def _wait(self, process: subprocess.Popen[str]) -> None:
        """Until it has ended. One that answers nothing any more is ended: it keeps locks and ports that others need."""
        calls = NodeCalls(self.url, self._spec.key, self._tls)
        heard_s = time.monotonic()
        while True:
            try:
                process.wait(_PING_EVERY_S)
                return
            except subprocess.TimeoutExpired:
                pass
            try:
                calls.ping(_PING_EVERY_S)
            except Exception as error:  # noqa: BLE001 - the daemon ends with this thread
                if not isinstance(error.__cause__, TimeoutError):
                    heard_s = time.monotonic()  # whatever it says
                elif time.monotonic() - heard_s > HUNG_AFTER_S and not self._ending.is_set():
                    _log.warning("the daemon of node %s does not answer; it is killed", self._spec.name)
                    process.kill()
            else:
                heard_s = time.monotonic()

    def _renew(self) -> None:
        """What the index has beside its lists now. Where that cannot be had, the share stays as it is."""
        try:
            number = read_manifest(self._share).generation
            renew_share(self._share, FolderSource(self._spec.index, generation=number, is_followed=True))
        except HybridIndexError as error:
            _log.warning("the share of node %s was not renewed: %s", self._spec.name, error)

    def restart(self) -> None:
        """Ends the daemon, gives it the attributes, codes and plan that the index has now, and starts it again; returns
        when it listens.

        Raises:
            ServiceError: it does not listen after a while; it is tried further.
        """
        with self._restarting:
            process, before = self._process, self.n_starts
            assert process is not None
            self._is_wanted_again = True
            process.terminate()
            ends = time.monotonic() + _END_S
            while process.poll() is None and not self._ending.is_set():
                if time.monotonic() > ends:
                    process.kill()
                time.sleep(_LOOK_S)
            ends = time.monotonic() + _START_S
            while (self.n_starts == before or not self._answers()) and not self._ending.is_set():
                if time.monotonic() > ends:
                    raise ServiceError(f"node {self._spec.name} did not start again: {self._last_words()}")
                time.sleep(_LOOK_S)

    def apply_plan(self, choice: str, *, force: bool, bandwidth_share: float | None) -> dict[str, Any]:
        """Has the daemon serve another plan, by moving the difference; what it answers.

        Args:
            choice: of the control store that the node was given. Without one, the plan that was handed out counts.

        Raises:
            HybridIndexError: the daemon does not answer, or refuses the plan; it serves as before.
        """
        event = None
        if self._spec.plans is not None:
            plan_id, event = store_plan(Path(self._spec.plans), self._share)
            choice = str(plan_id)
        verify = True if self._tls is None else self._tls
        with Client(self.url, key=self._spec.key, verify=verify) as client:
            answer = client.apply_plan(choice, force=force, bandwidth_share=bandwidth_share)
        if event is not None:
            note_taken(self._share, event)
        return answer

    def _answers(self) -> bool:
        try:
            NodeCalls(self.url, self._spec.key, self._tls).ping(_PING_EVERY_S)
        except HybridIndexError:
            return False
        return True

    @property
    def pid(self) -> int:
        """Of the daemon that runs now."""
        assert self._process is not None
        return self._process.pid

    def close(self) -> None:
        """Ends the daemon, also one that is just being started; the share stays."""
        self._ending.set()
        ends = time.monotonic() + _END_S
        told = None
        while self._thread.is_alive():
            process = self._process
            if process is not None and process is not told:
                told = process
                process.terminate()
            if process is not None and time.monotonic() > ends:
                process.kill()
            self._thread.join(0.1)


def _environment() -> dict[str, str]:
    """This process's, without the number of threads that Ray sets for an actor without a core: one."""
    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
