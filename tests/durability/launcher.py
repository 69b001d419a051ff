"""Starts commands and daemons, which may die at a point: one parent that has loaded the library, and forks for each.

A child is a process of its own: its locks, files and mappings end with its SIGKILL as those of any process do. Loading
everything once, instead of once a child, is what makes a hundred children affordable. The parent runs no search and
starts no thread.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from hybridindex.cli.main import make_app
from tests.durability.points import Point, arm

__all__ = ["PLANS_SOON", "Child", "Launcher"]

_ROOT = Path(__file__).parents[2]
#: Of a daemon that is asked for plans: beside the other tests, a process of low priority takes minutes.
PLANS_SOON = ("--refresh-planning-nice", 0)


class Child:
    """One started process."""

    def __init__(self, launcher: Launcher, pid: int, log: Path) -> None:
        self._launcher = launcher
        self.pid = pid
        self._log = log
        self._status: int | None = None

    def wait(self) -> int:
        """Its exit status; minus the signal that ended it."""
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(self._launcher.hear_end(self.pid))
        return self._status

    def end(self) -> None:
        """Kills it where it has not ended by itself."""
        if self._status is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def wait_for(self, words: str, *, behind: int = 0) -> None:
        """Until its log has ``words``, behind so many characters."""
        while words not in self.log[behind:]:
            assert self.alive, f"the child ended without {words}:\n{self.log}"
            time.sleep(0.02)

    def ends_within(self, seconds: float) -> bool:
        """Whether it has ended before so much time is over."""
        until = time.monotonic() + seconds
        while self.alive and time.monotonic() < until:
            time.sleep(0.02)
        return not self.alive

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return os.path.exists(f"/proc/{self.pid}/exe")

    @property
    def log(self) -> str:
        """Standard output and error together."""
        return self._log.read_text(errors="replace")


class Launcher:
    """Owner of the parent. A context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0
        #: Statuses of children that ended before they were waited for.
        self._ended: dict[int, int] = {}
        self._parent = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.durability.launcher"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        )

    def start(
        self,
        *words: object,
        at: Point | None = None,
        limits: dict[str, int] | None = None,
        before: Sequence[object] = (),
    ) -> Child:
        """Runs ``hybridindex WORDS``, or a Python file where the first word is one, in a process of its own.

        Args:
            limits: soft limits of :mod:`resource`, by name.
            before: ``module:function`` and its arguments, as text: called in the child before anything else.
        """
        self._number += 1
        log = self._folder / f"child-{self._number}.log"
        log.touch()
        job = {
            "words": [str(word) for word in words],
            "at": None if at is None else asdict(at),
            "limits": limits or {},
            "before": [str(word) for word in before],
            "log": str(log),
        }
        assert self._parent.stdin is not None
        self._parent.stdin.write(json.dumps(job) + "\n")
        self._parent.stdin.flush()
        return Child(self, self._hear("started")["started"], log)

    @contextmanager
    def daemon(self, *words: object) -> Iterator[tuple[Child, list[str]]]:
        """``hybridindex serve WORDS`` until the block ends; gives it and its addresses. Its plans are made soon."""
        child = self.start("serve", *words, *PLANS_SOON, "--json")
        try:
            child.wait_for('"urls"')
            (said,) = (line for line in child.log.splitlines() if '"urls"' in line)
            yield child, json.loads(said)["urls"]
        finally:
            child.end()

    def hear_end(self, pid: int) -> int:
        """Waits until a child has ended; its status as of ``os.waitpid``."""
        while pid not in self._ended:
            self._hear("ended")
        return self._ended.pop(pid)

    def _hear(self, what: str) -> dict[str, int]:
        """The next message of that kind; ends of children are kept."""
        assert self._parent.stdout is not None
        while True:
            line = self._parent.stdout.readline()
            assert line, "the parent of the children is gone"
            heard: dict[str, int] = json.loads(line)
            if "ended" in heard:
                self._ended[heard["ended"]] = heard["status"]
            if what in heard:
                return heard

    def __enter__(self) -> Launcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.close()
        self._parent.wait(300)
        self._parent.stdout.close()


def _be_child(job: dict[str, Any]) -> None:
    """In the child: never returns."""
    status = 1
    try:
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for old, new in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(old, new)
        if job["limits"]:
            import resource

            for name, value in job["limits"].items():
                kind = getattr(resource, name)
                resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))
        if job["before"]:
            module, _, name = job["before"][0].partition(":")
            getattr(importlib.import_module(module), name)(*job["before"][1:])
        if job["at"] is not None:
            arm(Point(**job["at"]))
        first = job["words"][0]
        if first.endswith(".py"):
            sys.argv = job["words"]
            runpy.run_path(first, run_name="__main__")
        else:
            from hybridindex.cli.entry import run

            sys.argv = ["hybridindex", *job["words"]]
            run()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:  # noqa: BLE001 - the log is all that is left of it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _preload() -> None:
    """Whatever a command or a daemon imports: no child does it again."""
    import alembic.command  # noqa: F401
    import faiss  # noqa: F401
    import torch  # noqa: F401
    import uvicorn.protocols.http.httptools_impl  # noqa: F401
    import uvloop  # noqa: F401

    for name in ("hybridindex.service.daemon", "hybridindex.refresh.refresher"):
        importlib.import_module(name)
    make_app()
    # Collections in a child leave the pages alone that it shares with this process.
    gc.freeze()


def _main() -> None:
    _preload()
    said = b""
    with selectors.DefaultSelector() as waiting:
        waiting.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in waiting.select():
                if key.data is not None:
                    waiting.unregister(key.fd)
                    os.close(key.fd)
                    print(json.dumps({"ended": key.data, "status": os.waitpid(key.data, 0)[1]}), flush=True)
                    continue
                heard = os.read(0, 1 << 16)
                if not heard:
                    # Of a test that failed, too.
                    for pid in [key.data for key in waiting.get_map().values() if key.data is not None]:
                        os.kill(pid, signal.SIGKILL)
                        os.waitpid(pid, 0)
                    return
                *lines, said = (said + heard).split(b"\n")
                for line in lines:
                    pid = os.fork()
                    if pid == 0:
                        _be_child(json.loads(line))
                    waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, data=pid)
                    print(json.dumps({"started": pid}), flush=True)


if __name__ == "__main__":
    _main()
