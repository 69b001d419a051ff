"""Output and exit statuses of commands: tables for people, one JSON object for programs, progress on stderr."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, is_dataclass
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from hybridindex import errors, filesystem
from hybridindex.config import parse_bytes
from hybridindex.errors import HybridIndexError, InvalidInputError

__all__ = [
    "CliProgress",
    "ExitCode",
    "emit",
    "exit_code_of",
    "fail",
    "load_ids",
    "load_npy",
    "ms",
    "parse_bytes",
    "readable_bytes",
    "refuse_special_file",
    "require_store",
    "show_json_error",
    "telling_commit",
]


class _Output(Console):
    """Breaks what is too long for a column of a table, in place of "…": paths and commands are there to be copied."""

    def print(self, *objects: Any, **how: Any) -> None:
        for shown in objects:
            _fold(shown)
        super().print(*objects, **how)


def _fold(shown: Any) -> None:
    if isinstance(shown, Group):
        for part in shown.renderables:
            _fold(part)
    elif isinstance(shown, Table):
        for column in shown.columns:
            column.overflow = "fold"


# No markup: names, paths and errors may hold square brackets, as "hybridindex[gpu]" does.
out = _Output(markup=False)
err = Console(stderr=True, markup=False)


class ExitCode(IntEnum):
    """Exit status of every command."""

    OK = 0
    UNEXPECTED = 1
    #: Bad option or argument (Typer's own as well).
    USAGE = 2
    BAD_INPUT = 3
    BAD_INDEX = 4
    #: No usable profile or plan, or a control store that cannot be used.
    NO_PROFILE = 5
    #: A missing device or package.
    MISSING = 6
    BUILD_FAILED = 7
    #: No daemon or LLM server answers, or it refused.
    SERVICE = 8
    #: The SLO cannot be met: ``plan`` stored the best effort; nothing applied it without ``--force``.
    INFEASIBLE = 10
    #: ``doctor``: something that the core needs is missing.
    UNHEALTHY = 11
    INTERRUPTED = 130


_CODES: tuple[tuple[type[BaseException], ExitCode], ...] = (
    (errors.InfeasiblePlanError, ExitCode.INFEASIBLE),
    (errors.InvalidInputError, ExitCode.BAD_INPUT),
    (errors.IndexFormatError, ExitCode.BAD_INDEX),
    (errors.NotHeldError, ExitCode.BAD_INDEX),
    (errors.BuildError, ExitCode.BUILD_FAILED),
    (errors.StoreError, ExitCode.NO_PROFILE),
    (errors.ProfileError, ExitCode.NO_PROFILE),
    (errors.DeviceError, ExitCode.MISSING),
    (errors.MissingDependencyError, ExitCode.MISSING),
    (errors.ServiceError, ExitCode.SERVICE),
    (errors.PlanningError, ExitCode.SERVICE),
    (errors.LLMServerError, ExitCode.SERVICE),
    (errors.GenerationError, ExitCode.SERVICE),
    (errors.EmbeddingError, ExitCode.SERVICE),
    (errors.DocumentStoreError, ExitCode.BAD_INDEX),
    (errors.TraceError, ExitCode.BAD_INPUT),
    (errors.FileError, ExitCode.BAD_INPUT),
    (KeyboardInterrupt, ExitCode.INTERRUPTED),
)


def exit_code_of(error: BaseException) -> ExitCode:
    return next((code for kind, code in _CODES if isinstance(error, kind)), ExitCode.UNEXPECTED)


def to_json(value: Any) -> Any:
    """Dataclasses, numpy values and paths as plain JSON values; non-finite numbers become null."""
    if is_dataclass(value) and not isinstance(value, type):
        return to_json(asdict(value))
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, np.ndarray):
        return to_json(value.tolist())
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    if isinstance(value, np.generic):
        return to_json(value.item())
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    return value


def emit(payload: Any, *, as_json: bool, table: Any = None) -> None:
    """Prints ``payload`` as one JSON object, or ``table`` (anything Rich prints).

    Raises:
        OSError: standard output is closed, or takes no more.
    """
    if sys.stdout is None:  # closed, as by >&-
        raise OSError("standard output is closed")
    if as_json:
        sys.stdout.write(json.dumps(to_json(payload), allow_nan=False) + "\n")
        sys.stdout.flush()
    elif table is not None:
        out.print(table)


def show_json_error(kind: str, message: str, code: ExitCode) -> None:
    """Prints one JSON object with the error on stdout, where that takes it."""
    with suppress(OSError):
        emit({"error": {"type": kind, "message": message, "exit_code": int(code)}}, as_json=True)


def fail(error: BaseException, *, as_json: bool) -> int:
    """Prints an error, as far as the output takes it, and returns its exit status."""
    code = exit_code_of(error)
    message = str(error)
    if isinstance(error, KeyboardInterrupt):
        message = message or "interrupted; no partial result was left"
    if isinstance(error, errors.AccessDeniedError) and "--key" not in message:
        message += "; pass a key with --key or HYBRIDINDEX_KEY"
    kind = type(error).__name__
    if as_json:
        show_json_error(kind, message, code)
    with suppress(OSError):
        err.print(Text(kind, style="bold red"), end=": ", soft_wrap=True)
        err.print(message, highlight=False, soft_wrap=True)
    return int(code)


@contextmanager
def telling_commit(index: Path, *, as_json: bool) -> Iterator[None]:
    """Around what makes a generation of ``index``: a Ctrl-C that comes after the commit says that it stands."""
    before = _generation(index)
    try:
        yield
    except KeyboardInterrupt:
        now = _generation(index)
        if now in (None, before):
            raise
        words = f"interrupted after generation {now} was committed: it is complete and current; to inspect it: "
        sys.exit(fail(KeyboardInterrupt(f"{words}hybridindex verify {index}"), as_json=as_json))


def _generation(index: Path) -> int | None:
    from hybridindex.index import read_manifest

    try:
        return read_manifest(index).generation
    except HybridIndexError:
        return None


class CliProgress:
    """A progress callback ``(stage, done, total)`` that draws one bar per stage on stderr."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._bars = Progress(
            TextColumn("{task.description:<24}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=err,
            disable=quiet,
            transient=False,
        )
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        if stage not in self._tasks:
            for earlier in self._tasks.values():  # a bar without a total would keep running
                self._bars.stop_task(earlier)
            self._tasks[stage] = self._bars.add_task(stage, total=total)
        self._bars.update(self._tasks[stage], completed=done, total=total)

    def __enter__(self) -> CliProgress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()


def ms(seconds: float) -> str:
    """A time for tables, in milliseconds."""
    return f"{seconds * 1e3:.3g}" if math.isfinite(seconds) else "never"


def readable_bytes(nbytes: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def require_store(url: str | None) -> None:
    """For commands that only read the control store at ``url``. To open one that is missing makes an empty one.

    Raises:
        InvalidInputError: ``--store`` names a file that is not there.
    """
    from hybridindex.store.engine import locate

    place = locate(url) if url else None
    if place is not None and place.path is not None and not filesystem.exists(place.path):
        raise InvalidInputError(f"--store is {url!r}, which does not exist; expected a control store")


def refuse_special_file(path: Path, what: str) -> None:
    """For files that are written under another name and renamed: a device or a pipe would be gone after that.

    Raises:
        InvalidInputError: ``path`` is neither missing, nor a folder, nor a regular file.
    """
    if filesystem.exists(path) and not filesystem.is_dir(path) and not filesystem.is_file(path):
        raise InvalidInputError(f"{what} is {str(path)!r}, a device or a pipe; expected a new or regular file")


def load_ids(path: Path, what: str) -> np.ndarray[Any, Any]:
    """Ids in a ``.npy`` file, or one on each line of a text.

    Raises:
        InvalidInputError: missing, unreadable, or a line that is no integer.
    """
    if path.suffix.lower() == ".npy":
        return load_npy(path, what)
    expected = "expected a .npy file, or a text file with one id per line"
    try:
        lines = filesystem.read_text(path).split("\n")
    except errors.FileError as error:
        raise InvalidInputError(f"{what}: {error}; {expected}") from error
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{what}: {path} is not UTF-8 text; {expected}") from error
    ids = []
    for number, line in enumerate(lines, 1):
        try:
            ids += [np.int64(line)] if line.strip() else []
        except (ValueError, OverflowError):
            named = f"{what}: line {number} of {path} is {line[:40]!r}"
            raise InvalidInputError(f"{named}; expected a 64-bit integer") from None
    return np.array(ids, dtype=np.int64)


def load_npy(path: Path, what: str) -> np.ndarray[Any, Any]:
    """The array of a ``.npy`` file, or the float32 vectors of an ``.fvecs`` or ``.bvecs`` file; mapped where it can be.

    Raises:
        InvalidInputError: missing, no such file, truncated, or pickled objects.
    """
    from hybridindex.index.inputs.elements import as_float32, holds_vectors
    from hybridindex.index.inputs.matrices import VECS, map_vecs

    if path.suffix.lower() in VECS:
        return as_float32(map_vecs(path))
    try:
        with filesystem.performing("map", path):
            array = np.load(path, mmap_mode="r", allow_pickle=False)
    except errors.MissingFileError:
        raise InvalidInputError(f"{what}: {path} does not exist; expected a .npy file") from None
    except errors.FileError as error:
        raise InvalidInputError(f"{what}: {error}") from error
    except Exception as error:  # numpy parses the header as Python, and raises what the parser does
        from hybridindex.index.inputs.matrices import why_no_npy

        why = why_no_npy(path, error)
        raise InvalidInputError(f"{what}: {path} is not a readable .npy file ({why}); numpy.save writes one") from error
    if not isinstance(array, np.ndarray):
        raise InvalidInputError(f"{what}: {path} is an archive; expected a .npy file with one array")
    return as_float32(array) if array.ndim == 2 and holds_vectors(array.dtype) else array
