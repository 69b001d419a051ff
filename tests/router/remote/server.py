"""A node as its peers see it: pings and requests, answered as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hybridindex.router.remote.loop_thread import LoopThread


class Server:
    """A node to its peers. ``answers``: of a path's last part, what it does instead of 200 with ``{}``; "waits":
    nothing, until it is told otherwise."""

    def __init__(self, thread: LoopThread) -> None:
        self._thread = thread
        self.answers: dict[str, bytes | str | Callable[[], bytes]] = {}
        #: Of a path's last part; 200 OK of others.
        self.status: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.pings: list[str] = []
        self.ping_answer = b"204 No Content"
        self.hangs = False
        self.server = thread.run(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = self.server.sockets[0].getsockname()[1]

    async def _serve(self, reader, writer):
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                while self.hangs:
                    await asyncio.sleep(0.01)
                target = head.split(b" ")[1].decode()
                if target.split("?")[0].endswith("/ping"):
                    self.pings.append(target)
                    writer.write(b"HTTP/1.1 %b\r\ncontent-length: 0\r\n\r\n" % self.ping_answer)
                    continue
                self.asked.append(target)
                name = target.split("?")[0].rpartition("/")[2]
                while (answer := self.answers.get(name, b"{}")) == "waits":
                    await asyncio.sleep(0.01)
                if answer == "dies":
                    self.server.close()
                if answer in ("dies", "breaks"):
                    writer.transport.abort()
                    return
                content = answer() if callable(answer) else answer
                assert isinstance(content, bytes)
                status = self.status.get(name, b"200 OK")
                writer.write(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(content), content))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.transport.abort()


@contextmanager
def loop_thread() -> Iterator[LoopThread]:
    """For servers and those that ask them."""
    loop = LoopThread(name="test-nodes")
    yield loop

    async def end():
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    loop.run(end())
    loop.close()
