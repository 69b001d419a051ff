"""Where answers go: parts of a large call are put together, also where some rest on a part of their work."""

from __future__ import annotations

import numpy as np
import pytest

from hybridindex.router.batch.replies import DividedReply, FutureReply
from hybridindex.types import SearchResult


def answer(n, k=2, coverage=None):
    return SearchResult(
        ids=np.full((n, k), n, np.int64),
        distances=np.full((n, k), n, np.float32),
        nprobe_used=np.full(n, 3, np.int32),
        hit_rate=np.zeros(n, np.float32),
        coverage=None if coverage is None else np.full(n, coverage, np.float32),
    )


@pytest.mark.parametrize("coverage", [None, 0.25])
def test_parts_are_put_where_they_belong(coverage):
    whole = FutureReply()
    divided = DividedReply(whole, 3, 2, 2)
    first, second = divided.part(slice(0, 2)), divided.part(slice(2, 3))
    second.settle(answer(1, coverage=coverage))
    assert not whole.future.done()
    first.settle(answer(2))
    found = whole.future.result(0)
    assert found.ids.tolist() == [[2, 2], [2, 2], [1, 1]]
    if coverage is None:
        assert found.coverage is None
    else:
        assert found.coverage.tolist() == [1, 1, 0.25]


def test_the_first_error_is_told_when_all_parts_have_ended():
    whole = FutureReply()
    divided = DividedReply(whole, 2, 2, 2)
    divided.part(slice(0, 1)).fail(RuntimeError("one"))
    assert not whole.future.done()
    divided.part(slice(1, 2)).settle(answer(1))
    with pytest.raises(RuntimeError, match="one"):
        whole.future.result(0)
