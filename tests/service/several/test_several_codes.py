"""Several indexes, of which one has codes: each is planned for what it scans."""

from __future__ import annotations

import pytest

import hybridindex as hx
from hybridindex.cli.dividing import divide_indexes
from hybridindex.errors import InvalidInputError, UnsupportedIndexError
from hybridindex.index import open_index
from hybridindex.index.compress import compress
from hybridindex.plans.precision import views_of
from tests.partitioner.synthetic import profile_of
from tests.service.several.conftest import BUDGET


@pytest.fixture
def coded(folders):
    """Gives "docs" codes, and profiles and applied plans of rows and of codes, those of codes last: their ids."""
    with open_index(folders["docs"]) as index:
        compress(index, bits=2)
    made = {}
    with hx.open(folders["docs"]) as index, index.store() as store:
        for name, view in zip(("rows", "codes"), views_of(index.ivf), strict=True):
            profile = store.save_profile(profile_of(view))
            made[name] = index.apply_plan(index.plan(1000, 4 << 20, profile, coverage=0.5), force=True)
    return made


def divided(folders, **options):
    return divide_indexes(folders, (BUDGET,), None, **{"lookahead_bytes": 0, "apply": False, "force": True} | options)


@pytest.mark.parametrize(("precision", "bits"), [("auto", 2), ("codes", 2), ("rows", None)])
def test_an_index_that_is_told_a_rate_gets_a_plan_of_what_it_scans(open_indexes, coded, precision, bits):
    names = ("docs",) if precision == "codes" else ()  # the other index has no codes
    indexes = open_indexes(*names, router={"precision": precision}, told={"docs": {"rate_qps": 5.0}})
    assert not indexes.problems
    docs = indexes.services["docs"]
    assert (docs.router.plan.request.rate_qps, docs.router.plan.bits, docs.router.bits) == (5.0, bits, bits)
    assert docs.router.residency.n_resident == len(docs.router.plan.resident_lists) == 12


@pytest.mark.parametrize(("precision", "bits"), [("auto", 2), ("rows", None)])
def test_an_index_without_a_plan_is_planned_for_what_it_scans(open_indexes, folders, coded, precision, bits):
    (folders["docs"] / "control.sqlite").unlink()
    with hx.open(folders["docs"]) as index, index.store() as store:
        for view in views_of(index.ivf):
            store.save_profile(profile_of(view))
    indexes = open_indexes(router={"precision": precision}, told={"docs": {"slo_ms": 1000.0, "rate_qps": 5.0}})
    plan = indexes.services["docs"].router.plan
    assert (plan.request.rate_qps, plan.bits) == (5.0, bits)


@pytest.mark.parametrize(("precision", "bits"), [("auto", 2), ("codes", 2), ("rows", None)])
def test_a_division_by_hand_is_of_what_is_scanned(folders, coded, precision, bits):
    only = {"docs": folders["docs"]} if precision == "codes" else folders
    (row, *_) = divided(only, precision=precision, apply=True)["indexes"]
    with hx.open(folders["docs"]) as index:
        plan = index.current_plan(precision=precision)
        assert (plan.bits, plan.request.budgets) == (bits, tuple(row["share_bytes"]))


def test_codes_that_are_asked_for_have_to_be_there(folders, coded):
    with pytest.raises(UnsupportedIndexError, match="has no codes that can be used"):
        divided(folders, precision="codes")
    with pytest.raises(InvalidInputError, match="precision is 'bits'; expected"):
        divided(folders, precision="bits")


def test_damaged_codes_have_no_plan_to_divide(folders, coded, caplog):
    file = next(folders["docs"].glob("gen-*/rabitq-*.bin"))
    whole = file.read_bytes()
    file.write_bytes(whole[:70] + bytes([whole[70] ^ 1]) + whole[71:])
    (row, _) = divided(folders, apply=True)["indexes"]
    assert "differs from its checksum" in caplog.text
    with hx.open(folders["docs"]) as index:
        assert index.current_plan(precision="rows").request.budgets == tuple(row["share_bytes"])
