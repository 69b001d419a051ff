from __future__ import annotations

import pytest

from hybridindex.errors import InvalidInputError
from hybridindex.profiler.embed import time_embedding

TEXTS = [f"text {i}" for i in range(10)]


def test_every_batch_size_is_timed_in_every_round_with_distinct_texts():
    seen = []
    samples = time_embedding(seen.append, TEXTS, (4, 1, 64), repeats=3)
    assert [(s.stage, s.batch) for s in samples] == [("embed", 1), ("embed", 4)] * 3
    assert [len(texts) for texts in seen] == [1, 1, 4, 1, 4, 1, 4]
    assert all(len(set(texts)) == len(texts) for texts in seen)
    assert all(s.seconds >= 0 for s in samples)


def test_time_over_ends_after_the_first_round():
    ticking = iter(range(1000))
    samples = time_embedding(len, TEXTS, (1, 4), repeats=50, max_seconds=1.0, clock=lambda: float(next(ticking)))
    assert [s.batch for s in samples] == [1, 4]
    assert [s.seconds for s in samples] == [1.0, 1.0]


@pytest.mark.parametrize(("texts", "batches"), [([], (1,)), (TEXTS, (0, 11))])
def test_nothing_to_draw_is_an_error(texts, batches):
    with pytest.raises(InvalidInputError, match="batches"):
        time_embedding(len, texts, batches)
