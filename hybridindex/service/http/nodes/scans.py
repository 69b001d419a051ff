"""What a node answers to a scan, or a comparison of candidates, that another one asks for; :mod:`.channel` has the
connection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from hybridindex.config import MAX_CANDIDATES, MAX_K
from hybridindex.index.source import MAX_DIM
from hybridindex.router.remote.scan_codec import AskedScan, decode_asked, decode_comparison, encode_found
from hybridindex.service.changes.members import Members
from hybridindex.service.http.bodies import hold
from hybridindex.service.http.problems import Problem, ProblemError
from hybridindex.service.http.wire import BodyError
from hybridindex.service.intake.request_memory import Charge
from hybridindex.service.searches import LoopTime
from hybridindex.service.serving import Serving
from hybridindex.types import F32, I64, SearchResult

__all__ = ["Scans", "other_generation"]

#: Most queries and lists of one scan, and of its options.
_MOST_ROWS, _MOST_WIDTH, _MOST_OPTIONS = 1 << 16, 1 << 20, 16
#: Bytes of arrays whose filters are unpacked on the event loop; and of those whose candidates are.
_SMALL_BODY, _FEW_CANDIDATES = 1 << 13, 1 << 18
_OPTIONS = {"of", "n", "d", "w", "r", "k", "f"}


class _Numbers(NamedTuple):
    """The options of a question."""

    of: str | None
    #: Queries, dimensions, places.
    n: int
    d: int
    k: int
    #: Lists of a scan; or 0.
    w: int
    #: Candidates of a comparison; or 0.
    r: int
    #: Filters; 0: there are none.
    f: int


class Scans:
    """Of one node. On the event loop."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._loop_time = LoopTime()

    def _serving(self, of: str | None) -> Serving:
        """Raises ProblemError: the generation is not open here."""
        found = None if of is None else self._members.scanned(of)
        if found is None:
            named = None if of is None else of[:100]
            raise other_generation(f"this node has {self._members.names()}, and {named} was asked")
        return found

    def __call__(self, options: str, body: bytes | memoryview, charge: Charge) -> bytes | Coroutine[Any, Any, bytes]:
        """The arrays found, at once or later.

        Args:
            options: ``of`` fingerprint and generation, ``n`` queries, ``d`` dimensions, ``k``; and ``w`` lists, maybe
                with ``f`` filters, or ``r`` candidates.
            body: as of :func:`decode_asked` or :func:`decode_comparison`.
            charge: holds ``body``; takes what else there is.

        Raises:
            ProblemError: it is of another generation. BodyError, InvalidInputError: it is no scan. OverloadedError:
                there is no memory. Later: InvalidInputError: of filters; NotHeldError: lists are not here.
        """
        of, n, d, k, w, r, n_filters = _numbers(options)
        serving = self._serving(of)
        index = serving.index.ivf
        if d != index.scan_dim:
            raise BodyError("d", f"is {d}; expected {index.scan_dim}")
        if r:
            return self._compared(of, serving, body, n, r, k, charge)
        nbytes = 2 * len(body) + 12 * n * (k + w)
        hold(charge, nbytes)
        asked = decode_asked(body, n=n, d=d, w=w, n_filters=n_filters, index=index)
        if asked.filters is not None:
            hold(charge, nbytes + asked.filters.nbytes)
        elif (found := self._at_once(serving, asked, k)) is not None:
            return encode_found(found.distances, found.ids)
        return self._later(of, asked, k, on_thread=asked.filters is not None and len(body) > _SMALL_BODY)

    def _compared(
        self, of: str | None, serving: Serving, body: bytes | memoryview, n: int, r: int, k: int, charge: Charge
    ) -> bytes | Coroutine[Any, Any, bytes]:
        """On the event loop where that is short."""
        index = serving.index.ivf
        # Positions, and what they are made of; distances and ids, twice.
        hold(charge, len(body) + 40 * n * r + 24 * n * k)

        def decode() -> tuple[F32, I64]:
            return decode_comparison(body, n=n, d=index.scan_dim, r=r, list_sizes=index.list_sizes)

        def compare(queries: F32, positions: I64) -> bytes:
            # Another router may have taken the place of the one that was there.
            found = self._serving(of).router.compare(queries, positions, k)
            assert found is not None
            return encode_found(*found)

        if len(body) > _FEW_CANDIDATES:
            return asyncio.to_thread(lambda: compare(*decode()))
        began_s, given = time.perf_counter(), decode()
        found = serving.router.compare(*given, k, self._loop_time.most_bytes())
        if found is None:
            return asyncio.to_thread(compare, *given)
        self._loop_time.spent(began_s)
        return encode_found(*found)

    def _at_once(self, serving: Serving, asked: AskedScan, k: int) -> SearchResult | None:
        """Scans on the event loop. None: the scan is not short, or the engine or the loop has other work."""
        nbytes = int(serving.index.ivf.list_bytes[asked.probes[asked.probes >= 0]].sum())
        if nbytes > self._loop_time.most_bytes():
            return None
        began_s = time.perf_counter()
        found = serving.router.scan_directly(asked.queries, k, asked.given())
        self._loop_time.spent(began_s)
        return found

    async def _later(self, of: str | None, asked: AskedScan, k: int, *, on_thread: bool) -> bytes:
        """``on_thread``: its filters take long to unpack."""
        given = await asyncio.to_thread(asked.given) if on_thread else asked.given()
        # Another router may have taken the place of the one that was there.
        found = await self._serving(of).router.ascan(asked.queries, k, given)
        return encode_found(found.distances, found.ids)


def other_generation(detail: str) -> ProblemError:
    return ProblemError(Problem(409, "other-generation", "Another generation of the index", detail))


@lru_cache(maxsize=256)
def _numbers(options: str) -> _Numbers:
    """Most scans of a node have the same few.

    Raises:
        BodyError: one is wrong.
    """
    given = dict(parse_qsl(options, keep_blank_values=True, max_num_fields=_MOST_OPTIONS))
    if unknown := given.keys() - _OPTIONS:  # of a newer version: what it means must not be left out
        raise BodyError(min(unknown)[:20], "is not an option of a scan; expected of, n, d, w or r, k and f")
    if "r" in given and (with_ := given.keys() & {"w", "f"}):
        raise BodyError("r", f"is given with {min(with_)}; expected candidates, or lists to scan")
    n = _count(given, "n", _MOST_ROWS)
    # A client's k is bounded where it asks; deleted rows need places beside it.
    d, k = _count(given, "d", MAX_DIM), _count(given, "k", MAX_K)
    w, r = (0, _count(given, "r", MAX_CANDIDATES)) if "r" in given else (_count(given, "w", _MOST_WIDTH), 0)
    return _Numbers(given.get("of"), n, d, k, w, r, _count(given, "f", n) if "f" in given else 0)


def _count(options: Mapping[str, str], name: str, most: int) -> int:
    text = options.get(name, "")
    if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= most:
        raise BodyError(name, f"is {text[:20]!r}; expected an integer 1..{most}")
    return int(text)
