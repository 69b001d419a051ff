"""Which lists a search with a filter probes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.tiers.host.filtered_scanner import choose_lists
from tests.examples import examples


@examples(200)
@given(
    seed=st.integers(0, 2**32),
    nlist=st.integers(1, 30),
    nprobe=st.integers(1, 30),
    k=st.sampled_from([1, 10, 200]),
    share=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
def test_lists_are_taken_until_as_many_rows_match_as_a_search_without_a_filter_scans(seed, nlist, nprobe, k, share):
    rng = np.random.default_rng(seed)
    nprobe = min(nprobe, nlist)
    sizes = rng.integers(0, 40, nlist)
    counts = rng.binomial(sizes, share)
    probes = np.array([rng.permutation(nlist) for _ in range(3)])
    probes[2, rng.integers(0, nlist) :] = -1  # as an approximate quantizer that finds fewer
    coarse = rng.random(probes.shape, dtype=np.float32)
    chosen = choose_lists(probes, coarse, counts, sizes, nprobe, k)
    suffices = True
    for row, lists in enumerate(probes):
        there = lists[lists >= 0].tolist()
        aimed = max(int(sizes[there[:nprobe]].sum()), k)
        taken, held = [], 0
        for list_id in there:
            if held < aimed and counts[list_id] > 0:
                taken.append(list_id)
                held += int(counts[list_id])
        n = len(taken)
        assert chosen.n_probes[row] == n
        assert chosen.n_rows[row] == held
        assert chosen.probes[row, :n].tolist() == taken
        assert (chosen.probes[row, n:] == -1).all()
        at = {list_id: column for column, list_id in enumerate(there)}
        assert chosen.coarse[row, :n].tolist() == [coarse[row, at[list_id]] for list_id in taken]
        suffices = suffices and held >= aimed
    assert chosen.suffices == suffices
    assert chosen.probes.shape[1] == chosen.n_probes.max()


def test_a_filter_that_leaves_everything_chooses_the_nearest_lists():
    sizes = np.random.default_rng(0).integers(1, 40, 20)
    probes = np.arange(20)[None]
    chosen = choose_lists(probes, np.zeros((1, 20), np.float32), sizes, sizes, 7, 1)
    assert chosen.probes.tolist() == [list(range(7))]
