from __future__ import annotations

import numpy as np
import pytest

from hybridindex.errors import InvalidInputError, ProfileError
from hybridindex.profiler.request import DEFAULT_BATCHES, ProfileRequest


def request(n_queries=200, **changes):
    return ProfileRequest(**changes).for_index(n_queries, 32, 8)


def test_defaults_are_filled_in():
    made = request()
    assert made.nprobe == 8
    assert made.batches == tuple(b for b in DEFAULT_BATCHES if b <= 100)
    assert request(recall_target=0.9).nprobe is None


def test_too_few_queries_say_how_many_there_are_and_should_be():
    with pytest.raises(ProfileError, match=r"^63 calibration queries; at least 64"):
        request(n_queries=63)
    request(n_queries=64)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nprobe": 0}, "nprobe is 0; expected 1 to nlist, 32"),
        ({"nprobe": 33}, "nprobe is 33"),
        ({"nprobe": 2.0}, "nprobe holds 2.0"),
        ({"nprobe": True}, "nprobe holds True"),
        ({"nprobe": 4, "recall_target": 0.9}, "both given"),
        ({"recall_target": 0.0}, "recall_target is 0.0"),
        ({"recall_target": 1.01}, "recall_target is 1.01"),
        ({"recall_target": float("nan")}, "recall_target is nan"),
        ({"k": 0}, "k is 0"),
        ({"k": 4096}, "k is 4096"),
        ({"repeats": 0}, "repeats is 0"),
        ({"threads": 0}, "threads is 0"),
        ({"max_seconds": 0.0}, "max_seconds is 0.0"),
        ({"max_seconds": float("inf")}, "max_seconds is inf"),
        ({"seed": -1}, "seed is -1"),
        ({"batches": ()}, r"batches are \(\)"),
        ({"batches": (4, 0)}, "batches are"),
        ({"batches": (101,)}, "leave 100"),
        ({"coverages": (0.5, 1.5)}, "coverages are"),
        ({"coverages": (float("nan"),)}, "coverages are"),
        ({"coverages": ("x",)}, "coverages holds 'x'"),
        ({"coverages": 0.5}, "coverages is 0.5; expected a list"),
        ({"recall_target": "x"}, "recall_target holds 'x'; expected numbers"),
        ({"max_seconds": "x"}, "max_seconds holds 'x'; expected numbers"),
        ({"batches": 4}, "batches is 4; expected a list"),
        ({"batches": None}, "batches is None; expected a list"),
        ({"device_budget_bytes": 1.5}, "device_budget_bytes holds 1.5"),
        ({"history_decay": "x"}, "history_decay holds 'x'"),
        ({"devices": "cuda:0"}, "devices is 'cuda:0'; expected a list of names"),
        ({"devices": None}, "devices is None; expected a list"),
        ({"devices": [0]}, r"devices are \(0,\); expected a list of names"),
        ({"history_decay": float("nan")}, "history_decay is nan; expected 0 to 1"),
        ({"history_decay": -0.1}, "history_decay is -0.1; expected 0 to 1"),
        ({"history_decay": 1.5}, "history_decay is 1.5; expected 0 to 1"),
        ({"device_budget_bytes": -5}, "device_budget_bytes is -5; expected 1 or more"),
        ({"device_budget_bytes": 0}, "device_budget_bytes is 0; expected 1 or more"),
    ],
)
def test_wrong_arguments_are_named(changes, said):
    with pytest.raises(InvalidInputError, match=said):
        request(**changes)


def test_checkpoints_of_other_requests_or_queries_have_other_keys():
    queries = np.zeros((200, 4), np.float32)
    keys = {
        request().key("a", queries=queries),
        request().key("b", queries=queries),
        request(seed=1).key("a", queries=queries),
        request().key("a", queries=queries + 1),
    }
    assert len(keys) == 4
    assert request().key("a", queries=queries.copy()) in keys


def test_numpy_numbers_make_the_same_request():
    queries = np.zeros((200, 4), np.float32)
    plain = {"k": 5, "batches": (2, 4), "repeats": 2, "threads": 1, "seed": 3, "max_seconds": 8, "coverages": (0.5,)}
    for more in ({"nprobe": 4}, {"recall_target": 0.5}):
        same = {"nprobe": np.int64(4)} if "nprobe" in more else {"recall_target": np.float32(0.5)}
        same |= {name: np.int64(plain[name]) for name in ("k", "repeats", "threads", "seed", "max_seconds")}
        same |= {"batches": np.array([2, 4]), "coverages": np.array([0.5], np.float32)}
        assert request(**same).key("a", queries=queries) == request(**plain, **more).key("a", queries=queries)
