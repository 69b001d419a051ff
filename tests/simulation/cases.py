"""Runs of the simulation: those with fixed seeds that the suite has, and as many more as there is time for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from hybridindex.index import open_index
from hybridindex.index.ivf import IVFIndex
from tests.clustered import small_index
from tests.coded import with_codes
from tests.memory_folder import memory_folder
from tests.simulation.answers import Answers, CodedAnswers
from tests.simulation.daemon_world import run_daemon
from tests.simulation.nodes_world import run_nodes
from tests.simulation.planned import make_planned
from tests.simulation.router_world import run_router
from tests.simulation.shares_world import run_shares
from tests.simulation.world import Outcome

__all__ = ["FIXED", "Case", "Indexes", "WorldName", "endless", "indexes"]

WorldName = Literal[
    "router", "router-quiet", "router-codes", "daemon", "daemon-quiet", "shares", "nodes", "nodes-codes"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run; its text gives the run again."""

    world: WorldName
    seed: int
    #: Virtual; a run may end earlier.
    seconds: float

    def __str__(self) -> str:
        return f"{self.world}:{self.seed}:{self.seconds:g}"

    @classmethod
    def parse(cls, text: str) -> Case:
        world, seed, seconds = text.split(":")
        assert world in get_args(WorldName), f"{world}: expected one of {get_args(WorldName)}"
        return cls(world=world, seed=int(seed), seconds=float(seconds))  # type: ignore[arg-type]

    def run(self, indexes: Indexes) -> Outcome:
        """Raises ViolationError."""
        world, _, kind = self.world.partition("-")
        if world == "nodes" and kind == "codes":
            return run_nodes(self.seed, self.seconds, indexes.coded_nodes, indexes.coded_nodes_answers)
        if kind == "codes":
            return run_router(self.seed, self.seconds, indexes.coded.by_codes(), indexes.coded_answers)
        if world == "router":
            return run_router(self.seed, self.seconds, indexes.small, indexes.small_answers, quiet=kind == "quiet")
        if world == "nodes":
            return run_nodes(self.seed, self.seconds, indexes.small, indexes.small_answers)
        if world == "daemon":
            return run_daemon(self.seed, self.seconds, indexes.planned, indexes.planned_answers, quiet=kind == "quiet")
        return run_shares(self.seed, self.seconds, indexes.planned, indexes.planned_answers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexes:
    """What all runs search, made once."""

    small: IVFIndex
    small_answers: Answers
    coded: IVFIndex
    coded_answers: CodedAnswers
    coded_nodes: IVFIndex
    coded_nodes_answers: Answers
    planned: Path
    planned_answers: Answers


@contextmanager
def indexes() -> Iterator[Indexes]:
    with memory_folder() as place:
        make_planned(place / "planned")
        with (
            small_index(place / "small") as small,
            # Of as many bytes as devices have.
            with_codes(small_index(place / "coded", dim=384), bits=4) as coded,
            with_codes(small_index(place / "coded-nodes")) as coded_nodes,
            open_index(place / "planned") as planned,
        ):
            yield Indexes(
                small=small,
                small_answers=Answers(small),
                coded=coded,
                coded_answers=CodedAnswers(coded),
                coded_nodes=coded_nodes,
                # Bytes of codes come in blocks, and candidates are counted.
                coded_nodes_answers=Answers(coded_nodes, slack=0.15),
                planned=place / "planned",
                planned_answers=Answers(planned),
            )


def _fixed() -> Iterator[Case]:
    for seed in range(10):
        yield Case(world="router", seed=seed, seconds=150)
        if seed < 9:
            yield Case(world="daemon", seed=seed, seconds=90)
        if seed in (0, 1, 4, 7):
            yield Case(world="shares", seed=seed, seconds=6)
        if seed < 4:
            yield Case(world="router-codes", seed=seed, seconds=90)
    for seed in (0, 1, 3, 5, 9, 10, 12, 18, 20, 65, 109):
        yield Case(world="nodes", seed=seed, seconds=30)
    for seed in (0, 1, 3, 5, 9, 10):
        yield Case(world="nodes-codes", seed=seed, seconds=30)
    # Devices are judged, and one is stuck for longer than a search may take.
    yield Case(world="router", seed=14, seconds=150)


#: Two minutes.
FIXED = tuple(_fixed())


def endless(seed: int) -> Iterator[Case]:
    """Runs with seeds from ``seed`` on: dense ones, and days on which little happens."""
    while True:
        yield Case(world="router", seed=seed, seconds=900)
        yield Case(world="router-quiet", seed=seed, seconds=86_400)
        yield Case(world="router-codes", seed=seed, seconds=900)
        yield Case(world="daemon", seed=seed, seconds=300)
        yield Case(world="nodes", seed=seed, seconds=120)
        yield Case(world="nodes-codes", seed=seed, seconds=120)
        if seed % 4 == 0:
            yield Case(world="daemon-quiet", seed=seed, seconds=3600)
            yield Case(world="shares", seed=seed, seconds=6)
        seed += 1
