"""Stage times: what each batch reports, what the router sums, and that listeners stop nobody."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from hybridindex.router import Router
from tests.clustered import clustered, hand_made_plan, small_index
from tests.router.test_router import check

WAIT_S = 300


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("idx") / "i", nprobe=8) as index:
        yield index


def two_devices(index) -> Router:
    """Every third list on the host."""
    plan = hand_made_plan(index, np.arange(index.nlist) % 3 - 1, n_devices=2)
    return Router(index, plan=plan, devices=["cpu", "cpu"])


class Listener:
    """Keeps reports; waits for some."""

    def __init__(self) -> None:
        self.reports = []
        self._came = threading.Semaphore(0)

    def __call__(self, report) -> None:
        self.reports.append(report)
        self._came.release()

    def wait(self):
        """The next report that nobody waited for."""
        assert self._came.acquire(timeout=WAIT_S)
        return self.reports[-1]


def test_a_batch_reports_each_stage_on_each_tier(index):
    told = Listener()
    with two_devices(index) as router:
        router.on_batch.append(told)
        router.submit(clustered(20), 7, index.nlist).result(WAIT_S)
        report = told.wait()
    assert (report.n_requests, report.n_queries, report.k, report.nprobe) == (1, 20, 7, index.nlist)
    times = {stage.stage: stage for stage in report.stages}
    assert set(times) == {"coarse", "split", "host_scan", "device_scan_0", "device_scan_1", "merge"}
    assert len(report.stages) == len(times)
    for stage in report.stages:
        assert report.started_s <= stage.started_s <= stage.ended_s
        assert 0 < stage.busy_s <= stage.ended_s - stage.started_s
    assert times["coarse"].ended_s == times["split"].started_s
    for scan in ("host_scan", "device_scan_0", "device_scan_1"):
        assert times[scan].started_s >= times["coarse"].ended_s
        assert times["merge"].ended_s > times[scan].ended_s
    # Three parts were merged one after the other; between them the batch waited for scans.
    assert times["merge"].busy_s < times["merge"].ended_s - times["merge"].started_s
    assert len(report.queue_s) == 1
    assert report.queue_s[0] > 0


def test_sums_are_those_of_the_reports(index):
    told = Listener()
    with two_devices(index) as router:
        router.on_batch.append(told)
        for seed in range(3):
            router.search(clustered(5, seed=seed))
            told.wait()
        stages = router.stats().stages
    assert [report.number for report in told.reports] == [1, 2, 3]
    for name in ("coarse", "split", "merge"):
        seconds = [stage.busy_s for report in told.reports for stage in report.stages if stage.stage == name]
        assert stages[name].count == len(seconds) == 3
        assert stages[name].seconds == pytest.approx(sum(seconds))
    assert stages["queue"].count == 3
    assert stages["queue"].seconds == pytest.approx(sum(sum(report.queue_s) for report in told.reports))


def test_the_queue_is_counted_by_request_and_a_request_learns_of_its_batch(index, monkeypatch):
    """Requests that queued behind a held batch come as one; each is told, and only about that one."""
    entered, resume = threading.Event(), threading.Event()
    quantize = index.quantize

    def held(queries, nprobe, *pool):
        entered.set()
        assert resume.wait(WAIT_S)
        return quantize(queries, nprobe, *pool)

    told = [Listener() for _ in range(4)]
    with Router(index) as router:
        monkeypatch.setattr(index, "quantize", held)
        futures = [router.submit(clustered(1), on_batch=told[0])]
        assert entered.wait(WAIT_S)
        futures += [router.submit(clustered(2, seed=i), 5 + i, 4, on_batch=told[i]) for i in (1, 2, 3)]
        resume.set()
        for future in futures:
            future.result(WAIT_S)
        reports = [listener.wait() for listener in told]
        monkeypatch.undo()
    assert all(len(listener.reports) == 1 for listener in told)
    assert reports[0].n_requests == 1
    assert reports[1] is reports[2] is reports[3]
    assert (reports[1].n_requests, reports[1].n_queries, reports[1].k, len(reports[1].queue_s)) == (3, 6, 8, 3)
    assert reports[1].queue_s[0] > reports[1].queue_s[1] > reports[1].queue_s[2]
    stages = router.stats().stages
    assert (stages["queue"].count, stages["coarse"].count) == (4, 2)


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_listener_that_raises_stops_nobody(index, error):
    told = Listener()

    def fail(_report) -> None:
        raise error("listener")

    with Router(index) as router:
        router.on_batch += [fail, told]
        for _ in range(3):  # more than there are slots
            check(index, clustered(2), 5, 4, router.submit(clustered(2), 5, 4, on_batch=fail).result(WAIT_S))
            told.wait()
        check(index, clustered(2), 5, 4, router.search(clustered(2), 5, 4))
        told.wait()
        assert router.stats().listener_errors == 7


def test_a_device_part_that_falls_back_is_host_time(index, monkeypatch):
    told = Listener()
    with two_devices(index) as router:
        router.on_batch.append(told)

        def broken(_residency):
            raise RuntimeError("gone")

        monkeypatch.setattr(router.devices[1], "scanner", broken)
        check(index, clustered(20), 5, index.nlist, router.search(clustered(20), 5, index.nlist))
        stages = [stage.stage for stage in told.wait().stages]
    assert stages.count("host_scan") == 2
    assert stages.count("device_scan_0") == 1
    assert "device_scan_1" not in stages


def test_a_batch_that_fails_before_its_scan_reports_nothing(index, monkeypatch):
    told = Listener()

    def broken(*_args):
        raise RuntimeError("no quantizer")

    with Router(index) as router:
        router.on_batch.append(told)
        monkeypatch.setattr(index, "quantize", broken)
        with pytest.raises(RuntimeError, match="no quantizer"):
            router.submit(clustered(1)).result(WAIT_S)
        monkeypatch.undo()
        router.search(clustered(1))
        told.wait()
    assert [report.number for report in told.reports] == [1]
