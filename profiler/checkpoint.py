"""Finished stages of an interrupted profile, in one ``.npz`` file (no pickle), so that the next attempt resumes.

A checkpoint belongs to one key: index, machine, queries and parameters. One of another key, or a damaged one, is
overwritten. Losing a checkpoint only costs time, so failures to write one are logged, not raised.
"""

from __future__ import annotations

import json
import logging
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridindex import filesystem
from hybridindex.errors import FileError, MissingFileError

__all__ = ["Checkpoint"]

_log = logging.getLogger(__name__)
_FORMAT = 1
_HEAD = "head"

Arrays = Mapping[str, npt.NDArray[Any]]


class Checkpoint:
    """Owner of the file at ``path``; without a path it keeps nothing. Not thread-safe."""

    def __init__(self, path: Path | None, key: str) -> None:
        """Reads what is there for ``key``."""
        self._path = path
        self._key = key
        #: Stage -> JSON value, and "stage/name" -> array.
        self._facts: dict[str, Any] = {}
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        if path is not None:
            self._read(path)

    def get(self, stage: str) -> tuple[Any, dict[str, npt.NDArray[Any]]] | None:
        """The JSON value and arrays of a finished stage, or None."""
        if stage not in self._facts:
            return None
        prefix = f"{stage}/"
        arrays = {name.removeprefix(prefix): a for name, a in self._arrays.items() if name.startswith(prefix)}
        return self._facts[stage], arrays

    def put(self, stage: str, facts: Any, arrays: Arrays | None = None) -> None:
        """Keeps a finished stage; the file is replaced as a whole."""
        self._facts[stage] = facts
        for name, array in (arrays or {}).items():
            self._arrays[f"{stage}/{name}"] = array
        if self._path is None:
            return
        head = json.dumps({"format": _FORMAT, "key": self._key, "stages": self._facts}).encode()
        try:
            with filesystem.replacing(self._path) as beside:
                filesystem.write_arrays(beside, **{_HEAD: np.frombuffer(head, dtype=np.uint8)}, **self._arrays)
        except FileError as error:
            _log.warning("no checkpoint at %s: %s; an interrupted profile would start anew", self._path, error)

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
            facts = dict(head["stages"])
        except MissingFileError:
            return
        except FileError as error:
            _log.warning("the checkpoint %s is not used: %s", path, error)
            return
        except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            _log.warning("the checkpoint %s is damaged and not used: %s", path, error)
            return
        if usable:
            self._facts, self._arrays = facts, arrays
        else:
            _log.info("the checkpoint %s is of another profile and not used", path)
