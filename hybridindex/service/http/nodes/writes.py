"""Changes of rows that a node is asked for: made by the one node that writes, which then tells the others."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request

from hybridindex.errors import ClaimedError, OverloadedError, UnreachableError
from hybridindex.index.storage.checksums import digest_bytes
from hybridindex.service.auth import Role
from hybridindex.service.changes.members import Members
from hybridindex.service.core import Service
from hybridindex.service.http.middleware import CALLER
from hybridindex.service.http.problems import Problem, ProblemError

__all__ = ["NodeWrites"]

_log = logging.getLogger(__name__)

#: Of a change that another node sent here.
_FORWARDED = "x-hybridindex-forwarded"
#: Nodes agree within so long who writes; and between two attempts until then.
_AGREE_S, _AGAIN_S = 5.0, 0.1
#: The node that wrote before may keep the right to write for so long.
_CLAIMED_S = 10.0
_NOT_THE_WRITER = "not-the-writer"
#: Changes on their way to another node at once, each on a connection of its own.
_MOST_FORWARDED = 32


def _is_forwarded(request: Request) -> bool:
    """By another node, whose key is an admin's; whoever else says so is not believed."""
    return _FORWARDED in request.headers and request.scope[CALLER].role.includes(Role.ADMIN)


class NodeWrites:
    """Of one node. On the event loop."""

    def __init__(self, service: Service, members: Members) -> None:
        self._service, self._members = service, members
        self._forwarding = asyncio.Semaphore(_MOST_FORWARDED)

    @staticmethod
    def key_of(request: Request, client: str, key: str) -> str:
        """The same for an idempotency key of a client, whichever node is asked."""
        return key if _is_forwarded(request) else digest_bytes(json.dumps([client, key]).encode())

    async def make(
        self,
        request: Request,
        body: bytes,
        key: str | None,
        change: Callable[[], Awaitable[dict[str, Any]]],
        limit_s: float | None = None,
    ) -> bytes:
        """What the node that writes answers; where that is this one, it makes the ``change``, and tells the others.

        Args:
            key: as of :meth:`key_of`.
            limit_s: as of :meth:`elsewhere`.

        Raises:
            As :meth:`elsewhere`. Whatever ``change`` raises.
        """
        ends_s = time.monotonic() + _CLAIMED_S
        while True:
            if (made := await self.elsewhere(request, body, key, limit_s)) is not None:
                return made
            try:
                said = await change()
            except ClaimedError:  # one that hung has it still, and may write again itself
                if time.monotonic() > ends_s:
                    raise
            else:
                await self.tell(said["number"])
                return json.dumps(said).encode()

    async def elsewhere(
        self, request: Request, body: bytes, key: str | None, limit_s: float | None = None
    ) -> bytes | None:
        """The answer of the node that writes, where that is another one; None: it is this one.

        Args:
            key: as of :meth:`key_of`.
            limit_s: for that answer; None: as long as any.

        Raises:
            OverloadedError: no node writes now, or the client has left.
            ProblemError: that node's; or it was lost meanwhile.
        """
        query = request.scope["query_string"].decode("ascii")
        target = f"{request.scope['path']}?{query}" if query else request.scope["path"]
        kind, lines = request.headers.get("content-type", ""), f"{_FORWARDED}: 1\r\n"
        if key is not None:
            lines += f"idempotency-key: {key}\r\n"
        ends_s = time.monotonic() + _AGREE_S
        while True:
            member = self._members.current
            writer = member.changes.writer()
            if writer == member.remote.name:
                return None
            if _is_forwarded(request):
                words = f"this node takes {writer} for the one that writes"
                raise ProblemError(Problem(503, _NOT_THE_WRITER, "Another node writes", words, retry_after_s=_AGAIN_S))
            if writer is not None:
                async with self._forwarding:
                    problem = await self._ask(writer, target, body, kind, lines, limit_s)
                if isinstance(problem, bytes):
                    await self._know(json.loads(problem).get("number", 0))
                    return problem
                if problem is not None and problem.name != _NOT_THE_WRITER:
                    raise ProblemError(problem)
            if time.monotonic() > ends_s:
                raise OverloadedError("no node of the cluster can write now: nothing was changed", retry_after_s=1)
            await asyncio.sleep(_AGAIN_S)
            if await request.is_disconnected():  # who asked believes that nothing was made, or asks again
                raise OverloadedError("the client no longer waits: nothing was changed", retry_after_s=1)

    async def _ask(
        self, writer: str, target: str, body: bytes, kind: str, lines: str, limit_s: float | None
    ) -> bytes | Problem | None:
        """Its answer, or what it says instead; None: it was not reached."""
        try:
            asked = self._members.current.changes.ask(writer, target, body, kind=kind, lines=lines, limit_s=limit_s)
            status, answer = await asyncio.wrap_future(asked)
        except UnreachableError:
            return None
        except Exception as error:  # noqa: BLE001 - of the connection
            words = (
                f"node {writer} was lost while it made the change ({error}), which may or may not have been made; "
                "if the same ids may be written again, replace or delete them once more"
            )
            return Problem(502, "unknown-outcome", "Unknown outcome", words)
        return answer if status in (200, 202) else _problem(status, answer)

    async def tell(self, number: int) -> None:
        """Searches of this node see change ``number`` when it returns, and of others as far as they answer. Never
        raises: it is made."""
        try:
            await self._know(number)
            await asyncio.wrap_future(self._members.current.changes.tell(number))
        except Exception:  # noqa: BLE001 - others look by themselves
            _log.exception("other nodes were not told of change %d", number)

    async def _know(self, number: int) -> None:
        if any(member.number < number for member in self._members.all()):
            await asyncio.to_thread(self._members.know, number)


def _problem(status: int, answer: bytes) -> Problem:
    try:
        said: Any = json.loads(answer)
        if status == 401:
            return Problem(502, "other-key", "Nodes have other keys", "the node that writes refuses the cluster's key")
        name, wait_s = str(said["type"]).rpartition(":")[2], said.get("retry_after_s")
        return Problem(status, name, str(said["title"]), str(said["detail"]), said.get("field"), wait_s)
    except (ValueError, KeyError, TypeError, AttributeError):
        return Problem(502, "unknown-outcome", "Unknown outcome", f"the node that writes answered {status}")
