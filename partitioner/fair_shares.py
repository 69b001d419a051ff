"""One resource of a fixed size, shared by keys: how much each may take, and who gives way where it is full.

What is free goes to whoever asks. Where nothing is free and things can be taken back (a draft that waits, a session
that nobody uses), the key that has the most gives way to one that would have less: shares become equal, and a key alone
may have all. Where nothing can be taken back (queries that wait, bytes in memory), a part stays free for others: a key
may have at most a multiple of what is left (dynamic thresholds: Choudhury, Hahne 1998), and one that has nothing may
take whatever is free.
"""

from __future__ import annotations

from typing import Literal

__all__ = ["FairShares", "Lack", "ShareRule"]

#: What is missing: room for anybody; room beyond what others are owed.
Lack = Literal["full", "share"]


class ShareRule:
    """How much of a resource one key may have. Immutable; whoever uses it counts."""

    def __init__(self, capacity: int, *, alone: float = 1.0) -> None:
        """``alone``: the part that a key may have while nobody else has any, above 0, at most 1."""
        self.capacity = capacity
        #: The most that one key may have.
        self.most = max(1, int(capacity * alone))
        self._alone = alone

    def lack(self, n: int, *, own: int, used: int) -> Lack | None:
        """What keeps a key that has ``own`` from ``n`` more while all have ``used``; None: nothing does."""
        left = self.capacity - used - n
        if left < 0:
            return "full"
        if own + n > self.most:
            return "share"
        if not own or self._alone == 1:
            return None
        # own + n <= left * alone / (1 - alone), of which nothing must be lost to rounding.
        return "share" if (own + n) * (1 - self._alone) > left * self._alone + 1e-6 else None


class FairShares:
    """The account of one resource. Not thread-safe: its owner locks, or lives on one event loop."""

    def __init__(self, capacity: int, *, alone: float = 1.0) -> None:
        """See :class:`ShareRule`."""
        self.rule = ShareRule(capacity, alone=alone)
        self._of: dict[str, int] = {}
        self.used = 0

    @property
    def capacity(self) -> int:
        return self.rule.capacity

    def of(self, key: str) -> int:
        """What ``key`` has."""
        return self._of.get(key, 0)

    def lack(self, key: str, n: int) -> Lack | None:
        """What keeps ``key`` from ``n`` more; None: nothing does."""
        return self.rule.lack(n, own=self._of.get(key, 0), used=self.used)

    def take(self, key: str, n: int) -> None:
        """``key`` has ``n`` more, whether or not there is room."""
        self.used += n
        self._of[key] = self._of.get(key, 0) + n

    def give_back(self, key: str, n: int) -> None:
        """``key`` has ``n`` less."""
        self.used -= n
        left = self._of[key] - n
        if left:
            self._of[key] = left
        else:
            del self._of[key]

    def who_gives_way(self, key: str, n: int) -> str | None:
        """The key that has the most, where that is more than ``key`` would have with ``n`` more."""
        heaviest = self.heaviest()
        return heaviest if heaviest is not None and self._of[heaviest] > self.of(key) + n else None

    def heaviest(self) -> str | None:
        """The key that has the most; of several the one that has had something for the longest time."""
        return max(self._of, key=self._of.__getitem__, default=None)

    def check_invariants(self) -> None:
        """Asserts that the account adds up."""
        assert self.used == sum(self._of.values()) >= 0
        assert all(n > 0 for n in self._of.values())
