"""A vLLM of one's own on the loopback, from the start to the end of a block: for the tests here, and for benchmarks.

Covers how it starts, when it is ready and how it ends. What it serves, with which lengths, is its callers'.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hybridindex.errors import LLMServerError
from hybridindex.profiler.llm.server import LLMServer

__all__ = ["Served", "offline", "vllm_server"]

_START_S = 600
#: Its engine is a process of its own, and has shared memory to give back.
_END_S = 120
#: Between two looks at whether the process lives.
_LOOK_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]


def offline(**more: str) -> dict[str, str]:
    """This process's variables and ``more``, for a process that asks nobody outside this machine."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1", **more}


@contextmanager
def vllm_server(
    model: Path, kv_cache_bytes: int, *words: str, name: str, log: Path, **variables: str
) -> Iterator[Served]:
    """``vllm serve`` of ``model`` under ``name`` on a free port, with exactly that cache, until the block ends.

    ``words``: its further arguments; ``variables``: of its environment. At the end it is asked to stop, or else killed.

    Raises:
        LLMServerError: it does not start, or the block ended with this error; with the end of its log.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--served-model-name", name]
    command += ["--host", "127.0.0.1", "--port", str(port), "--kv-cache-memory-bytes", str(kv_cache_bytes), *words]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=offline(**variables),
            start_new_session=True,
        )
    served = Served(url=f"http://127.0.0.1:{port}", process=process, log=log)
    try:
        asyncio.run(_started(served))
        yield served
    except LLMServerError as error:
        raise LLMServerError(f"{error}\n{served.tail()}") from error
    finally:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


async def _started(served: Served) -> None:
    deadline = time.monotonic() + _START_S
    async with LLMServer(served.url) as server:
        while time.monotonic() < deadline:
            if served.process.poll() is not None:
                raise LLMServerError(f"vllm serve ended with status {served.process.returncode}")
            with suppress(LLMServerError):
                return await server.wait_ready(_LOOK_S)
    raise LLMServerError(f"vllm serve was not ready within {_START_S} s")
