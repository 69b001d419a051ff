"""Profiles survive a compaction: lists have heirs, and plans are made from what was measured before."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import hybridindex as hx
from hybridindex.partitioner.models.rows import row_bytes_of
from hybridindex.plans.inherit import inherit_profiles, inherited, parents_of, share_newer
from hybridindex.store.control import ControlStore
from tests.clustered import NLIST, clustered

N = 3000


@pytest.fixture
def index(tmp_path):
    with hx.build(clustered(N, seed=1), tmp_path / "i", nlist=NLIST, metric="l2") as made:
        yield made


def profiled(index, **options):
    return index.profile(clustered(80, seed=7), nprobe=6, max_seconds=1, devices=0, **options)


def test_a_plan_is_made_from_what_was_measured_before(index):
    profile = profiled(index)
    index.add(clustered(2500, seed=5, offset=8.0))
    index.delete(np.arange(0, N - 300))
    assert index.compact()
    plan = index.plan(slo_ms=50, device_budget_bytes=1 << 20, coverage=0.3)
    heir = plan.analysis.profile
    assert heir.index_fingerprint == index.fingerprint != profile.index_fingerprint
    assert heir.notes["inherited"]["from"] == profile.index_fingerprint
    assert share_newer(heir) == pytest.approx(2500 / 2800, abs=1e-4)
    assert heir.stages == profile.stages
    with index.router(plan=plan, devices=["cpu"]) as router:
        assert router.search(clustered(3)).ids.shape == (3, 10)
    # Of the next one, what is newer adds up.
    index.add(clustered(700, seed=6))
    index.compact()
    with index.store() as store:
        again = store.load_profile(index_fingerprint=index.fingerprint)
    assert share_newer(again) == pytest.approx(1 - (300 / 2800) * (2800 / 3500), abs=1e-4)


def test_parts_are_as_hot_as_their_list(index):
    profile = profiled(index, save=False)
    view = index.ivf
    parents = np.concatenate([np.arange(1, NLIST), [3, 3]])  # list 0 is gone, list 3 has three parts

    class View:
        nlist, count = len(parents), 4000
        fingerprint, rows = "new", None
        list_sizes = list_bytes = np.ones(len(parents), np.int64)
        manifest = view.manifest

    heir = inherited(profile, View, parents)
    assert heir.nlist == NLIST + 1
    before, after = profile.access, heir.access
    assert after.list_accesses[[2, NLIST - 1, NLIST]].tolist() == [before.list_accesses[3]] * 3
    for old, new in ((before.held_probes, after.held_probes), (before.fit_probes, after.fit_probes)):
        for was, now in zip(old.tolist(), new.tolist(), strict=True):
            expected = [part for each in was for part in {0: [], 3: [2, NLIST - 1, NLIST]}.get(each, [each - 1])]
            expected = (expected + [-1] * 6)[:6]
            assert now == expected


def test_the_newest_profile_of_each_machine_has_an_heir(index):
    with index.store() as store:
        for machine, threads in (("old", 1), ("other", 2), ("old", 3)):
            made = profiled(index, save=False)
            hardware = dataclasses.replace(made.hardware, fingerprint=machine)
            store.save_profile(dataclasses.replace(made, hardware=hardware, threads=threads))
    index.add(clustered(700, seed=6))
    index.compact()
    with index.store() as store:
        heirs = store.list_profiles(index_fingerprint=index.fingerprint)
    assert [(each.hardware_fingerprint, each.threads) for each in heirs] == [("other", 2), ("old", 3)]


def test_a_machine_that_measured_anew_leaves_the_others_theirs(index, tmp_path):
    with ControlStore.open(tmp_path / "shared.sqlite") as store:

        def save(machine, threads):
            made = profiled(index, save=False)
            hardware = dataclasses.replace(made.hardware, fingerprint=machine)
            store.save_profile(dataclasses.replace(made, hardware=hardware, threads=threads))

        save("old", 1)
        save("other", 2)
        index.add(clustered(700, seed=6))
        index.compact()
        save("old", 3)
        for n_heirs in (1, 0):  # once
            assert len(inherit_profiles(index.ivf, store)) == n_heirs
            heirs = store.list_profiles(index_fingerprint=index.fingerprint)
            assert [(each.hardware_fingerprint, each.threads) for each in heirs] == [("old", 3), ("other", 2)]


def test_what_was_never_profiled_inherits_nothing(index):
    index.add(clustered(10, seed=5))  # too few for another list
    index.compact()
    assert parents_of(index.ivf).tolist() == list(range(NLIST)) == list(range(index.nlist))
    with ControlStore.open(index.path / "control.sqlite") as store:
        assert store.list_profiles() == []


def test_profiles_of_codes_have_heirs_too(tmp_path):
    with hx.build(clustered(N, seed=1), tmp_path / "i", nlist=NLIST, metric="l2", bits=1) as index:
        profile = profiled(index, precision="codes")
        index.add(clustered(300, seed=5))
        index.compact()
        plan = index.plan(slo_ms=50, device_budget_bytes=1 << 20, coverage=0.3, precision="codes")
        assert plan.analysis.profile.bits == 1
        assert row_bytes_of(plan.analysis.profile) == row_bytes_of(profile) == 4 * index.dim
        assert plan.index_fingerprint == index.ivf.by_codes().fingerprint
