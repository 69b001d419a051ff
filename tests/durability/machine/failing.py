"""Rules: the disk is full, the control store is lost or damaged, the device fails."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.durability.machine.base import Base, counts
from tests.durability.machine.hooks import BROKEN_DEVICE

__all__ = ["Failing"]


class Failing(Base):
    @precondition(lambda self: self.lab.mounted and not self.model.disk_full)
    @rule()
    def fill_disk(self) -> None:
        self.world.fill()
        self.model.disk_full = True
        counts["disk filled"] += 1

    @precondition(lambda self: self.model.disk_full)
    @rule()
    def make_room(self) -> None:
        self.world.make_room()
        self.model.disk_full = False

    @rule(
        how=st.sampled_from(["deleted", "database deleted", "other index's", "empty", "junk", "truncated", "flipped"])
    )
    def lose_store(self, how: str) -> None:
        """The control store is lost, or damaged in place."""
        model = self.model
        lost = self.world.lose_store(how)
        model.forget_plans()
        model.store_damaged = not lost
        model.store_doubt = model.running
        counts[f"store {how}"] += 1

    @precondition(lambda self: not self.model.device_broken)
    @rule()
    def break_device(self) -> None:
        self.world.switch(BROKEN_DEVICE, on=True)
        self.model.device_broken = self.model.device_doubt = True
        counts["device broken"] += 1

    @precondition(lambda self: self.model.device_broken)
    @rule()
    def mend_device(self) -> None:
        self.world.switch(BROKEN_DEVICE, on=False)
        self.model.device_broken = False
