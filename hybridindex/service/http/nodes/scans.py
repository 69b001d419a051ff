"""What a node answers to a scan that another one asks for; :mod:`.channel` has the connection."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Any
from urllib.parse import parse_qsl

from hybridindex.router.batch.batch import GivenProbes
from hybridindex.router.remote.scan_codec import decode_scan, encode_found
from hybridindex.service.core import Service
from hybridindex.service.http.bodies import hold
from hybridindex.service.http.problems import Problem, ProblemError
from hybridindex.service.http.wire import BodyError
from hybridindex.service.intake.request_memory import Charge
from hybridindex.types import F32

__all__ = ["Scans", "other_generation"]

#: Most queries and lists of one scan, and of its options.
_MOST_ROWS, _MOST_WIDTH, _MOST_OPTIONS = 1 << 16, 1 << 20, 16
#: Scans of no more work are made on the event loop where the engine is idle: handing them over takes as long.
_SMALL_BYTES = 2 << 20


class Scans:
    """Of one node. On the event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        index = service.index.ivf
        self._index, self.of = index, f"{index.fingerprint}.{index.generation}"

    def __call__(self, options: str, body: bytes | memoryview, charge: Charge) -> bytes | Coroutine[Any, Any, bytes]:
        """The arrays found, at once or later.

        Args:
            options: ``of`` fingerprint and generation, ``n`` queries, ``d`` dimensions, ``w`` lists, ``k``.
            body: as of :func:`decode_scan`.
            charge: holds ``body``; takes what else there is.

        Raises:
            ProblemError: it is of another generation. BodyError, InvalidInputError: it is no scan. OverloadedError:
                there is no memory. Later: NotHeldError: lists are not here.
        """
        index = self._index
        given = dict(parse_qsl(options, keep_blank_values=True, max_num_fields=_MOST_OPTIONS))
        if given.get("of") != self.of:
            raise other_generation(f"this node has {self.of}, and {given.get('of')} was asked")
        n, w = _count(given, "n", _MOST_ROWS), _count(given, "w", _MOST_WIDTH)
        d, k = _count(given, "d", index.scan_dim), _count(given, "k", self._service.config.limits.max_k)
        if d != index.scan_dim:
            raise BodyError("d", f"is {d}; expected {index.scan_dim}")
        hold(charge, 2 * len(body) + 12 * n * (k + w))
        queries, probes, coarse = decode_scan(body, n=n, d=d, w=w, nlist=index.nlist)
        lists = GivenProbes(probes, coarse)
        if int(index.list_bytes[probes[probes >= 0]].sum()) <= _SMALL_BYTES:
            found = self._service.router.scan_directly(queries, k, lists)
            if found is not None:
                return encode_found(found.distances, found.ids)
        return self._later(queries, k, lists)

    async def _later(self, queries: F32, k: int, lists: GivenProbes) -> bytes:
        found = await self._service.router.ascan(queries, k, lists)
        return encode_found(found.distances, found.ids)


def other_generation(detail: str) -> ProblemError:
    return ProblemError(Problem(409, "other-generation", "Another generation of the index", detail))


def _count(options: Mapping[str, str], name: str, most: int) -> int:
    text = options.get(name, "")
    if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= most:
        raise BodyError(name, f"is {text[:20]!r}; expected an integer 1..{most}")
    return int(text)
