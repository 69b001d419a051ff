"""Waiting for batches of iterative retrievals, against RAGO's Figure 10(b)."""

from __future__ import annotations

import pytest

from hybridindex.errors import InvalidInputError
from hybridindex.studies.schedule import decode_slowdown

DECODE = (4, 8, 16, 64, 128, 256)
#: Iterative batch -> the printed cells, for the decode batches that are at least as large.
FIGURE_10B = {
    256: (3.08,),
    128: (2.94, 1.38),
    64: (2.77, 1.38, 1.15),
    16: (2.34, 1.14, 1.06, 1.03),
    8: (2.05, 1.32, 1.06, 1.03, 1.01),
    4: (1.71, 1.26, 1.11, 1.02, 1.01, 1.01),
    2: (1.16, 1.07, 1.03, 1.01, 1.00, 1.00),
    1: (1.00, 1.00, 1.00, 1.00, 1.00, 1.00),
}
CELLS = [
    (decode, iterative, cell)
    for iterative, row in FIGURE_10B.items()
    for decode, cell in zip(DECODE[-len(row) :], row, strict=True)
]


@pytest.mark.parametrize(("decode", "iterative", "printed"), CELLS)
def test_every_printed_cell_of_figure_10b(decode, iterative, printed):
    assert decode_slowdown(decode, iterative) == pytest.approx(printed, abs=0.05)


def test_without_later_retrievals_nothing_waits():
    assert decode_slowdown(64, 64, retrievals=1) == 1.0


def test_the_same_seed_gives_the_same_number_and_another_one_nearly():
    assert decode_slowdown(16, 16, seed=3) == decode_slowdown.__wrapped__(16, 16, seed=3)
    assert decode_slowdown(16, 16, seed=3) != decode_slowdown(16, 16, seed=4)
    assert decode_slowdown(16, 16, seed=3) == pytest.approx(decode_slowdown(16, 16, seed=4), rel=0.03)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((4, 8), "retrieval_batch is 8; expected 1 to decode_batch, 4"),
        ((4, 0), "retrieval_batch is 0"),
        ((-1, 1), "retrieval_batch is 1; expected 1 to decode_batch, -1"),
    ],
)
def test_impossible_batches_are_named(arguments, says):
    with pytest.raises(InvalidInputError, match=says):
        decode_slowdown(*arguments)


def test_more_retrievals_than_tokens_are_refused():
    with pytest.raises(InvalidInputError, match="retrievals is 9; expected 1 to tokens, 8"):
        decode_slowdown(4, 2, retrievals=9, tokens=8)
