"""What the scan benchmark does on a GPU alone, in triton's interpreter: it must not fail there for the first time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.device import codes as device_codes
from benchmarks.device import scan as device_scan
from benchmarks.device import sweep as device_sweep
from benchmarks.device import targets
from hybridindex.tiers.paged import triton_scanner as device_triton
from hybridindex.tiers.paged.codes import triton_code_scanner
from hybridindex.tiers.paged.codes.triton_code_scanner import CodeWorkspace, TritonCodeScanner
from hybridindex.tiers.paged.triton_scanner import TritonScanner, Workspace
from tests.tiers.triton_here import require_triton

SCRATCH = 1 << 20


@pytest.fixture
def lists(monkeypatch):
    """``lists(kind)``: some 200 rows of 16 dimensions in 60 lists, which triton kernels scan."""
    require_triton("cpu")
    import torch

    monkeypatch.setattr(TritonScanner, "unsupported", staticmethod(lambda _arena: ""))
    monkeypatch.setattr(device_scan, "TURNS", 1)
    device = torch.device("cpu")
    return lambda kind: device_scan.make_lists(device, kind, 16, "ip", 200 * 16 * device_scan.BYTES[kind])


@pytest.mark.parametrize("kind", device_scan.BYTES)
def test_a_row_has_every_figure_that_a_target_asks_for(lists, kind):
    row = device_scan.measure(lists(kind), 1, 8, 1, SCRATCH)
    assert (row["scanner"], row["wrong"], row["checked"]) == ("triton", 0, 1)
    figures = ("kernels_ms", "of_a_sum", "gbps", "scan_of_a_sum", "scan_gbps")
    assert all(row[key] > 0 for key in (*figures, *(() if kind == "sq8" else ("over_dense",))))
    assert (row["graph_ms"], row["graph_reason"]) == (None, "no GPU")


@pytest.mark.parametrize(("shape", "n"), [("l2", 2), ("reuse 1", 4), ("reuse 4", 8), ("request log", 6)])
def test_every_shape_is_timed_by_the_clock_and_by_its_kernels(lists, shape, n):
    some = replace(lists("f16"), metric="l2" if shape == "l2" else "ip")
    row = device_scan.measure(some, n, 8, 1, SCRATCH, shape)
    assert (row["shape"], row["wrong"], row["checked"]) == (shape, 0, min(n, device_scan.CHECKED))
    assert row["of_a_sum"] > 0 < row["scan_of_a_sum"]
    if shape.startswith("reuse"):
        assert row["reuse"] == pytest.approx(int(shape[-1]), rel=0.2)


def test_shapes_of_the_sets_are_those_that_are_judged():
    assert sorted(shape for _, _, shapes in device_scan.SETS for shape in shapes) == sorted(targets.SCAN_SHAPES)


def launched(some, n_queries):
    """A workspace whose kernels have run once; where they write, emptied, and what stood there."""
    batch = device_scan.make_batch(some, n_queries, 3, np.random.default_rng(0))
    (workspace,) = device_scan.prepare(some, [batch], SCRATCH)
    _, tables, at, _ = workspace.launched[0]
    out = workspace._floats[at["out"] : at["out"] + tables.n_slots]
    before = out.clone()
    out.zero_()
    return workspace, out, before


def test_launching_again_does_the_work_again(lists):
    workspace, out, before = launched(lists("f32"), 2)
    workspace.again()
    assert before.any()
    assert (out == before).all()


def test_what_takes_several_tiles_is_not_timed_by_its_first(lists):
    some = lists("f32")
    batch = device_scan.make_batch(some, 2, 30, np.random.default_rng(0))
    assert device_scan.prepare(some, [batch], 4096) == []


def test_a_wrong_answer_is_found(lists):
    some = lists("f32")
    queries, probes = device_scan.make_batch(some, 2, 50, np.random.default_rng(0))
    distances, ids = some.scanner(SCRATCH).scan(queries, probes, np.zeros(probes.shape, np.float32), 5)
    assert device_scan.wrong_answers(some, queries, probes, distances, ids) == 0
    distances[1] += 0.01
    assert device_scan.wrong_answers(some, queries, probes, distances, ids) == 1


def test_a_sweep_launches_the_kernel_with_every_setting_and_puts_it_back(lists, monkeypatch):
    from hybridindex.tiers.paged import triton_kernels

    for name, values in (("TURNS", 1), ("ROWS", (4, 8)), ("COLS", (16,)), ("WARPS", (4,)), ("REGISTERS", (99,))):
        monkeypatch.setattr(device_sweep, name, values)
    kernel = triton_kernels.scan_light
    rows = device_sweep.sweep(lists("f32"), 1, 3, 1, SCRATCH)
    assert triton_kernels.scan_light is kernel
    assert sorted((r["rows"], r["cols"], r["warps"], r["registers"], r["error"]) for r in rows) == [
        (4, 16, 4, 99, ""),
        (8, 16, 4, 99, ""),
    ]
    assert rows[0]["faster"] >= rows[1]["faster"] > 0


def test_a_sweep_of_what_is_heavy_launches_every_number_and_puts_it_back(lists, monkeypatch):
    # Each is launched by being prepared; timing is the other sweep's too.
    for name, value in (("TURNS", 1), ("HEAVY_FROM", (1, 2, 99)), ("seconds_of", lambda *_: 1.0)):
        monkeypatch.setattr(device_sweep, name, value)
    n_light, launch = {}, Workspace.launch
    threshold = device_triton._HEAVY_FROM

    def counted(self, elements, tables, *rest):
        n_light.setdefault(threshold["bf16"], tables.n_light / tables.n_items)
        launch(self, elements, tables, *rest)

    monkeypatch.setattr(Workspace, "launch", counted)
    before = dict(threshold)
    rows = device_sweep.sweep_heavy(lists("bf16"), 2, 12, 1, SCRATCH)
    assert threshold == before
    assert sorted((r["heavy_from"], r["error"]) for r in rows) == [(1, ""), (2, ""), (99, "")]
    assert n_light[1] == 0 < n_light[2] < n_light[99] == 1


def test_another_setting_is_used_and_computes_the_same(lists):
    workspace, out, before = launched(lists("f32"), 1)
    with device_sweep.reshaped([workspace], ROWS=2, COLS=8) as other:
        workspace.again()
    assert other.launches == 1
    np.testing.assert_allclose(out, before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("bits", "metric"), [(1, "ip"), (2, "l2")])
def test_codes_of_equal_lists_have_every_figure(lists, monkeypatch, bits, metric):
    monkeypatch.setattr(TritonCodeScanner, "unsupported", staticmethod(lambda _arena: ""))
    rows = replace(lists("bf16"), metric=metric)
    coded = device_codes.make_codes(rows, bits, 20)
    assert (coded.list_sizes == rows.list_sizes).all()
    row = device_scan.measure(coded, 1, 8, 1, SCRATCH)
    assert (row["scanner"], row["k"], row["wrong"], row["checked"]) == ("triton", 20, 0, 1)
    assert all(row[key] > 0 for key in ("kernels_ms", "of_a_sum", "gbps"))


def test_a_wrong_estimate_or_candidate_is_found(lists):
    coded = device_codes.make_codes(lists("bf16"), 2, 5)
    queries, probes = device_scan.make_batch(coded, 2, 50, np.random.default_rng(0))
    found = coded.scan(coded.scanner(SCRATCH), queries, probes)
    assert coded.wrong(queries, probes, found) == 0
    found[0][0, 4] = np.nextafter(found[0][0, 4], np.float32(9))
    assert coded.wrong(queries, probes, found) == 1
    found[1][1, :2] = found[1][1, 1::-1]
    assert coded.wrong(queries, probes, found) == 2


def test_a_sweep_of_codes_takes_their_own_numbers(lists, monkeypatch):
    for name, value in (("TURNS", 1), ("HEAVY_FROM", (1, 99)), ("seconds_of", lambda *_: 1.0)):
        monkeypatch.setattr(device_sweep, name, value)
    seen, launch = [], CodeWorkspace.launch
    monkeypatch.setattr(CodeWorkspace, "launch", lambda self, *a: seen.append(a[1].n_light) or launch(self, *a))
    before = dict(triton_code_scanner._HEAVY_FROM)
    rows = device_sweep.sweep_heavy(device_codes.make_codes(lists("bf16"), 1, 20), 2, 8, 1, SCRATCH)
    assert before == triton_code_scanner._HEAVY_FROM
    assert [(r["bits"], r["heavy_from"], r["error"]) for r in rows] == [(1, 1, ""), (1, 99, "")]
    assert 0 in seen
    assert max(seen) > 0
