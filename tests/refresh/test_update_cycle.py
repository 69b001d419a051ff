"""Whatever fails and whenever: an update ends, and the plan that serves afterwards is the one that its outcome says."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hybridindex.errors import InvalidInputError
from hybridindex.plans.proposal import Comparison
from hybridindex.refresh.drift import DriftPolicy, Expectation, HitRatePrediction, Tick, Window, WindowClosed
from hybridindex.refresh.update_cycle import (
    Chosen,
    CollectProfile,
    Commit,
    Committed,
    CycleStage,
    Ended,
    Failed,
    Move,
    Moved,
    Outcome,
    Overtaken,
    Profiled,
    Requested,
    RollBack,
    RolledBack,
    Solve,
    Solved,
    Transition,
    UpdateCycle,
    UpdatePolicy,
    Weigh,
    Weighed,
    objection,
    worse,
)
from tests.examples import examples

DRIFT = DriftPolicy(min_queries=20)
POLICY = UpdatePolicy(verify_windows=2, verify_timeout_s=100.0, back_off_s=10.0, max_back_off_s=35.0)
PROMISE = Expectation(slo_s=0.1, attainment=0.9, hit_rate=HitRatePrediction(mean=0.7, variance=0.04, n_held=1000))
BETTER = Comparison(
    hit_rate_before=0.4, hit_rate_after=0.7, latency_ms_before=9, latency_ms_after=8, bytes_to_move=1 << 20, move_s=1.0
)


def window(*, hit_rate=0.7, attainment=0.95, began_s=0.0, n=400, thin=False):
    return Window(
        number=0,
        began_s=began_s,
        ended_s=began_s + 5,
        requests=n,
        within_slo=round(attainment * n),
        queries=n,
        hit_rate_sum=hit_rate * n,
        hit_rate_squares=(hit_rate**2 + 0.04) * n,
        interval=(0.0, 1.0),
        thin=thin,
        late=False,
        outside=False,
    )


BEFORE = (window(hit_rate=0.4, attainment=0.6),)


def work(actions):
    """Everything but the records."""
    return [a for a in actions if not isinstance(a, Transition)]


def stages(actions):
    return [a.target for a in actions if isinstance(a, Transition)]


def moved_cycle(policy=POLICY, before=BEFORE):
    cycle = UpdateCycle(policy, DRIFT)
    assert work(cycle.handle(Requested(now_s=0.0, reason="drift", before=before))) == [CollectProfile()]
    assert work(cycle.handle(Profiled(now_s=1.0))) == [Solve()]
    assert work(cycle.handle(Solved(now_s=2.0))) == [Weigh()]
    assert work(cycle.handle(Weighed(now_s=3.0, comparison=BETTER))) == [Move()]
    assert cycle.stage is CycleStage.MOVING
    return cycle, cycle.handle(Moved(now_s=4.0, expectation=PROMISE))


def test_a_good_plan_goes_all_the_way():
    cycle, actions = moved_cycle()
    assert stages(actions) == [CycleStage.VERIFYING]
    assert work(cycle.handle(WindowClosed(window=window(began_s=4.0)))) == []
    assert cycle.n_verified == 1
    assert work(cycle.handle(WindowClosed(window=window(began_s=9.0)))) == [Commit(verified=True)]
    (ended,) = work(cycle.handle(Committed(now_s=15.0)))
    assert ended.outcome is Outcome.COMMITTED
    assert "0.700" in ended.why
    assert cycle.stage is CycleStage.IDLE
    assert work(cycle.handle(Requested(now_s=15.0, reason="again"))) == [CollectProfile()]


def test_a_window_that_both_plans_served_verifies_nothing():
    cycle, _ = moved_cycle()
    for _ in range(5):
        assert cycle.handle(WindowClosed(window=window(began_s=3.9, hit_rate=0.0))) == []
    assert cycle.n_verified == 0


def test_thin_windows_count_only_when_time_is_up():
    cycle, _ = moved_cycle()
    for i in range(6):
        assert cycle.handle(WindowClosed(window=window(began_s=5.0 + i, thin=True, n=10))) == []
    assert cycle.handle(Tick(now_s=103.0)) == []
    assert work(cycle.handle(Tick(now_s=104.0))) == [Commit(verified=True)]


def test_a_plan_that_nobody_used_is_committed_and_said_to_be_unverified():
    cycle, _ = moved_cycle()
    assert work(cycle.handle(Tick(now_s=104.0))) == [Commit(verified=False)]
    (ended,) = work(cycle.handle(Committed(now_s=105.0)))
    assert "not verified" in ended.why


@pytest.mark.parametrize("spoilt", [{"attainment": 0.0}, {"hit_rate": 0.0}])
def test_a_request_or_two_decide_nothing(spoilt):
    before = (window(hit_rate=0.95, attainment=1.0),)
    for n, n_enough in ((1, False), (DRIFT.min_queries - 1, False), (DRIFT.min_queries, True)):
        cycle, _ = moved_cycle(before=before)
        cycle.handle(WindowClosed(window=window(began_s=5.0, thin=n < DRIFT.min_queries, n=n, **spoilt)))
        (action,) = work(cycle.handle(Tick(now_s=104.0)))
        if n_enough:
            assert isinstance(action, RollBack)
            continue
        assert action == Commit(verified=False)
        (ended,) = work(cycle.handle(Committed(now_s=105.0)))
        assert ended.why == f"{n} queries were seen, fewer than {DRIFT.min_queries}: not verified"


def test_without_verification_a_plan_is_committed_at_once():
    _, actions = moved_cycle(dataclasses.replace(POLICY, verify_windows=0))
    assert work(actions) == [Commit(verified=False)]


@pytest.mark.parametrize("bad", [{"hit_rate": 0.2}, {"attainment": 0.3}])
def test_a_worse_plan_is_rolled_back(bad):
    cycle, _ = moved_cycle()
    cycle.handle(WindowClosed(window=window(began_s=4.0, **bad)))
    actions = cycle.handle(WindowClosed(window=window(began_s=9.0, **bad)))
    (back,) = work(actions)
    assert isinstance(back, RollBack)
    assert "before" in back.why
    (ended,) = work(cycle.handle(RolledBack(now_s=20.0)))
    assert ended.outcome is Outcome.ROLLED_BACK
    assert cycle.not_before_s == 30.0


def test_what_worse_means():
    promised = dataclasses.replace(PROMISE, hit_rate=dataclasses.replace(PROMISE.hit_rate, mean=0.3))
    before = window(hit_rate=0.6, attainment=0.95)
    assert worse(before, window(hit_rate=0.3), promised, DRIFT) == "", "it keeps what it promised"
    assert worse(before, window(hit_rate=0.1), promised, DRIFT) != ""
    assert worse(before, window(hit_rate=0.58), PROMISE, DRIFT) == "", "not worse than before, within the margin"
    assert worse(None, window(hit_rate=0.58), PROMISE, DRIFT) != "", "nothing to compare with but the promise"
    assert worse(None, window(attainment=0.1), PROMISE, DRIFT) == ""
    assert worse(before, window(attainment=0.91), PROMISE, DRIFT) == "", "attainment is what was asked for"
    late = window(hit_rate=0.6, attainment=0.5)
    assert worse(late, window(attainment=0.48), PROMISE, DRIFT) == ""
    assert "attainment" in worse(late, window(attainment=0.3), PROMISE, DRIFT)


@pytest.mark.parametrize(
    ("changes", "policy", "word"),
    [
        ({"bytes_to_move": 0}, {}, "nothing has to move"),
        ({"hit_rate_after": 0.41, "latency_ms_after": 8.9}, {}, "less than the gain"),
        ({"bytes_to_move": 10 << 30, "latency_ms_after": 8.9}, {"min_gain_per_gib": 0.1}, "not worth"),
        ({"move_s": 50.0}, {"max_move_s": 20.0}, "50 s"),
        ({"feasible_before": True, "feasible_after": False}, {}, "only a person applies it"),
    ],
)
def test_what_is_not_worth_its_move_is_declined(changes, policy, word):
    why = objection(dataclasses.replace(BETTER, **changes), dataclasses.replace(POLICY, **policy))
    assert word in why
    cycle = UpdateCycle(dataclasses.replace(POLICY, **policy), DRIFT)
    cycle.handle(Requested(now_s=0.0, reason="drift"))
    cycle.handle(Profiled(now_s=0.0))
    cycle.handle(Solved(now_s=0.0))
    (ended,) = work(cycle.handle(Weighed(now_s=0.0, comparison=dataclasses.replace(BETTER, **changes))))
    assert (ended.outcome, ended.why) == (Outcome.DECLINED, why)
    assert work(cycle.handle(Requested(now_s=0.0, reason="no back-off"))) == [CollectProfile()]


def test_latency_alone_can_speak_for_a_plan():
    same_hits = dataclasses.replace(BETTER, hit_rate_after=0.4, latency_ms_after=5.0)
    assert objection(same_hits, POLICY) == ""
    assert same_hits.latency_gain == pytest.approx(4 / 9)


def test_failures_double_the_pause_up_to_a_limit_and_a_success_ends_it():
    cycle = UpdateCycle(POLICY, DRIFT)
    now, pauses = 0.0, []
    for _ in range(4):
        cycle.handle(Requested(now_s=now, reason="drift"))
        (ended,) = work(cycle.handle(Failed(now_s=now, why="no queries")))
        assert ended.outcome is Outcome.FAILED
        assert "profiling failed: no queries" in ended.why
        (refused,) = cycle.handle(Requested(now_s=now + 1, reason="too soon"))
        assert refused.outcome is Outcome.BACKED_OFF
        pauses.append(cycle.not_before_s - now)
        now = cycle.not_before_s
    assert pauses == [10.0, 20.0, 35.0, 35.0]
    assert work(cycle.handle(Chosen(now_s=now - 1, reason="a person need not wait"))) == [Move()]
    cycle.handle(Moved(now_s=now, expectation=PROMISE))
    cycle.handle(Tick(now_s=now + 100))
    cycle.handle(Committed(now_s=now + 100))
    cycle.handle(Requested(now_s=now + 100, reason="drift"))
    cycle.handle(Failed(now_s=now + 100, why="no queries"))
    assert cycle.not_before_s == now + 110


def test_a_roll_back_that_fails_is_tried_again():
    cycle, _ = moved_cycle()
    cycle.handle(WindowClosed(window=window(began_s=4.0, hit_rate=0.0)))
    cycle.handle(WindowClosed(window=window(began_s=9.0, hit_rate=0.0)))
    for now, pause in ((20.0, 10.0), (40.0, 20.0), (80.0, 35.0)):
        assert work(cycle.handle(Failed(now_s=now, why="device gone"))) == []
        assert cycle.stage is CycleStage.ROLLING_BACK
        assert cycle.handle(Tick(now_s=now + pause - 1)) == []
        assert [type(a) for a in cycle.handle(Tick(now_s=now + pause))] == [RollBack]
        assert cycle.handle(Tick(now_s=now + pause)) == []
    (ended,) = work(cycle.handle(RolledBack(now_s=200.0)))
    assert ended.outcome is Outcome.ROLLED_BACK


def test_an_update_that_was_overtaken_is_over_without_a_pause():
    cycle, _ = moved_cycle()
    (ended,) = work(cycle.handle(Overtaken(now_s=20.0, why="another plan")))
    assert (ended.outcome, ended.why, cycle.stage) == (Outcome.FAILED, "another plan", CycleStage.IDLE)
    assert work(cycle.handle(Requested(now_s=20.0, reason="again"))) == [CollectProfile()]


def test_an_answer_to_another_stage_is_a_bug():
    cycle = UpdateCycle(POLICY, DRIFT)
    with pytest.raises(AssertionError, match="solving"):
        cycle.handle(Solved(now_s=0.0))
    with pytest.raises(AssertionError, match="nothing was going on"):
        cycle.handle(Failed(now_s=0.0, why=""))


@pytest.mark.parametrize(
    "changes",
    [
        {"min_hit_rate_gain": -1},
        {"verify_timeout_s": 0},
        {"max_back_off_s": 1},
        {"max_back_off_s": float("nan")},
        {"max_move_s": float("nan")},
    ],
    ids=str,
)
def test_policies_that_make_no_sense_are_refused(changes):
    with pytest.raises(InvalidInputError, match=next(iter(changes))):
        UpdatePolicy(**changes)


class CycleMachine(RuleBasedStateMachine):
    """A world beside the cycle: it does what is asked, or fails, and knows which plan serves and is committed."""

    def __init__(self):
        super().__init__()
        self.cycle = UpdateCycle(POLICY, DRIFT)
        self.now = 0.0
        self.asked = None
        self.plans = 0
        self.serving = self.committed = self.base = self.next = 0
        self.trail = [CycleStage.IDLE]
        self.updates = self.ended = 0

    def take(self, actions):
        for action in actions:
            if isinstance(action, Transition):
                assert action.source is self.trail[-1]
                self.trail.append(action.target)
            elif isinstance(action, Ended):
                if action.outcome is not Outcome.BACKED_OFF:
                    self.ended += 1
                    assert self.serving == (self.next if action.outcome is Outcome.COMMITTED else self.base)
                    assert self.committed == self.serving
            else:
                assert self.asked is None, "two things at once"
                self.asked = action

    def start(self, event):
        began = self.cycle.stage is CycleStage.IDLE
        self.take(self.cycle.handle(event))
        if began and self.cycle.stage is not CycleStage.IDLE:
            self.plans += 1
            self.updates += 1
            self.base, self.next = self.serving, self.plans

    @rule(gap=st.floats(0, 120))
    def tick(self, gap):
        self.now += gap
        self.take(self.cycle.handle(Tick(now_s=self.now)))

    @rule()
    def request(self):
        self.start(Requested(now_s=self.now, reason="drift", before=BEFORE))

    @precondition(lambda self: self.cycle.stage is CycleStage.IDLE)
    @rule()
    def choose(self):
        self.start(Chosen(now_s=self.now, reason="a person"))

    @rule(hit_rate=st.sampled_from([0.1, 0.7]), thin=st.booleans(), old=st.booleans())
    def serve(self, hit_rate, thin, old):
        began = self.now - 50 if old else self.now
        self.now += 6
        self.take(self.cycle.handle(WindowClosed(window=window(hit_rate=hit_rate, thin=thin, began_s=began))))

    @precondition(lambda self: self.asked is not None)
    @rule(works=st.booleans(), worth=st.booleans())
    def carry_out(self, works, worth):
        action, self.asked = self.asked, None
        self.now += 1
        if isinstance(action, Move):
            # A move that fails half-way leaves neither plan.
            self.serving = self.next if works else -1
        if not works:
            self.take(self.cycle.handle(Failed(now_s=self.now, why="injected")))
            return
        match action:
            case CollectProfile():
                event = Profiled(now_s=self.now)
            case Solve():
                event = Solved(now_s=self.now)
            case Weigh():
                event = Weighed(
                    now_s=self.now, comparison=BETTER if worth else dataclasses.replace(BETTER, bytes_to_move=0)
                )
            case Move():
                event = Moved(now_s=self.now, expectation=PROMISE)
            case Commit():
                self.committed = self.next
                event = Committed(now_s=self.now)
            case RollBack():
                self.serving = self.base
                event = RolledBack(now_s=self.now)
        self.take(self.cycle.handle(event))

    @invariant()
    def it_holds(self):
        self.cycle.check_invariants()
        assert self.trail[-1] is self.cycle.stage
        assert self.updates - self.ended == (self.cycle.stage is not CycleStage.IDLE)
        assert self.committed in (self.base, self.serving, self.next)
        if self.cycle.stage in (CycleStage.PROFILING, CycleStage.SOLVING, CycleStage.WEIGHING):
            assert self.serving == self.base == self.committed
        working = self.cycle.stage not in (CycleStage.IDLE, CycleStage.VERIFYING, CycleStage.ROLLING_BACK)
        assert not working or self.asked is not None, "nobody would ever answer"


TestCycleMachine = CycleMachine.TestCase
TestCycleMachine.settings = examples(150, stateful_step_count=40)
