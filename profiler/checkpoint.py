"""Finished stages of an interrupted profile, in one ``.npz`` file (no pickle), so that the next attempt resumes.

A checkpoint belongs to one key: index, machine, queries and parameters. One of another key, or a damaged one, is
overwritten. Stages keep the time and the load of the machine when they ended: those older than :data:`MAX_AGE_S` are
not used, since the machine may have changed, and those that are used are told. Losing a checkpoint only costs time, so
failures to write one are logged, not raised.
"""

from __future__ import annotations

import json
import logging
import time
import zipfile
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hybridindex import filesystem
from hybridindex.errors import FileError, MissingFileError
from hybridindex.profiler.hardware import load_average

__all__ = ["MAX_AGE_S", "Checkpoint"]

_log = logging.getLogger(__name__)
_FORMAT = 3
#: Seconds for which a finished stage can be resumed.
MAX_AGE_S: Final = 3600.0
_HEAD = "head"

Arrays = Mapping[str, npt.NDArray[Any]]


class Checkpoint:
    """Owner of the file at ``path``; without a path it keeps nothing. Not thread-safe."""

    def __init__(
        self,
        path: Path | None,
        key: str,
        *,
        max_age_s: float = MAX_AGE_S,
        clock: Callable[[], float] | None = None,
        load: Callable[[], float] | None = None,
    ) -> None:
        """Reads what is there for ``key`` and not older than ``max_age_s``.

        Args:
            clock: seconds since 1970; None: this machine's.
            load: processes that run; None: this machine's load average.
        """
        self._path = path
        self._key = key
        self._max_age_s = max_age_s
        self._clock, self._load = clock or time.time, load or load_average
        #: Stage -> seconds since 1970 and load when it ended.
        self._ended: dict[str, tuple[float, float]] = {}
        #: Stages that an earlier attempt finished; and those of them that were asked for.
        self._earlier: set[str] = set()
        self._resumed: list[str] = []
        #: Stage -> JSON value, and "stage/name" -> array.
        self._facts: dict[str, Any] = {}
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        if path is not None:
            self._read(path)

    @property
    def resumed(self) -> dict[str, dict[str, Any]]:
        """Stages of an earlier attempt that were asked for: when each was measured, and the load average then."""
        return {
            stage: {"measured_at": _words(self._ended[stage][0]), "load_average": self._ended[stage][1]}
            for stage in self._resumed
        }

    def get(self, stage: str) -> tuple[Any, dict[str, npt.NDArray[Any]]] | None:
        """The JSON value and arrays of a finished stage, or None."""
        if stage not in self._facts:
            return None
        if stage in self._earlier and stage not in self._resumed:
            self._resumed.append(stage)
            at, load = self._ended[stage]
            _log.warning("%s was measured at %s, at a load average of %.1f: resumed", stage, _words(at), load)
        prefix = f"{stage}/"
        arrays = {name.removeprefix(prefix): a for name, a in self._arrays.items() if name.startswith(prefix)}
        return self._facts[stage], arrays

    def put(self, stage: str, facts: Any, arrays: Arrays | None = None) -> None:
        """Keeps a finished stage; the file is replaced as a whole."""
        self._drop(stage)
        self._facts[stage] = facts
        self._ended[stage] = self._clock(), self._load()
        for name, array in (arrays or {}).items():
            self._arrays[f"{stage}/{name}"] = array
        if self._path is None:
            return
        said = {
            "format": _FORMAT,
            "key": self._key,
            "stages": self._facts,
            "ended": self._ended,
            "arrays": sorted(self._arrays),
        }
        head = json.dumps(said).encode()
        try:
            with filesystem.replacing(self._path) as beside:
                filesystem.write_arrays(beside, **{_HEAD: np.frombuffer(head, dtype=np.uint8)}, **self._arrays)
        except FileError as error:
            _log.warning("no checkpoint at %s: %s; an interrupted profile would start anew", self._path, error)

    def forget(self) -> None:
        """Drops all stages: what is measured from now on is not of a piece with them."""
        for stage in list(self._facts):
            self._drop(stage)

    def remove(self) -> None:
        """To be called when what was measured is complete."""
        if self._path is None:
            return
        filesystem.discard(self._path)

    def _read(self, path: Path) -> None:
        try:
            arrays = filesystem.read_arrays(path)
            head = json.loads(arrays.pop(_HEAD).tobytes())
            usable = head["format"] == _FORMAT and head["key"] == self._key
            facts = dict(head["stages"]) if usable else {}
            ended = {stage: (float(head["ended"][stage][0]), float(head["ended"][stage][1])) for stage in facts}
            if usable and sorted(arrays) != head["arrays"]:
                raise ValueError(f"it holds the arrays {sorted(arrays)}, not {head['arrays']}")
        except MissingFileError:
            return
        except FileError as error:
            _log.warning("the checkpoint %s is not used: %s", path, error)
            return
        except (ValueError, LookupError, TypeError, EOFError, OSError, RuntimeError, zipfile.BadZipFile) as error:
            # RuntimeError and OSError: of flags and places in the archive that make no sense.
            _log.warning("the checkpoint %s is damaged and not used: %s", path, error)
            return
        if not usable:
            _log.info("the checkpoint %s is of another profile and not used", path)
            return
        self._facts, self._arrays, self._ended, self._earlier = facts, arrays, ended, set(facts)
        now = self._clock()
        for stage, (at, _) in list(ended.items()):
            if not 0 <= now - at <= self._max_age_s:
                _log.warning(
                    "%s was measured at %s, not within the last %.0f minutes: it is measured again",
                    stage,
                    _words(at),
                    self._max_age_s / 60,
                )
                self._drop(stage)

    def _drop(self, stage: str) -> None:
        self._facts.pop(stage, None)
        self._ended.pop(stage, None)
        self._earlier.discard(stage)
        if stage in self._resumed:
            self._resumed.remove(stage)
        for name in [name for name in self._arrays if name.startswith(f"{stage}/")]:
            del self._arrays[name]


def _words(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
