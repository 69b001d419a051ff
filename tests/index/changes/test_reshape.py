"""Which lists are dissolved, and into how many parts others are split."""

import numpy as np
import pytest

from hybridindex.index.changes.reshape import Thresholds, reshape


def shape_of(sizes, *, mean, changed=None, grown=None, seed=0):
    """Lists of rows about their centroids, which lie far from each other."""
    rng = np.random.default_rng(seed)
    sizes = np.array(sizes)
    centroids = 100 * np.eye(len(sizes), 8, dtype=np.float32)
    rows = [centroids[i] + rng.standard_normal((n, 8), dtype=np.float32) for i, n in enumerate(sizes.tolist())]
    return reshape(
        lambda: enumerate(rows),
        centroids.copy(),
        sizes,
        np.zeros_like(sizes) if changed is None else np.array(changed),
        np.zeros(len(sizes), dtype=bool) if grown is None else np.array(grown),
        mean=mean,
        inner_product=False,
        unit=False,
        thresholds=Thresholds(),
        seed=seed,
    )


def test_the_longest_lists_take_the_place_of_those_that_were_dissolved():
    shape = shape_of([300, 260, 100, 100, 20, 20], mean=800 / 6, changed=[0, 0, 0, 0, 0, 900])
    assert (shape.n_dissolved, shape.n_split) == (0, 0)  # a list of 20 rows is not short enough
    shape = shape_of([300, 280, 100, 100, 10, 10], mean=800 / 6, changed=[0, 0, 0, 0, 900, 900])
    assert (shape.n_dissolved, shape.n_split) == (2, 2)
    assert sorted(shape.parents.tolist()) == [0, 0, 1, 1, 2, 3]


@pytest.mark.parametrize(("grown", "n_split"), [(True, 1), (False, 0)])
def test_where_there_are_lists_enough_those_are_split_that_grew(grown, n_split):
    shape = shape_of([400, 50, 50, 50, 50], mean=120, grown=[grown, False, False, False, False])
    assert shape.n_split == n_split
    assert len(shape.parents) == (7 if grown else 5)


def test_no_more_lists_are_made_of_one_than_it_has_rows():
    shape = shape_of([6, 1, 0], mean=1)
    assert len(shape.parents) == 7
    assert sorted(shape.parents.tolist()) == [0] * 5 + [1, 2]
