"""The daemon's state machine: all rules, and what holds after each.

Whatever happens, the daemon starts, its answers are those of the oracle or a documented error, and what was
acknowledged is there after any kill. A killed call is looked up on disk afterwards: it was made, or it was not.
"""

from __future__ import annotations

import sys
import traceback

from hypothesis import strategies as st
from hypothesis.errors import StopTest
from hypothesis.stateful import invariant, precondition, rule

from tests.durability.machine.asking import Asking
from tests.durability.machine.base import NUMBERS, SEEDS, counts, running
from tests.durability.machine.failing import Failing
from tests.durability.machine.guarding import Guarding
from tests.durability.machine.living import Living
from tests.durability.machine.planning import Planning
from tests.durability.machine.replacing import Replacing
from tests.durability.machine.world import NLIST
from tests.storage_looks import looked_at

__all__ = ["DaemonMachine"]


class DaemonMachine(Living, Asking, Planning, Replacing, Guarding, Failing):
    @precondition(running)
    @rule(who=NUMBERS, content=st.sampled_from(["a", "b", "c"]), seed=SEEDS)
    def a_session_outlives_its_generation(self, who: int, content: str, seed: int) -> None:
        self.open_session(who)
        self.replace(content, "route", deadly=False)
        self.search_in_session(len(self.model.sessions) - 1, seed, NLIST)

    @invariant()
    def health_is_true(self) -> None:
        model = self.model
        if not model.running:
            return
        answer = looked_at(
            lambda: self.world.ask("GET", "/healthz", self.root), lambda found: found.data if found else {"checks": ()}
        )
        assert answer is not None
        checks = {check["name"]: check["ok"] for check in answer.data["checks"]}
        assert answer.status == (200 if all(checks.values()) else 503)
        for name, ok in checks.items():
            expected = {
                "disk": not model.disk_full,
                "keys": not model.keys_damaged,
                "control store": None if model.store_doubt or model.disk_full else True,
            }.get(name, None if model.device_doubt else True)
            assert expected in (None, ok), answer.data
        self.note_status()
        counts["health checked"] += 1

    def teardown(self) -> None:
        failed = sys.exc_info()[0]
        try:
            if failed is None:
                self._end_well()
        except BaseException as error:
            failed = type(error)
            raise
        finally:
            if failed not in (None, StopTest):
                # Said at once, as a daemon may behave otherwise when hypothesis tries the steps again.
                traceback.print_exc(file=sys.stdout)
                print(self.model, self.world.said, sep="\n")
            self.world.close()

    def _end_well(self) -> None:
        """Whatever happened: without faults it starts, and all that was acknowledged is there."""
        model = self.model
        self.world.all_off()
        self.world.make_room()
        model.disk_full = model.device_broken = False
        if model.keys_damaged:
            self.mend_keys()
        if model.running:
            self.kill()
        if model.store_damaged:
            self.lose_store("deleted")
        self.start("current", 30, None)
        self.search("json", 0, 8, 0, 5, NLIST)
        self.terminate(held=False, seed=0)
