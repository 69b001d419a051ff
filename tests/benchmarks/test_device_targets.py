"""Verdicts: the worst row decides, a stand-in claims nothing, a part cut short passes nothing."""

from __future__ import annotations

import pytest

from benchmarks.device.router import allowed_speedup
from benchmarks.device.targets import judge


def scan_row(**changes):
    row = {
        "shape": "main",
        "codec": "f32",
        "dim": 384,
        "batch": 1,
        "nprobe": 256,
        "reuse": 1.0,
        "of_a_sum": 0.6,
        "over_dense": 9.0,
    }
    row |= {"scan_of_a_sum": 0.45, "scan_gbps": 900.0}
    return row | {"wrong": 0, "checked": 1} | changes


def scan(rows, *, stand_in=False, complete=True):
    return {"device_scan": {"stand_in": stand_in, "complete": complete, "rows": rows}}


def by_what(verdicts):
    return {v.what: v for v in verdicts}


SUM_1 = "kernels over a sum of the bytes: main, batch 1"
DENSE_1 = "kernels over a dense product and topk: main, batch 1"


def test_the_lowest_row_decides_and_is_named():
    rows = [scan_row(), scan_row(codec="bf16", dim=768, of_a_sum=0.49), scan_row(shape="l2", of_a_sum=0.1)]
    found = by_what(judge(scan(rows), {"device_scan": "complete"}))
    assert (found[SUM_1].met, found[SUM_1].measured) == (False, "49%")
    assert "bf16 d=768" in found[SUM_1].note
    assert found[DENSE_1].met is True
    assert found["answers against float64"].met is True
    assert "the lowest of 2, 1 reach it" in found[SUM_1].note
    assert found[SUM_1.replace("main", "l2")].met is False
    assert found[SUM_1.replace("1", "8")].met is None


def test_a_whole_scan_is_judged_by_the_clock_and_its_bandwidth_is_named():
    found = by_what(judge(scan([scan_row(), scan_row(scan_of_a_sum=0.39)]), {"device_scan": "complete"}))
    verdict = found[SUM_1.replace("kernels", "scan")]
    assert (verdict.met, verdict.measured) == (False, "39%")
    assert "900 GB/s by the clock" in verdict.note


def test_rows_without_a_figure_cannot_pass():
    found = by_what(judge(scan([scan_row(), scan_row(of_a_sum=None)]), {"device_scan": "complete"}))
    assert found[SUM_1].met is None
    assert "1 without a figure" in found[SUM_1].note


def test_a_stand_in_claims_nothing_whatever_it_measured():
    rows = [scan_row(), scan_row(of_a_sum=0.1, wrong=1)]
    found = judge(scan(rows, stand_in=True), {"device_scan": "complete"})
    assert {v.met for v in found} == {None}
    assert all(v.note.startswith("stand-in: claims nothing") for v in found)


def test_a_part_cut_short_can_miss_but_not_pass():
    rows = [scan_row(over_dense=0.5)]
    found = by_what(judge(scan(rows, complete=False), {"device_scan": "stopped after 240 s"}))
    assert (found[SUM_1].met, found[DENSE_1].met) == (None, False)
    assert found[SUM_1].note.startswith("cut short: stopped after 240 s")


def test_a_part_without_results_is_said():
    (only,) = judge({}, {"device_copy": "failed: exit status 1"})
    assert (only.part, only.met, only.note) == ("device_copy", None, "failed: exit status 1")


def swap_row(p99, *, median=20.0, noise=30.0, compaction=None):
    pause = {"median": median, "p99": p99, "max": p99}
    row = {"nlist": 4096, "pause_us": pause, "nothing_us": {"p99": noise}, "compactions": 0}
    return row | {"compaction_pause_us": None if compaction is None else {"median": compaction}}


@pytest.mark.parametrize(
    ("row", "met"),
    [
        (swap_row(90.0), True),
        (swap_row(110.0), False),
        (swap_row(90.0, compaction=620.0), False),
        (swap_row(110.0, noise=200.0), None),
        (swap_row(110.0, median=105.0, noise=200.0), False),
        (swap_row(110.0, noise=200.0, compaction=620.0), False),
    ],
)
def test_a_swap_is_judged_by_p99_and_by_its_compactions(row, met):
    result = {"device_swap": {"stand_in": False, "complete": True, "rows": [row]}}
    assert [v.met for v in judge(result, {"device_swap": "complete"})] == [met]


def router(rows):
    return {"device_router": {"stand_in": False, "complete": True, "lookahead": rows, "sum_gbps": 3000.0}}


def ahead(eta, faster, of_bound=0.9):
    row = {"nprobe": 64, "share": 0.1, "eta": eta, "times_faster": (faster, 0, 0), "of_bound": of_bound}
    return row | {"of_own_bound": 1.0, "device_bytes": 1e9, "device_scan_ms": 0.5}


@pytest.mark.parametrize(
    ("rows", "met"),
    [
        ([ahead(0.95, 8.0), ahead(0.3, 1.4)], True),
        ([ahead(0.95, 6.0), ahead(0.99, 9.0)], False),
        ([ahead(0.8, 8.0)], None),
        ([], None),
    ],
)
def test_seven_times_is_asked_for_where_eta_is_high(rows, met):
    found = by_what(judge(router(rows), {"device_router": "complete"}))
    assert found["speed-up by lookahead where eta >= 0.9"].met is met


def test_the_other_process_is_not_undisturbed_when_nothing_was_done():
    row = {"load": "memory", "alone": [1.0], "moving": [1.0], "scanning": [0.7], "moved GB/s": 0.0, "batches/s": 3.0}
    result = {"device_beside": {"stand_in": False, "complete": True, "sharing": "time-sliced", "rows": [row]}}
    moving, scanning = judge(result, {"device_beside": "complete"})
    assert (moving.met, moving.note) == (None, "nothing was done meanwhile")
    assert (scanning.measured, scanning.target, scanning.met) == ("70.0%", "reported", None)


def test_what_times_allow_is_limited_by_fixed_costs_the_device_and_what_is_left():
    assert allowed_speedup(host_s=10, scan_s=9, device_s=0, eta=1.0) == pytest.approx(10)
    assert allowed_speedup(host_s=10, scan_s=9, device_s=3, eta=1.0) == pytest.approx(2.5)
    assert allowed_speedup(host_s=10, scan_s=8, device_s=1, eta=0.5) == pytest.approx(10 / 6)
    assert allowed_speedup(host_s=10, scan_s=10, device_s=0.1, eta=0.5) == pytest.approx(2)


def test_a_bound_names_bandwidth_and_the_devices_own_time():
    found = by_what(judge(router([ahead(0.95, 8.0, 0.7)]), {"device_router": "complete"}))
    verdict = found["speed-up by lookahead, of what a sum's bandwidth allows"]
    assert (verdict.met, verdict.measured) == (False, "70%")
    assert "2000 GB/s by the device, 3000 of a sum, 100% of what the device's own time allows" in verdict.note


def test_a_service_that_could_not_be_started_is_said():
    result = {"stand_in": False, "complete": True, "sharing": "MPS could not be started: no such program", "rows": []}
    (only,) = judge({"device_beside_mps": result}, {"device_beside_mps": "complete"})
    assert (only.part, only.met, only.note) == ("device_beside_mps", None, result["sharing"])


def test_faiss_is_judged_from_batch_8_on_where_the_bytes_are_float32():
    row = {"codec": "f32", "faiss": "IVF,Flat", "metric": "ip", "batch": 8, "scan_gbps": 3e3, "faiss_gbps": 2e3}
    row |= {"same_ids": 1.0, "noise": [1.0], "wrong": 0, "checked": 8, "faster": [0.9]}
    rows = [row, row | {"batch": 1}, row | {"codec": "f16"}, row | {"batch": 64, "faster": [1.4]}]
    result = {"stand_in": False, "complete": True, "reason": "", "rows": rows}
    same, *found = judge({"faiss_gpu": result}, {"faiss_gpu": "complete"})
    assert same.met is True
    assert [v.met for v in found] == [False, None, None, True]


@pytest.mark.parametrize(("arena", "met"), [("fresh", True), ("used", False)])
def test_copies_are_judged_in_a_fresh_and_in_a_used_arena(arena, met):
    row = {"lists from": "pinned memory", "GB/s": 50.0, "plain GB/s": 55.0, "runs a list": 3.0, "pin_reason": ""}
    rows = [row | {"arena": "fresh", "of plain": [0.95]}, row | {"arena": "used", "of plain": [0.6]}]
    result = {"stand_in": False, "complete": True, "prefetch": rows}
    found = by_what(judge({"device_copy": result}, {"device_copy": "complete"}))
    assert found[f"prefetch from pinned memory to a {arena} arena, of a plain pinned copy"].met is met
