"""What a device's bytes are in use for, with a plan, a session and a cache at once."""

from __future__ import annotations

import numpy as np
import pytest

from hybridindex.router.router import Router
from hybridindex.tiers.paged.copier import Ticket
from tests.clustered import NLIST, clustered, hand_made_plan, small_index


@pytest.fixture
def index(tmp_path):
    with small_index(tmp_path / "idx") as index:
        yield index


def test_parts_follow_the_lists_from_the_plan_to_session_and_cache(index):
    where = np.full(NLIST, -1, dtype=np.int16)
    where[:4], where[4:6] = 0, 1
    with Router(index, plan=hand_made_plan(index, where, n_devices=2), devices=["cpu", "cpu"]) as router:

        def check():
            for use, tier in zip(router.arena_use(), router.devices, strict=True):
                parts = use.pinned_bytes + use.lookahead_bytes + use.cached_bytes + use.other_bytes
                assert parts == tier.used_bytes
                assert parts + use.free_bytes == use.capacity_bytes == tier.capacity_bytes
            return router.arena_use()

        first, second = check()
        assert first.pinned_bytes > second.pinned_bytes > 0
        assert [u.lookahead_bytes + u.cached_bytes + u.other_bytes for u in (first, second)] == [0, 0]
        queries = clustered(8, seed=4)
        with router.session(lookahead_bytes=1 << 20) as session:
            session.lookahead(queries).result(300)
            held = check()
            assert sum(u.lookahead_bytes for u in held) > 0
            assert [u.pinned_bytes for u in held] == [first.pinned_bytes, second.pinned_bytes]
            session.search(queries, 3)
        after = check()
        assert sum(u.lookahead_bytes for u in after) == 0
        assert sum(u.cached_bytes for u in after) > 0


def test_what_lies_outside_the_parts_is_said(index, monkeypatch):
    with Router(index, devices=["cpu"], device_budget_bytes=8 << 20, lookahead_bytes=1 << 20) as router:
        [tier] = router.devices
        tier._copier.give_back([tier.arena.pages.allocate(3)], [Ticket(0)])
        [use] = router.arena_use()
        assert (use.kept_bytes, use.host_bytes, use.context_bytes) == (0, 0, None)
        tier._copier.give_back([tier.arena.pages.allocate(3)], [on_its_way()])
        monkeypatch.setattr(type(tier._copier), "staging_bytes", 5)
        [use] = router.arena_use()
        assert use.kept_bytes == use.other_bytes == 3 * tier.geometry.page_bytes
        assert use.host_bytes == 5


def on_its_way():
    ticket = Ticket(0)
    ticket.launched = True
    return ticket


def test_a_device_without_room_has_nothing_in_use(index):
    with Router(index, devices=["cpu"], device_budget_bytes=1) as router:
        [use] = router.arena_use()
    assert not use.usable
    assert (use.capacity_bytes, use.pinned_bytes, use.free_bytes) == (0, 0, 0)
