"""Sides of the comparison at equal recall: how they are tuned, judged and left out."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.clusters import make_clusters, make_queries
from benchmarks.common.measure import Timing
from benchmarks.host import compressed
from benchmarks.host.compressed import Cell, judged, measure, verdict
from benchmarks.rivals import faiss_systems
from benchmarks.rivals.known import RIVALS, Rival
from benchmarks.rivals.ours import CANDIDATES
from benchmarks.rivals.system import Collection, K, System
from benchmarks.rivals.tuning import reaching, smallest

#: The ids do not matter where recall is given.
ANYTHING = np.zeros((1, K), dtype=np.int64)


@pytest.mark.parametrize(("needed", "least"), [(1, 1), (2, 2), (3, 3), (29, 29), (1000, 1000), (1024, 1024)])
def test_the_smallest_value_is_found_to_three_percent(needed, least):
    asked = []

    def recall_at(value):
        asked.append(value)
        return 0.95 if value >= needed else 0.9

    value = smallest(recall_at, 0.95, 1, 1024)
    assert least <= value <= least * 33 / 32
    # Large values are slow: none is tried that is twice what is needed.
    assert max(asked) < max(2 * needed, 2)


def test_a_recall_that_no_value_reaches():
    assert smallest(lambda value: 0.9, 0.95, 1, 300) is None


def test_a_setting_that_costs_more_on_both_dials_is_left_out():
    needed = {2: 160, 4: 120, 8: 80, 16: 50, 32: 50, 64: 50}
    system = System(
        name="two dials", dials=("a", "b"), grid=(1, 1000), finer=tuple(needed), at=lambda *setting: lambda x: ANYTHING
    )
    settings = reaching(system, lambda first, second: float(first >= needed[second]), 1.0)
    assert [second for _, second in settings] == [4, 8, 16]
    assert [first >= needed[second] for first, second in settings] == [True] * 3
    assert system.setting(50, 16) == "a=50 b=16"


@pytest.mark.parametrize(
    ("ratio", "said"), [(3.0, "passed"), (2.6, "inconclusive"), (2.4, "inconclusive"), (2.0, "missed")]
)
def test_a_ratio_within_the_floor_of_its_target_decides_nothing(ratio, said):
    assert verdict(ratio, 0.1, 2.5) == said


def test_our_fastest_side_is_held_against_the_fastest_rival():
    timed = {
        name: Timing((seconds,) * 4)
        for name, seconds in {
            "hybridindex sq8": 4.0,
            "ours": 1.0,
            "again": 1.0,
            "ours, router": 1.1,
            "slow": 9.0,
            "fast": 2.0,
        }.items()
    }
    names = {"ours": ["hybridindex sq8", "ours"], "routed": ["ours, router"], "rivals": ["slow", "fast"]}
    recalls = dict.fromkeys(timed, (0.95, 0.01))

    def rows(batch, **changed):
        cell = Cell(recall=0.95, batch=batch, threads=1)
        found = judged(cell, names, timed, recalls | changed, "ours")
        return {row["what"]: (row["ours"], row["other"], pytest.approx(row["ratio"]), row["verdict"]) for row in found}

    assert rows(1) == {
        "best rival": ("ours", "fast", 2.0, "missed"),
        "bare scan": ("ours, router", "ours", 1 / 1.1, "passed"),
    }
    assert rows(64) == {
        "best rival": ("ours", "fast", 2.0, "missed"),
        "our own sq8": ("ours", "hybridindex sq8", 4.0, "passed"),
    }
    # Less recall than the level, by more than chance: a comparison of unequals.
    assert rows(64, ours=(0.9, 0.01))["our own sq8"][-1] == "inconclusive"


@pytest.fixture
def small(tmp_path: Path) -> dict[str, object]:
    """Everything that one small dataset shows, without the packages that only benchmarks use."""
    with pytest.MonkeyPatch.context() as patched:
        absent = Rival("absent", "a_package_that_is_not_there", faiss_systems.flat)
        broken = Rival("broken", "faiss", lambda data: 1 / 0)  # type: ignore[arg-type, return-value]
        patched.setattr(compressed, "RIVALS", (Rival("faiss", "faiss", faiss_systems.flat), absent, broken))
        data = make_clusters(32, 2000 * 32 * 4, nlist=40)
        args = Namespace(bits=[1], threads=[1], rounds=2, seconds=0.001, cache=tmp_path)
        return measure("small", data, make_queries(data.centres, 128, "low"), args)


def test_every_side_is_measured_and_who_is_missing_is_named(small, capsys):
    assert set(small["not_measured"]) == {"absent", "broken"}
    assert "a_package_that_is_not_there is not installed" in small["not_measured"]["absent"]
    assert len(small["cells"]) == 4
    for cell in small["cells"]:
        bare = {"hybridindex flat", "hybridindex sq8", "hybridindex 1 bit, flat", "hybridindex 1 bit, sq8"}
        assert bare | {"faiss IVF,Flat"} <= cell["sides"].keys() | cell["not_reached"].keys()
        assert sum(name.endswith(", router") for name in cell["sides"]) == 1
        for side in cell["sides"].values():
            assert side["recall_held"] + 3 * side["recall_margin"] >= cell["recall"]
            assert side["qps"] > 0
        assert {row["what"] for row in cell["against"]} >= {"best rival"}
    compressed.show_dataset(small)
    shown = capsys.readouterr().out
    assert "absent" in shown
    assert "A/A floor" in shown


def test_every_rival_has_a_name_of_its_own():
    assert len({rival.name for rival in RIVALS}) == len(RIVALS)


def test_systems_with_lists_have_the_same_dials(small):
    """What is measured with fewer settings can look slower than it is."""
    assert faiss_systems.NPROBES[-1] == 3072
    data = make_clusters(32, 2000 * 32 * 4, nlist=40)
    shared = Collection(vectors=data.vectors, lists=data.lists, centres=data.centres, cache=Path("absent"))
    made = [faiss_systems.flat(shared), faiss_systems.fast_scan(shared), faiss_systems.rabitq_fast_scan(shared, 1)]
    assert {system.grid for system in made} == {tuple(p for p in faiss_systems.NPROBES if p <= 40)}
    assert {3, 6, 12, 32, 64} <= set(faiss_systems.K_FACTORS)
    assert [system.finer for system in made[1:]] == [faiss_systems.K_FACTORS] * 2
    # As many candidates, nearly, as our codes may have.
    assert max(faiss_systems.K_FACTORS) * K >= 0.8 * CANDIDATES[-1]
    assert small["most"]["faiss IVF,Flat"] == {"nprobe": 32}
    assert small["most"]["hybridindex 1 bit, flat"] == {"nprobe": 32, "candidates": CANDIDATES[-1]}
