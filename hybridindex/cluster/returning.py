"""Nodes whose machine was restarted: Ray sees a new machine then, and does not start their actors again."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybridindex import filesystem
from hybridindex.cluster.keys import ClusterKeys
from hybridindex.cluster.node_process import NodeSpec
from hybridindex.errors import CorruptIndexError, FileError, MissingFileError

__all__ = ["MACHINES_FILE", "Returning", "keep_machines", "machine_of"]

_log = logging.getLogger(__name__)

#: In the cluster's folder: where each node was started, and with what. Without the keys.
MACHINES_FILE = "machines.json"
#: Between two looks, and after a node that could not be started.
_LOOK_S, _AGAIN_S = 2.0, 30.0


def machine_of(place: dict[str, Any]) -> str:
    """Host name and address of one of Ray's machines: they stay when it is restarted, and Ray's id of it does not."""
    return f"{place['NodeManagerHostname']} at {place['NodeManagerAddress']}"


def keep_machines(folder: Path, specs: Sequence[NodeSpec], places: Sequence[dict[str, Any]]) -> None:
    """Adds nodes to those that are known."""
    known = _read(folder)
    for spec, place in zip(specs, places, strict=True):
        values = asdict(spec)
        del values["key"], values["write_key"], values["search_key"]
        known[spec.name] = {"machine": machine_of(place), "spec": values}
    filesystem.replace_file(folder / MACHINES_FILE, json.dumps(known), permissions=0o600)


def _read(folder: Path) -> dict[str, Any]:
    try:
        known: dict[str, Any] = json.loads(filesystem.read_bytes(folder / MACHINES_FILE))
    except MissingFileError:
        return {}
    except (FileError, ValueError) as error:
        raise CorruptIndexError(f"{folder / MACHINES_FILE} cannot be used: {error}") from error
    return known


class Returning:
    """Owner of a thread that starts nodes again: where their actor has ended, and Ray has a machine with the host name
    and the address of theirs, on which their share lies."""

    def __init__(
        self,
        folder: Path,
        keys: ClusterKeys,
        silent: Callable[[], Sequence[str]],
        places: Callable[[], Sequence[dict[str, Any]]],
        has_actor: Callable[[str], bool],
        start: Callable[[NodeSpec, dict[str, Any]], str],
        on_return: Callable[[NodeSpec, str], None],
    ) -> None:
        """
        Args:
            silent: names of nodes that do not answer, and should.
            places: Ray's machines that are alive.
            has_actor: whether Ray has a node's actor, or will start it again.
            start: starts a node's actor at a place; its URL.
            on_return: told what was started, and its URL.
        """
        self._folder, self._keys = folder, keys
        self._silent, self._places, self._has_actor = silent, places, has_actor
        self._start, self._on_return = start, on_return
        #: Of nodes that cannot return: why, and what helps.
        self.problems: dict[str, str] = {}
        self._not_before_s: dict[str, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hybridindex-returning", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_S):
            try:
                self.look()
            except Exception:  # noqa: BLE001 - it is tried again
                _log.exception("nodes whose machine returned could not be looked for")

    def look(self) -> None:
        """Starts what has returned."""
        silent = [name for name in self._silent() if not self._has_actor(name)]
        self.problems = {name: words for name, words in self.problems.items() if name in silent}
        if not silent:
            return
        known, places = _read(self._folder), {machine_of(place): place for place in self._places()}
        for name in silent:
            if name in known and time.monotonic() >= self._not_before_s.get(name, 0.0):
                machine = known[name]["machine"]
                if machine in places:
                    self._return(_spec_of(known[name], self._keys), places[machine])
                else:
                    self.problems[name] = (
                        f"its machine, {machine}, is none of Ray's now; it returns by itself when that joins Ray again "
                        f"with the same host name and address; where it is lost for good: hybridindex cluster drain "
                        f"INDEX {name}"
                    )

    def _return(self, spec: NodeSpec, place: dict[str, Any]) -> None:
        try:
            url = self._start(spec, place)
        except Exception as error:  # noqa: BLE001 - Ray has no class of its own for an actor that does not start
            _log.warning("node %s did not return: %s", spec.name, error)
            self.problems[spec.name] = (
                f"its machine, {machine_of(place)}, is back, and it did not start there: {error}; without it: "
                f"hybridindex cluster drain INDEX {spec.name}, then hybridindex cluster add-node INDEX"
            )
            self._not_before_s[spec.name] = time.monotonic() + _AGAIN_S
            return
        self.problems.pop(spec.name, None)
        _log.info("node %s returned at %s", spec.name, url)
        self._on_return(spec, url)

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join()


def _spec_of(known: dict[str, Any], keys: ClusterKeys) -> NodeSpec:
    values = dict(known["spec"])
    shown = {"key": keys.admin, "write_key": keys.write, "search_key": keys.search}
    return NodeSpec(**{**values, **shown, "options": tuple(values["options"]), "returns": True})
