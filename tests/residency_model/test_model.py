"""Every state of small worlds keeps every invariant, and no guard of the model can be left out."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from functools import cache

import pytest

from tests.residency_model import generations, ledger, memory, memory_world
from tests.residency_model.check import Broken, explore

#: Two devices and three lists; plans, sessions and the end; pages that come and go.
SMALL = {
    "batches": memory_world.Instance(lists=3, pages=(1, 1), batches=2, hangs=False),
    "movement": memory_world.Instance(lists=3, pages=(1, 1), copies=2),
    "readers": memory_world.Instance(lists=2, pages=(2,), batches=2),
    "wishes": memory_world.Instance(lists=2, pages=(1, 1), sessions=1, plan=(0, -1), next_plan=(-1, 1), hangs=False),
    "resizing": memory_world.Instance(lists=2, pages=(2,), resizes=True, fails=False),
    "the end": memory_world.Instance(lists=2, pages=(2,), closes=True),
    "refreshes": ledger.Instance(refreshes=3),
    "swaps": generations.Instance(reloads=2),
}
#: Seconds each: they are explored once.
LARGE = {
    "large: batches": memory_world.Instance(lists=3, pages=(1, 1), batches=2, copies=2),
    "large: devices": memory_world.Instance(lists=3, pages=(2, 1), copies=2),
    "large: plans": memory_world.Instance(lists=3, pages=(1, 1), sessions=2, plan=(0, 1, -1), next_plan=(1, -1, 0)),
    "large: swaps": generations.Instance(reloads=3, users=3, sessions=3),
}


explored = cache(explore)


def module_of(instance):
    return {memory_world.Instance: memory, ledger.Instance: ledger, generations.Instance: generations}[type(instance)]


@pytest.mark.parametrize("name", SMALL)
def test_no_state_breaks_an_invariant_and_none_is_a_dead_end(name):
    found = explored(SMALL[name])
    assert found.broken is None, str(found.broken)
    assert found.states > 100


@pytest.mark.parametrize("name", LARGE)
def test_no_state_of_a_larger_world_does(name):
    found = explore(LARGE[name])
    print(f"{name}: {found.states:,} states, {found.transitions:,} transitions, depth {found.depth}")
    assert found.broken is None, str(found.broken)


def test_every_action_of_the_model_happens():
    for module in (memory, ledger, generations):
        taken = {a for i in SMALL.values() if module_of(i) is module for a in explored(i).actions}
        there = {name for name in vars(module.Rules) if not name.startswith("_") and name != "need"}
        # What is never allowed, and what is a part of other actions.
        assert there - taken <= {"commit_unseen", "fail", "open", "close"}


#: World, guard that is left out, what then breaks.
WITHOUT_A_GUARD = [
    ("readers", "pages_are_free", "every_page_has_one_owner"),
    ("readers", "bytes_have_landed", "leased_pages_hold_their_lists"),
    ("movement", "first_copy_stays", "every_page_has_one_owner"),
    ("readers", "readers_are_gone", "leased_pages_hold_their_lists"),
    ("readers", "lease_is_read", "a_batch_reads_what_it_leased"),
    ("readers", "scans_have_ended", "who_scans_has_a_lease"),
    ("movement", "copies_are_over", "nothing_writes_a_page_of_somebody_else"),
    ("movement", "trial_comes_last", "nothing_writes_a_page_of_somebody_else"),
    ("readers", "pages_are_sent_once", "leased_pages_hold_their_lists"),
    ("readers", "what_lands_was_sent", "leased_pages_hold_their_lists"),
    ("readers", "device_works", "lists_of_a_failed_device_go_to_the_host"),
    ("readers", "pages_were_given_up", "every_page_has_one_owner"),
    ("readers", "pages_were_kept", "every_page_has_one_owner"),
    ("readers", "kept_pages_come_free_first", "a_device_that_works_has_all_its_pages"),
    ("readers", "lists_leave_first", "lists_of_a_failed_device_go_to_the_host"),
    ("wishes", "no_session_holds_it", "what_somebody_wants_stays"),
    ("wishes", "no_plan_wants_it", "what_somebody_wants_stays"),
    ("wishes", "plan_spares_sessions", "what_somebody_wants_stays"),
    ("wishes", "only_lists_of_the_failed_device_leave", "what_somebody_wants_stays"),
    ("resizing", "only_free_pages_go", "every_page_has_one_owner"),
    ("resizing", "pages_are_new", "every_page_has_one_owner"),
    ("the end", "scans_have_ended_at_the_end", "nothing_uses_memory_that_is_gone"),
    ("the end", "copies_have_ended_at_the_end", "nothing_uses_memory_that_is_gone"),
    ("refreshes", "a_trial_is_not_current", "only_a_verified_plan_is_current"),
    ("refreshes", "saved_before_it_moves", "what_moved_can_be_found_again"),
    ("refreshes", "verified_before_it_is_committed", "only_a_verified_plan_is_current"),
    ("refreshes", "durable_before_it_is_told", "what_was_told_is_durable"),
    ("refreshes", "back_before_it_is_told", "what_was_told_serves"),
    ("refreshes", "what_a_store_may_have_is_written_again", "what_was_told_is_durable"),
    ("refreshes", "a_trial_is_not_carried_over", "only_a_verified_plan_is_current"),
    ("swaps", "users_have_left", "who_is_used_is_open"),
    ("swaps", "nobody_uses_it", "what_serves_is_open"),
    ("swaps", "a_session_is_opened_by_a_user", "who_is_used_is_open"),
    ("swaps", "sessions_are_used_no_more", "who_is_used_is_open"),
    ("swaps", "old_memory_goes_first", "device_memory_is_of_one_router"),
    ("swaps", "housekeeping_comes_last", "open_routers_have_their_files"),
]
#: World, guard without which alone nothing breaks, and why.
HARMLESS = [
    ("refreshes", "only_what_is_owed_is_paid", "what is written again is the same"),
    ("swaps", "sessions_have_moved", "they move, and none is opened, when users have left"),
]
#: World, action that never happens: from some state, nothing leads to rest.
WITHOUT_AN_ACTION = [
    *[("readers", action) for action in ("release", "reclaim", "fall_back", "unkeep", "recover", "writes_end")],
    *[("refreshes", action) for action in ("go_back", "tell_committed", "tell_rolled_back")],
    *[("swaps", action) for action in ("leave", "close_unused", "close_old")],
]


@pytest.mark.parametrize(("name", "guard", "breaks"), WITHOUT_A_GUARD, ids=[guard for _, guard, _ in WITHOUT_A_GUARD])
def test_without_a_guard_an_invariant_breaks(name, guard, breaks):
    broken = explore(dataclasses.replace(SMALL[name], dropped=(guard,))).broken
    assert broken is not None
    assert broken.what == breaks, str(broken)


@pytest.mark.parametrize(("name", "guard", "why"), HARMLESS, ids=[guard for _, guard, _ in HARMLESS])
def test_without_a_guard_that_is_listed_nothing_breaks(name, guard, why):
    found = explore(dataclasses.replace(SMALL[name], dropped=(guard,)))
    assert found.broken is None, f"{why}, it was said: {found.broken}"


def test_each_guard_of_the_source_is_listed():
    there = set()
    for rules in (memory.Rules, ledger.Rules, generations.Rules):
        for node in ast.walk(ast.parse(inspect.getsource(rules))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "self.need":
                there.add(ast.literal_eval(node.args[1]))
            elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]) == "self._dropped":
                there.add(ast.literal_eval(node.left))
    assert there == {guard for _, guard, _ in WITHOUT_A_GUARD + HARMLESS}


@pytest.mark.parametrize(("name", "action"), WITHOUT_AN_ACTION)
def test_without_an_action_there_are_dead_ends(name, action):
    without = (action, "crash", "reload") if name == "refreshes" else (action,)
    broken = explore(dataclasses.replace(SMALL[name], without=without)).broken
    assert broken is not None
    assert broken.what == "a dead end", str(broken)


def test_a_way_is_told_action_by_action():
    broken = explore(dataclasses.replace(SMALL["readers"], dropped=("readers_are_gone",))).broken
    assert isinstance(broken, Broken)
    assert [action.split()[0] for action in broken.way] == [
        *("take", "send", "land", "approve", "publish", "lease", "evict", "reclaim"),
    ]
    assert "reclaim page 0.0" in str(broken)
