"""How a node goes on to another generation of the index with its cluster, while searches go on.

The manager has every node open the generation *beside* the one that serves, and take lists of it. The first map of that
generation lets it serve. What served before then scans for other nodes, until the manager says that none asks it any
more. So a node has up to three generations open: one beside, the one that serves, and one that *left*. Scans name
theirs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal

from hybridindex.errors import BuildError, HybridIndexError, InvalidInputError, OverloadedError
from hybridindex.index import open_index
from hybridindex.index.share.share import add_to_share, switch_share
from hybridindex.index.share.source import FolderSource
from hybridindex.index.storage.generation import generation_name, remove_generations, writers_lock
from hybridindex.router.remote.cluster_map import ClusterMap
from hybridindex.service.cluster.member import Member
from hybridindex.service.reload import Generations
from hybridindex.service.serving import ServedIndex, Serving, close_serving

__all__ = ["Members"]

_log = logging.getLogger(__name__)

#: For other nodes to answer the connections of a generation that is about to serve.
_PEERS_S, _LOOK_S = 3.0, 0.02
#: For another one that changes which generations the share has.
_LOCK_S = 10.0
#: Before a change that is under way is looked at again; and for threads to end.
_AGAIN_S, _ENDS_S = 0.2, 5.0
#: States of a generation that need not be opened.
_IN_USE = ("serves", "beside")
#: What is told of each generation.
_OF_EACH = ("fingerprint", "generation", "map_version", "held", "holding")


class Members:
    """Of one node. Methods may be called from any thread; those that change what is open block, and take turns."""

    def __init__(self, generations: Generations, one_change: Callable[[], AbstractContextManager[None]]) -> None:
        """
        Args:
            generations: what serves is a share, and has a member.
            one_change: around a change of what serves; OverloadedError: another one is under way.
        """
        self._generations, self._one_change = generations, one_change
        #: Held while what is open changes; not while something is opened.
        self._changing = threading.Lock()
        first = generations.current
        #: What is open, by its number, and by the name that scans give it. Replaced, never changed.
        self._open: Mapping[int, Serving] = {first.generation: first}
        self._of: Mapping[str, Serving] = {name_of(first): first}
        self._beside: int | None = None
        #: Of those that left, the ones that this node itself asks nothing of any more. Replaced, never changed.
        self._over: frozenset[int] = frozenset()
        self._opening: threading.Thread | None = None
        #: The generation that is being opened beside, or could not be: fingerprint and number; and why. None: there is
        #: none.
        self._wanted: tuple[str, int, str] | None = None
        self._emptying: threading.Thread | None = None
        self._closed = False

    @property
    def current(self) -> Member:
        """Of the generation that serves."""
        member = self._generations.current.member
        assert member is not None
        return member

    def of(self, generation: int | None) -> Member | None:
        """Of a generation that is open; None: of the one that serves."""
        if generation is None:
            return self.current
        serving = self._open.get(generation)
        return None if serving is None else serving.member

    def scanned(self, of: str) -> Serving | None:
        """What scans a generation, by its name in scans: fingerprint and number."""
        now = self._generations.current
        # Its router may have been replaced, for other devices.
        found = self._of.get(of)
        return now if found is not None and found.generation == now.generation else found

    def names(self) -> str:
        """What :meth:`scanned` finds."""
        return " and ".join(self._of)

    def all(self) -> list[Member]:
        """Of every generation that is open."""
        return [member for serving in self._open.values() if (member := serving.member) is not None]

    def know(self, number: int) -> int:
        """Looks for change ``number``, a moment long; the last one that searches see then, in whichever generation. One
        of an index that was built anew, or of the one before that, has other changes."""
        lineage = self.current.index.manifest.lineage
        return min(member.know(number) for member in self.all() if member.index.manifest.lineage == lineage)

    def pinged_by(self, name: str) -> bool:
        """Another node asks whether this one answers; whether it is up here, wherever maps name it."""
        seen = [member.remote.pinged_by(name) for member in self.all() if member.remote.map is not None]
        return bool(seen) and all(seen)

    # Opening another generation

    def open_beside(self, generation: int, fingerprint: str) -> None:
        """Begins to open a generation of the index beside the one that serves; :meth:`status` says when it is there, or
        why not. One that is beside already, and that no map named yet, is let go.

        Raises:
            BuildError: another one is being opened, or cannot be let go now; or one of this number has not been closed.
        """
        with self._changing:
            found = self._open.get(generation)
            if found is not None and found.index.fingerprint == fingerprint and self._state_of(generation) in _IN_USE:
                return
            if self._opening is not None and self._opening.is_alive():
                if self._wanted is not None and self._wanted[:2] == (fingerprint, generation):
                    return
                raise BuildError("the node is opening another generation; try again when it has")
            if (beside := self.of(self._beside)) is not None and beside is not self.current:
                if beside.remote.map is not None:
                    raise BuildError(f"the node is about to serve generation {self._beside}; try again when it does")
                self._let_go(beside.index.generation)
            if generation in self._open:
                raise BuildError(f"the node has not yet closed its earlier generation {generation}; try again later")
            self._wanted = fingerprint, generation, ""
            self._opening = threading.Thread(
                target=self._open_beside, args=(generation, fingerprint), name="hybridindex-beside", daemon=True
            )
            self._opening.start()

    def _open_beside(self, generation: int, fingerprint: str) -> None:
        try:
            beside = self._opened(generation, fingerprint)
        except Exception as error:  # noqa: BLE001 - the manager is told
            _log.exception("generation %d could not be opened beside the one that serves", generation)
            self._wanted = fingerprint, generation, str(error) or type(error).__name__
            return
        with self._changing:
            self._wanted = None
            if not self._closed:
                self._put({**self._open, generation: beside})
                self._beside = generation
        if self._closed:
            close_serving(beside)
            return
        # From here on whoever tells of a change waits for both; what was told before is looked for now.
        assert beside.member is not None
        beside.member.know(self.current.number)

    def _opened(self, generation: int, fingerprint: str) -> Serving:
        member, now = self.current, self._generations.current
        if member.source is None:
            raise InvalidInputError("this node knows no index that another generation could come from")
        source = FolderSource(member.source, generation=generation, is_followed=True)
        if source.manifest.fingerprint != fingerprint:
            raise InvalidInputError(
                f"generation {generation} of this node's index is {source.manifest.fingerprint}; expected {fingerprint}"
            )
        add_to_share(now.index.path, source)
        index = ServedIndex(open_index(now.index.path, changes_of=member.source, generation=generation))
        try:
            index.member = Member(
                index.ivf,
                member.remote.name,
                source=member.source,
                memory_bytes=member.memory_bytes,
                ca=member.ca,
                before=member,
            )
        except BaseException:
            index.close()
            raise
        return self._generations.open_beside(index)

    def _put(self, opened: Mapping[int, Serving]) -> None:
        self._open = opened
        self._of = {name_of(serving): serving for serving in opened.values()}

    # Maps

    def apply(self, map_: ClusterMap) -> bool | None:
        """Puts a map in force, and keeps it; one of the generation beside lets that serve. False: it is older than the
        one that is; None: its generation is not open.

        Raises:
            As :meth:`Member.apply`. OverloadedError: another change is under way, or the daemon is about to stop.
            FileError, BuildError: the share could not be switched. What served serves on.
        """
        now = self.current
        if now.is_of(map_):
            return now.apply(map_)
        with self._changing:
            now, beside = self.current, None if self._beside is None else self._open[self._beside]
            if now.is_of(map_):
                return now.apply(map_)
            if beside is None or beside.member is None or not beside.member.is_of(map_):
                return None
            if now.remote.map is not None and map_.version <= now.remote.map.version:
                return False
            with self._one_change():
                beside.member.apply(map_)
                self._wait_for_peers(now, beside.member)
                beside.member.know(now.number)
                # Its router may be another one than it was opened with; others ask it from now on.
                before = self._generations.current
                self._put({**self._open, before.generation: before})
                switch_share(beside.index.path, beside.generation)
                self._generations.serve_beside(beside)
                self._beside = None
                beside.member.serve()
            # One at a time: devices go from one to the next.
            after = self._emptying
            self._emptying = threading.Thread(
                target=self._empty, args=(before, after), name="hybridindex-emptying", daemon=True
            )
            self._emptying.start()
        _log.info("generation %d serves, in place of %d", beside.generation, before.generation)
        return True

    def _wait_for_peers(self, now: Member, beside: Member) -> None:
        """Until nodes that answer the generation that serves answer the one beside: a search would miss them."""
        up = {peer.node.name for peer in now.remote.peers() if peer.up}
        ends_s = time.monotonic() + _PEERS_S
        while time.monotonic() < ends_s:
            if all(peer.up for peer in beside.remote.peers() if peer.node.name in up):
                return
            time.sleep(_LOOK_S)

    def _empty(self, old: Serving, after: threading.Thread | None) -> None:
        if after is not None:
            after.join()

        def put(heir: Serving) -> None:
            with self._changing:
                if old.generation in self._open:
                    self._put({**self._open, old.generation: heir})

        while not self._closed:
            try:
                with self._one_change():
                    self._generations.retire_for_others(old, put)
                break
            except OverloadedError:
                time.sleep(_AGAIN_S)
            except Exception:  # noqa: BLE001 - what serves goes on
                _log.exception("generation %d could not be closed", old.generation)
                break
        # Changes of rows may be on their way over its connections; later ones take those of what serves.
        while old.member is not None and not old.member.changes.is_idle and not self._closed:
            time.sleep(_LOOK_S)
        with self._changing:
            self._over |= {old.generation}

    def let_go(self, generation: int) -> None:
        """Closes a generation that does not serve, and removes it; forgets one that could not be opened.

        Raises:
            InvalidInputError: it serves. BuildError: this node still searches it; ask again.
        """
        with self._changing:
            if generation == self._generations.current.generation:
                raise InvalidInputError(f"generation {generation} serves; expected another one")
            if generation in self._open:
                if self._state_of(generation) == "left":
                    raise BuildError(f"searches of generation {generation} are under way; try again later")
                self._let_go(generation)
            opening = self._opening is not None and self._opening.is_alive()
            if not opening:
                self._wanted = None
                self._remove_others()

    def _let_go(self, generation: int) -> None:
        serving = self._open[generation]
        self._put({number: each for number, each in self._open.items() if number != generation})
        self._over -= {generation}
        if self._beside == generation:
            self._beside = None
        close_serving(serving)

    def _remove_others(self) -> None:
        """The files of generations that are not open."""
        path = self._generations.current.index.path
        kept: set[str | None] = {generation_name(number) for number in self._open}
        try:
            with writers_lock(path, timeout_s=_LOCK_S):
                remove_generations(path, but=kept)
        except HybridIndexError as error:
            _log.warning("earlier generations stay on disk until this node restarts: %s", error)

    # What it tells

    def _state_of(self, generation: int) -> Literal["serves", "beside", "left", "over"]:
        if generation == self._generations.current.generation:
            return "serves"
        if generation == self._beside:
            return "beside"
        return "over" if generation in self._over else "left"

    def status(self) -> dict[str, Any]:
        """As of :meth:`Member.status`, of the generation that serves; and ``generations``, of all that are open or were
        to be."""
        opened, wanted = dict(self._open), self._wanted
        states = []
        for number, serving in sorted(opened.items()):
            member = serving.member
            assert member is not None
            said = member.status()
            states.append(
                {
                    **{name: said[name] for name in _OF_EACH}, "state": self._state_of(number), "error": "",
                }
            )  # fmt: skip
        if wanted is not None:
            fingerprint, number, error = wanted
            said = {**dict.fromkeys(_OF_EACH), "fingerprint": fingerprint, "generation": number, "error": error}
            states.append({**said, "state": "failed" if error else "opening"})
        return {**self.current.status(), "generations": states}

    def close(self) -> None:
        """Closes all generations but the one that serves, which is the caller's. Before that one."""
        self._closed = True
        for thread in (self._opening, self._emptying):
            if thread is not None:
                thread.join(_ENDS_S)  # a file system may keep it
        with self._changing:
            serving = self._generations.current
            rest = [each for each in self._open.values() if each.generation != serving.generation]
            self._put({serving.generation: serving})
        for each in rest:
            close_serving(each)


def name_of(serving: Serving) -> str:
    """How scans name a generation."""
    ivf = serving.index.ivf
    return f"{ivf.fingerprint}.{ivf.generation}"
