"""A router whose rows are on disk gives the answers of one whose rows are in memory, to the bit."""

from __future__ import annotations

import numpy as np
import pytest

from hybridindex.config import RouterConfig
from hybridindex.errors import InvalidInputError, UnsupportedIndexError
from hybridindex.index.faiss_files.import_faiss import from_faiss
from hybridindex.router import Router
from tests.clustered import NLIST, clustered, hand_made_plan, small_index
from tests.coded import with_codes
from tests.cold import PAGE, forget_lists

QUERIES = clustered(40, seed=5)
ASKED = ((1, 1), (10, 8), (7, NLIST))


@pytest.fixture(scope="module", params=[("ip", 1, "flat"), ("l2", 2, "sq8")], ids=lambda kind: f"{kind[0]}-{kind[2]}")
def index(request, tmp_path_factory):
    metric, bits, codec = request.param
    path = tmp_path_factory.mktemp("idx") / "i"
    # Nobody else holds what maps the lists: they could not be dropped from memory.
    with with_codes(small_index(path, metric=metric, codec=codec, n=1500), bits=bits) as found:
        yield found


def answers(index, **options):
    with Router(index, scrub_bytes_per_s=0, **options) as router:
        found = [router.search(QUERIES, k, nprobe) for k, nprobe in ASKED]
        return found, router.stats()


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_array_equal(one.distances.view(np.int32), other.distances.view(np.int32))


def test_answers_are_those_of_rows_in_memory(index):
    expected, resident = answers(index)
    forget_lists(index)
    found, mapped = answers(index, rows="mapped")
    assert_same(found, expected)
    assert resident.row_pages == 0
    assert 0 < mapped.row_pages <= -(-len(index.mapped_lists()) // PAGE)
    assert mapped.candidates == resident.candidates


def test_answers_are_those_of_rows_in_memory_with_devices(index):
    expected, _ = answers(index)
    codes = np.where(np.arange(NLIST) % 2, 0, -1)
    plan = hand_made_plan(index.by_codes(), codes, row_device=np.where(np.arange(NLIST) % 3, 0, -1), budget=64 << 20)
    plan.request.page_bytes = 2048
    forget_lists(index)
    found, stats = answers(index, rows="mapped", plan=plan, devices=("cpu",), device_budget_bytes=64 << 20)
    assert_same(found, expected)
    assert 0 < stats.device_candidates < stats.candidates


def test_answers_of_codes_of_faiss_are_those_of_rows_in_memory(tmp_path):
    import faiss

    made = faiss.index_factory(32, f"IVF{NLIST},RaBitQ", faiss.METRIC_L2)
    data = clustered(1500, 32, seed=1)
    made.train(data)
    made.add(data)
    queries = clustered(20, 32, seed=5)
    with from_faiss(made, tmp_path / "i") as index:
        found = []
        for rows in ("resident", "mapped"):
            with Router(index, rows=rows, precision="codes", scrub_bytes_per_s=0) as router:
                found.append(router.search(queries, 10, 8))
    assert_same(found[1:], found[:1])


def test_no_row_is_read_before_it_is_a_candidate(index):
    with Router(index, rows="mapped", scrub_bytes_per_s=0) as router:
        assert (router.warmed.nbytes, len(router.warmed.lists)) == (0, 0)
        assert router.config.rows == "mapped"


def test_rows_that_would_be_scanned_have_to_be_in_memory(tmp_path):
    for name, value in (("precision", "rows"), ("host_scanner", "faiss")):
        with pytest.raises(InvalidInputError, match=f"rows is 'mapped' with {name} '{value}', which scans rows"):
            RouterConfig(rows="mapped", **{name: value})
    with pytest.raises(InvalidInputError, match="warm_bytes is 1 with rows 'mapped'"):
        RouterConfig(rows="mapped", warm_bytes=1)
    with pytest.raises(InvalidInputError, match="rows is 'ssd'; expected 'resident' or 'mapped'"):
        RouterConfig(rows="ssd")
    with (
        small_index(tmp_path / "i", n=500) as index,
        pytest.raises(UnsupportedIndexError, match="rows is 'mapped', and searches would scan rows: the index has"),
    ):
        Router(index, rows="mapped")
    with with_codes(small_index(tmp_path / "j", n=500)) as index:
        plan = hand_made_plan(index, np.zeros(NLIST, np.int16), budget=64 << 20)
        with pytest.raises(
            UnsupportedIndexError, match="would scan rows: the index has codes, but the plan is of rows"
        ):
            Router(index, rows="mapped", plan=plan, devices=("cpu",), device_budget_bytes=64 << 20)
