"""Rules: keys come and go, and their file is damaged."""

from __future__ import annotations

import shutil

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from hybridindex.cli.console import ExitCode
from hybridindex.service.auth import KeyFile
from tests.durability.machine.base import Base, counts, points
from tests.durability.machine.model import Key
from tests.durability.machine.world import KILL
from tests.durability.points import Point

__all__ = ["Guarding"]

KEY_WRITERS = points("os:open", "os:fsync", "os:replace")
NAMES = st.sampled_from(["ann", "bob", "cid"])


class Guarding(Base):
    @rule(name=NAMES, role=st.sampled_from(["search", "admin"]), at=KEY_WRITERS)
    def add_key(self, name: str, role: str, at: Point | None) -> None:
        model = self.model
        if model.keys_damaged:
            return
        status, said = self.world.command("keys", "add", self.world.keys, name, "--role", role, at=at)
        if status == -KILL:
            self._keys_are(name)
        elif name in model.keys or name in model.unknown_keys:
            assert status == ExitCode.BAD_INPUT, said
        elif status:
            assert model.disk_full, said
            assert status == ExitCode.BUILD_FAILED, said
        else:
            model.keys[name] = Key(name, said["key"], role)
            self._may(model.keys[name], 200)
        self._keys_are()

    @rule(name=NAMES, at=KEY_WRITERS)
    def revoke_key(self, name: str, at: Point | None) -> None:
        model = self.model
        if model.keys_damaged:
            return
        status, said = self.world.command("keys", "revoke", self.world.keys, name, at=at)
        if status == -KILL:
            self._keys_are(name)
        elif name not in model.keys and name not in model.unknown_keys:
            assert status == ExitCode.BAD_INPUT, said
        elif status:
            assert model.disk_full, said
            assert status == ExitCode.BUILD_FAILED, said
        else:
            gone = model.keys.pop(name, None)
            model.unknown_keys.discard(name)
            if gone is not None:
                self._may(gone, 401)
                model.sessions = [session for session in model.sessions if session.key != gone]
        self._keys_are()

    def _may(self, key: Key, status: int) -> None:
        """What a running daemon says to a key, at once; one for searches changes nothing."""
        if not self.model.running:
            return
        answer = self.world.ask("GET", "/v1/status", key)
        assert answer is not None
        assert answer.status == status, answer
        if status == 200:
            answer = self.world.ask("POST", "/v1/plans/99999/apply", key, json={})
            assert answer is not None
            assert (answer.status == 403) == (key.role != "admin"), answer

    def _keys_are(self, killed: str = "") -> None:
        """The file holds the keys of the model. ``killed``: the change of this one may have been made."""
        model = self.model
        found = {key.name for key in KeyFile(self.world.keys).read()}
        known = set(model.keys) | model.unknown_keys
        assert found ^ known <= {killed}, (found, known)
        if killed:
            counts["command killed"] += 1
            gone = model.keys.get(killed)
            if killed in known - found:
                model.keys.pop(killed, None)
                model.unknown_keys.discard(killed)
                model.sessions = [session for session in model.sessions if session.key != gone]
            elif killed in found - known:
                model.unknown_keys.add(killed)

    @precondition(lambda self: not self.model.keys_damaged)
    @rule()
    def damage_keys(self) -> None:
        shutil.copy2(self.world.keys, self.world.outside / "keys")
        self.world.keys.write_text("{")
        self.model.keys_damaged = True
        counts["keys damaged"] += 1

    @precondition(lambda self: self.model.keys_damaged)
    @rule()
    def mend_keys(self) -> None:
        shutil.copy2(self.world.outside / "keys", self.world.keys)
        self.model.keys_damaged = False
