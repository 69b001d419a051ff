"""What a node answers to a scan that another one asks for; :mod:`.channel` has the connection."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any
from urllib.parse import parse_qsl

from hybridindex.config import MAX_K
from hybridindex.router.remote.scan_codec import AskedScan, decode_asked, encode_found
from hybridindex.service.changes.members import Members
from hybridindex.service.http.bodies import hold
from hybridindex.service.http.problems import Problem, ProblemError
from hybridindex.service.http.wire import BodyError
from hybridindex.service.intake.request_memory import Charge
from hybridindex.service.serving import Serving

__all__ = ["Scans", "other_generation"]

#: Most queries and lists of one scan, and of its options.
_MOST_ROWS, _MOST_WIDTH, _MOST_OPTIONS = 1 << 16, 1 << 20, 16
#: Scans of no more work are made on the event loop where the engine is idle: handing them over takes as long.
_SMALL_BYTES = 2 << 20
#: Bytes of arrays whose filters are unpacked on the event loop.
_SMALL_BODY = 1 << 13
_OPTIONS = {"of", "n", "d", "w", "k", "f"}


class Scans:
    """Of one node. On the event loop."""

    def __init__(self, members: Members) -> None:
        self._members = members

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
            options: ``of`` fingerprint and generation, ``n`` queries, ``d`` dimensions, ``w`` lists, ``k``, and maybe
                ``f`` filters.
            body: as of :func:`decode_asked`.
            charge: holds ``body``; takes what else there is.

        Raises:
            ProblemError: it is of another generation. BodyError, InvalidInputError: it is no scan. OverloadedError:
                there is no memory. Later: InvalidInputError: of filters; NotHeldError: lists are not here.
        """
        given = dict(parse_qsl(options, keep_blank_values=True, max_num_fields=_MOST_OPTIONS))
        if unknown := given.keys() - _OPTIONS:  # of a newer version: what it means must not be left out
            raise BodyError(min(unknown)[:20], "is no option of a scan; expected of, n, d, w, k and f")
        of = given.get("of")
        serving = self._serving(of)
        index = serving.index.ivf
        n, w = _count(given, "n", _MOST_ROWS), _count(given, "w", _MOST_WIDTH)
        # A client's k is bounded where it asks; deleted rows need places beside it.
        d, k = _count(given, "d", index.scan_dim), _count(given, "k", MAX_K)
        if d != index.scan_dim:
            raise BodyError("d", f"is {d}; expected {index.scan_dim}")
        n_filters = _count(given, "f", n) if "f" in given else 0
        nbytes = 2 * len(body) + 12 * n * (k + w)
        hold(charge, nbytes)
        asked = decode_asked(body, n=n, d=d, w=w, n_filters=n_filters, index=index)
        if asked.filters is not None:
            hold(charge, nbytes + asked.filters.nbytes)
        elif int(index.list_bytes[asked.probes[asked.probes >= 0]].sum()) <= _SMALL_BYTES:
            found = serving.router.scan_directly(asked.queries, k, asked.given())
            if found is not None:
                return encode_found(found.distances, found.ids)
        return self._later(of, asked, k, on_thread=asked.filters is not None and len(body) > _SMALL_BODY)

    async def _later(self, of: str | None, asked: AskedScan, k: int, *, on_thread: bool) -> bytes:
        """``on_thread``: its filters take long to unpack."""
        given = await asyncio.to_thread(asked.given) if on_thread else asked.given()
        # Another router may have taken the place of the one that was there.
        found = await self._serving(of).router.ascan(asked.queries, k, given)
        return encode_found(found.distances, found.ids)


def other_generation(detail: str) -> ProblemError:
    return ProblemError(Problem(409, "other-generation", "Another generation of the index", detail))


def _count(options: Mapping[str, str], name: str, most: int) -> int:
    text = options.get(name, "")
    if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= most:
        raise BodyError(name, f"is {text[:20]!r}; expected an integer 1..{most}")
    return int(text)
