"""Traces: recorded runs of pipelines as JSON lines, and a generator that replays them.

Runs that are compared should differ in retrieval only, so they replay the same generations with the same timings. A
trace also has the texts of drafts and final queries, to study lookahead.

Format, version 1: a first line ``{"format": "hybridindex-trace", "version": 1, "model": …}``, then one object a line,
each a run: ``pipeline``, ``question``, and ``events`` with the fields of :mod:`hybridindex.rag.records` and a ``kind``.
Unknown fields are refused. Lines, runs and events are bounded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

from hybridindex import filesystem
from hybridindex.errors import FileError, InvalidInputError, TraceError, io_cure
from hybridindex.rag.generator import Finished, Prompt
from hybridindex.rag.records import Answer, Event, Generated, LookedAhead, Piece, Retrieved

__all__ = ["ReplayGenerator", "RunTrace", "TraceWriter", "read_traces"]

_log = logging.getLogger(__name__)

_FORMAT, _VERSION = "hybridindex-trace", 1
#: Bytes of one run.
_MAX_LINE = 16 << 20
_MAX_RUNS = 1_000_000
_MAX_EVENTS = 10_000
_MAX_PIECES = 1_000_000
_KINDS: dict[str, type[Event]] = {"generated": Generated, "looked_ahead": LookedAhead, "retrieved": Retrieved}
_NAMES = {kind: name for name, kind in _KINDS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTrace:
    """One recorded run."""

    pipeline: str
    question: str
    events: tuple[Event, ...]

    @property
    def generations(self) -> tuple[Generated, ...]:
        """In their order."""
        return tuple(event for event in self.events if isinstance(event, Generated))


class TraceWriter:
    """Appends runs to a file. One thread; close it once."""

    def __init__(self, path: Path, *, model: str) -> None:
        """Makes the file, or goes on with one of the same format.

        Raises:
            TraceError: another kind of file is there, or a trace of another model, or it cannot be written.
        """
        try:
            fresh = not filesystem.exists(path) or filesystem.stat(path).st_size == 0
            if not fresh:
                with filesystem.open_for_reading(path) as there:
                    header = _header_of(path, there.readline(_MAX_LINE + 1))
                if header.get("model", model) != model:
                    raise TraceError(
                        f"{path} is of the model {header['model']!r}, not {model!r}; record this one in another file"
                    )
            self._file = filesystem.File(path, "a")
        except FileError as error:
            raise TraceError(f"{path} cannot be written ({error.strerror}): {io_cure(error)}") from error
        try:
            if fresh:
                self._write({"format": _FORMAT, "version": _VERSION, "model": model})
            else:
                self._end_last_line(path)
        except BaseException as error:
            self._file.close()
            if isinstance(error, FileError):
                raise TraceError(f"{path} cannot be written ({error.strerror}): {io_cure(error)}") from error
            raise

    def _end_last_line(self, path: Path) -> None:
        """A power cut may have left half a run at the end: it is removed, and said."""
        with filesystem.open_for_reading(path) as there:
            size = there.seek(0, os.SEEK_END)
            there.seek(max(0, size - _MAX_LINE - 1))
            last = there.read().rpartition(b"\n")[2]
        if not last:
            return
        if _is_torn(last):
            _log.warning("%s ended within a run; the %d bytes of that run are removed", path, len(last))
            self._file.truncate(size - len(last))
        else:
            self._file.write(b"\n")

    def append(self, answer: Answer) -> None:
        """Adds one run, whole, and syncs it. Raises TraceError for one that is too long, or no JSON."""
        events = [{"kind": _NAMES[type(event)], **asdict(event)} for event in answer.events]
        self._write({"pipeline": answer.pipeline, "question": answer.question, "events": events})

    def _write(self, record: dict[str, Any]) -> None:
        try:
            line = (json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n").encode()
        except ValueError as error:  # half of a surrogate pair, a log-probability that is no number
            raise TraceError(f"a run does not fit a trace: {error}") from error
        if len(line) > _MAX_LINE:
            raise TraceError(f"a run of {len(line)} bytes does not fit a trace; expected {_MAX_LINE} at most")
        begin = self._file.seek(0, os.SEEK_END)
        try:
            self._file.write_at(line, begin)
            self._file.sync()
        except FileError as error:
            with contextlib.suppress(FileError):  # half a run would be in the way of the next
                self._file.truncate(begin)
            words = f"{self._file.name} cannot be written ({error.strerror}): {io_cure(error)}"
            raise TraceError(f"{words}; the runs before are kept") from error

    def close(self) -> None:
        """Ends the file; what was recorded stays."""
        self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_traces(path: Path) -> Iterator[RunTrace]:
    """The runs of a file, one after the other, in bounded memory.

    Raises:
        TraceError: missing, another format or version, beyond the bounds, or a line that is no run; names the line.
    """
    try:
        with filesystem.open_for_reading(path) as file:
            _header_of(path, file.readline(_MAX_LINE + 1))
            for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE + 1), b""), 2):
                if len(line) > _MAX_LINE:
                    raise TraceError(f"{path}, line {number}: longer than {_MAX_LINE} bytes")
                if number > _MAX_RUNS + 1:
                    raise TraceError(f"{path}: more than {_MAX_RUNS} runs")
                if not line.endswith(b"\n") and _is_torn(line):
                    _log.warning("%s ends within a run, line %d: the runs before it are read", path, number)
                    return
                yield _run_of(path, number, line)
    except FileError as error:
        raise TraceError(f"{path} cannot be read ({error.strerror}): {io_cure(error)}") from error


def _header_of(path: Path, line: bytes) -> dict[str, Any]:
    """Raises TraceError for what is none."""
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise TraceError(f"{path} is not a trace; expected a first line with the format {_FORMAT!r}")
    if header.get("version") != _VERSION:
        raise TraceError(f"{path} has version {header.get('version')!r}; this reads {_VERSION}")
    return header


def _is_torn(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return True
    return False


def _run_of(path: Path, number: int, line: bytes) -> RunTrace:
    try:
        record = json.loads(line)
        events = record["events"]
        if len(events) > _MAX_EVENTS:
            raise TraceError(f"{path}, line {number}: {len(events)} events; expected {_MAX_EVENTS} at most")
        return RunTrace(
            pipeline=_text(record["pipeline"]),
            question=_text(record["question"]),
            events=tuple(_event_of(dict(event)) for event in events),
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TraceError(f"{path}, line {number}: not a run ({error!r})") from error


def _event_of(record: dict[str, Any]) -> Event:
    kind = _KINDS[record.pop("kind")]
    if kind is Generated:
        if len(record["pieces"]) > _MAX_PIECES:
            raise ValueError(f"{len(record['pieces'])} pieces; expected {_MAX_PIECES} at most")
        record["pieces"] = tuple(_piece_of(piece) for piece in record["pieces"])
        _number(record["seconds"])
        for earlier, later in pairwise((0.0, *(piece.at_s for piece in record["pieces"]))):
            if later < earlier:
                raise ValueError("pieces are not in the order of their times")
    else:
        record = {name: _tuples(value) for name, value in record.items()}
    expected = {field.name for field in fields(kind)}
    if set(record) != expected:
        raise ValueError(f"fields are {sorted(record)}; expected {sorted(expected)}")
    return kind(**record)


def _piece_of(record: dict[str, Any]) -> Piece:
    piece = Piece(**{**record, "logprobs": tuple(_number(value) for value in record["logprobs"])})
    _text(piece.text)
    _number(piece.at_s)
    if isinstance(piece.tokens, bool) or not isinstance(piece.tokens, int) or piece.tokens < 0:
        raise ValueError(f"tokens is {piece.tokens!r}")
    return piece


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not text")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a number")
    return float(value)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


class ReplayGenerator:
    """Replays the generations of one recorded run in order, with their timings. One thread.

    A step that was not recorded raises TraceError. A recorded step with another prompt (nprobe differed, so passages
    did) gets the recorded text; :attr:`other_prompts` counts these.
    """

    def __init__(
        self,
        generations: Sequence[Generated],
        *,
        speed: float = 1.0,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """``speed``: how many times faster than recorded; ``math.inf``: without waiting.

        Raises:
            InvalidInputError: a speed that is not above 0.
        """
        if not speed > 0:
            raise InvalidInputError(f"speed is {speed!r}; expected a number above 0")
        self._generations = tuple(generations)
        self._next = 0
        self._speed = speed
        self._clock = clock
        self._sleep = sleep
        self.other_prompts = 0

    @property
    def left(self) -> int:
        """Generations that were not replayed yet."""
        return len(self._generations) - self._next

    def generate(self, prompt: Prompt, /) -> Iterator[Piece | Finished]:
        """As :meth:`hybridindex.rag.generator.Generator.generate`. Raises TraceError."""
        if not self.left:
            raise TraceError(f"step {prompt.name!r} was not recorded: the trace ends before it")
        recorded = self._generations[self._next]
        if recorded.name != prompt.name:
            raise TraceError(f"step {prompt.name!r} was not recorded: the trace has {recorded.name!r} here")
        self._next += 1
        if hashlib.sha256(prompt.text.encode()).hexdigest() != recorded.prompt_sha256:
            self.other_prompts += 1
        return self._pieces(recorded)

    def _pieces(self, recorded: Generated) -> Iterator[Piece | Finished]:
        started = self._clock()
        for piece in recorded.pieces:
            self._wait_until(started + piece.at_s / self._speed)
            yield piece
        self._wait_until(started + recorded.seconds / self._speed)
        yield Finished(
            reason=recorded.finish,
            prompt_tokens=recorded.prompt_tokens,
            completion_tokens=recorded.completion_tokens,
        )

    def _wait_until(self, due: float) -> None:
        left = due - self._clock()
        if left > 0:
            self._sleep(left)

    def close(self) -> None:
        """Owns nothing."""
