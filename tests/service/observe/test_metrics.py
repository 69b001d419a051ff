"""What ``/metrics`` tells: parsed as Prometheus would, held against what was asked before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hybridindex.router.batch.stages import LOOKAHEAD_WAIT
from tests.service.conftest import talk
from tests.service.metrics_reference import reference


def test_attainment_counts_what_was_in_time(make_service, queries):
    service = make_service(slo_ms=1e-6)

    async def conversation(http):
        await http.post("/v1/search", json={"queries": queries.tolist()})
        return metrics_of((await http.get("/metrics")).text)

    counted = talk(service, conversation)
    assert counted["hybridindex_slo_judged_total"] == 1
    assert counted["hybridindex_slo_met_total"] == 0


def metrics_of(text):
    return {s.name: s.value for f in text_string_to_metric_families(text) for s in f.samples if not s.labels}


def test_metrics_parse_and_count(service, queries):
    async def conversation(http):
        before = metrics_of((await http.get("/metrics")).text)
        for _ in range(3):
            await http.post("/v1/search", json={"queries": queries.tolist()})
        await http.post("/v1/search", json={"queries": [], "k": 1})
        return before, (await http.get("/metrics")).text

    before, text = talk(service, conversation)
    after = metrics_of(text)
    assert after["hybridindex_queries_total"] - before["hybridindex_queries_total"] == 60
    assert after["hybridindex_request_queries_count"] == 3
    assert after["hybridindex_slo_judged_total"] == 3
    assert after["hybridindex_slo_met_total"] <= 3
    assert after["hybridindex_slo_seconds"] == 0.05
    assert after["hybridindex_hit_rate_expected"] == pytest.approx(service.router.plan.predicted_hit_rate)
    assert 0 < after["hybridindex_hit_rate_observed"] <= 1
    assert after["hybridindex_queue_waiting"] == 0
    labelled = {
        (s.name, tuple(s.labels.values())): s.value for f in text_string_to_metric_families(text) for s in f.samples
    }
    assert labelled["hybridindex_responses_total", ("/v1/search", "200")] == 3
    assert labelled["hybridindex_responses_total", ("/v1/search", "400")] == 1
    assert labelled["hybridindex_stage_seconds_count", ("search",)] == 3
    # The third batch may still be about to report.
    for stage in ("batch_queue", "coarse", "split", "host_scan", "device_scan_0", "merge"):
        assert labelled["hybridindex_stage_seconds_count", (stage,)] in (2, 3)
        assert 0 < labelled["hybridindex_stage_seconds_sum", (stage,)] < 60
    assert labelled["hybridindex_resident_bytes", ("0: cpu",)] > 0
    assert labelled["hybridindex_moved_bytes_total", ("0: cpu",)] > 0


def test_a_device_that_comes_up_late_keeps_its_series(service, monkeypatch):
    """A GPU that was busy at the start is known by its name alone until it lets somebody in."""
    [tier] = service.router.devices

    async def conversation(http):
        before = (await http.get("/metrics")).text
        monkeypatch.setattr(tier, "info", replace(tier.info, label="cpu (a GPU's full name)"))
        return before, (await http.get("/metrics")).text

    before, after = [
        {
            (s.name, tuple(s.labels.values()))
            for f in text_string_to_metric_families(text)
            for s in f.samples
            if "device" in s.labels
        }
        for text in talk(service, conversation)
    ]
    assert before - after == {("hybridindex_device_info", ("0: cpu", "cpu (stand-in)"))}
    assert after - before == {("hybridindex_device_info", ("0: cpu", "cpu (a GPU's full name)"))}
    assert ("hybridindex_device_usable", ("0: cpu",)) in after


def test_waits_for_lists_are_counted(service):
    """What makes a search wait is the router's business; here it is only read."""
    service.router._stats.add_stages((), [(LOOKAHEAD_WAIT, 1.0, 1.5, 0.5), (LOOKAHEAD_WAIT, 2.0, 2.25, 0.25)])

    async def conversation(http):
        return metrics_of((await http.get("/metrics")).text)

    counted = talk(service, conversation)
    assert counted["hybridindex_lookahead_waits_total"] == 2
    assert counted["hybridindex_lookahead_wait_seconds_total"] == 0.75


def test_paths_that_were_made_up_share_one_label(service):
    async def conversation(http):
        for number in range(20):
            await http.get(f"/v1/{number}")
        return (await http.get("/metrics")).text

    assert talk(service, conversation).count("hybridindex_responses_total{") <= 2


def test_every_metric_stands_in_the_reference():
    found = (Path(__file__).parents[3] / "docs/metrics.md").read_text()
    assert found == reference(), "python -m tests.service.metrics_reference > docs/metrics.md"
