"""The reference model: what a daemon and its index hold, as everything that was acknowledged says. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Generation", "Key", "Model", "Plans", "Session"]


@dataclass(frozen=True, slots=True)
class Generation:
    number: int
    content: str


@dataclass(slots=True)
class Plans:
    """The ledger of one content of the index."""

    profiled: bool = False
    #: Ids of plans that were stored.
    stored: set[int] = field(default_factory=set)
    current: int | None = None
    #: What "latest" means: stored or applied last.
    latest: int | None = None

    def store(self, plan: int) -> None:
        self.stored.add(plan)
        self.latest = plan

    def apply(self, plan: int) -> None:
        self.stored.add(plan)
        self.current = self.latest = plan


@dataclass(frozen=True, slots=True)
class Key:
    name: str
    secret: str
    role: str


@dataclass(frozen=True, slots=True)
class Session:
    """``content``: of the generation in which it was opened."""

    name: str
    key: Key
    content: str


@dataclass(slots=True)
class Model:
    """``current`` and ``previous`` are on disk, ``served`` is what a running daemon opened."""

    current: Generation
    plans: dict[str, Plans]
    keys: dict[str, Key]
    previous: Generation | None = None
    #: Names of keys that a killed command added: nobody knows them.
    unknown_keys: set[str] = field(default_factory=set)
    #: The control store was damaged in place: what it holds is unknown, and it may not open.
    store_damaged: bool = False
    #: Contents of which a killed call may have stored or applied a plan, and nobody has looked since.
    unsettled: set[str] = field(default_factory=set)
    disk_full: bool = False
    keys_damaged: bool = False
    device_broken: bool = False
    # Of the running daemon
    running: bool = False
    served: Generation | None = None
    #: What --plan said.
    asked: str = "current"
    plan: int | None = None
    devices_open: bool = False
    drain_s: int = 30
    #: The store was lost or damaged since the daemon started, or nobody has seen the device work since it failed.
    store_doubt: bool = False
    device_doubt: bool = False
    sessions: list[Session] = field(default_factory=list)
    #: A command that changes generations was killed meanwhile: what it left goes with the next start.
    writer_killed: bool = False

    def chosen(self) -> int | None:
        """The plan that the ledger of what is on disk gives to a start or a reload."""
        ledger = self.plans[self.current.content]
        return {"none": None, "latest": ledger.latest}.get(self.asked, ledger.current)

    def forget_plans(self) -> None:
        """The control store is gone."""
        self.plans = {content: Plans() for content in self.plans}

    def stopped(self) -> None:
        self.running, self.served, self.plan = False, None, None
        self.sessions.clear()
