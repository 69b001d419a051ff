"""profile and plan of an index with codes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import hybridindex as hx
from hybridindex.cli.console import ExitCode
from hybridindex.plans.benches import latest_benches
from hybridindex.plans.precision import views_of
from tests.clustered import clustered, small_index
from tests.partitioner.synthetic import profile_of, with_candidates, with_row_faults


@pytest.fixture
def idx(tmp_path):
    small_index(tmp_path / "idx").close()
    with hx.open(tmp_path / "idx") as index:
        index.compress(bits=1)
    with hx.open(tmp_path / "idx") as index, index.store() as store:
        for view in views_of(index.ivf):
            store.save_profile(profile_of(view))
    return tmp_path / "idx"


ASKED = ("--slo-ms", 100, "--budget", "4MiB", "--rate", 50, "--coverage", 0.5)


def test_plan_shows_rows_and_codes_side_by_side(cli, idx):
    made = cli("plan", idx, *ASKED, "--json").json
    assert (made["precision"], made["bits"]) == ("codes", 1)
    beside = made["other_precision"]
    assert (beside["precision"], beside["profile_id"]) == ("rows", 1)
    assert made["coverage"] == beside["coverage"]
    assert made["device_bytes"] < beside["device_bytes"]
    shown = cli("plan", idx, *ASKED).out
    assert "codes, 1 bit (this plan)" in shown
    assert "codes, 1 bit: " in shown  # explained
    rows = cli("plan", idx, *ASKED, "--precision", "rows", "--json").json
    assert (rows["precision"], rows["profile_id"], rows["other_precision"]["precision"]) == ("rows", 1, "codes")
    # One profile was named: nothing is compared.
    named = cli("plan", idx, *ASKED, "--profile", 1, "--json").json
    assert (named["precision"], "other_precision" in named) == ("rows", False)
    refused = cli("plan", idx, *ASKED, "--profile", 1, "--precision", "codes")
    assert refused.code != 0
    assert "codes" in refused.err
    for machine in ((), ("--hardware", "h100x8")):
        asked = ("plan", idx, "--slo-ms", 100, "--budget", "4MiB", "--rate", 50, *machine, "--profile")
        refused = cli(*asked, 1, "--precision", "codes")
        assert (refused.code, "was measured with rows" in refused.err) == (ExitCode.NO_PROFILE, True)
        refused = cli(*asked, 2, "--precision", "nonsense")
        assert (refused.code, "precision is 'nonsense'" in refused.err) == (ExitCode.BAD_INPUT, True)


def test_commands_take_the_plan_that_is_named_or_was_applied_last(cli, idx, tmp_path):
    codes = cli("plan", idx, *ASKED, "--json").json["plan_id"]
    rows = cli("plan", idx, *ASKED, "--precision", "rows", "--json").json["plan_id"]
    assert cli("explain", idx, codes, "--json").json["precision"] == "codes"
    assert cli("explain", idx, "latest", "--json").json["precision"] == "rows"
    assert cli("apply", idx, "--plan", codes, "--force", "--json").json["plan_id"] == codes
    assert cli("explain", idx, "current", "--json").json["precision"] == "codes"
    np.save(tmp_path / "q.npy", clustered(10, seed=4))
    found = cli("search", idx, "-q", tmp_path / "q.npy", "--plan", "current", "--device", "cpu", "--json")
    assert found.code == 0, found.err
    assert cli("repartition", idx, "--coverage", 0.25, "--apply", "--force", "--json").json["plan_id"] == rows + 1
    history = cli("history", idx, "--json").json
    assert history["current"] == rows + 1
    assert [plan["id"] for plan in history["plans"]] == [codes, rows, rows + 1]
    assert cli("explain", idx, "current", "--json").json["precision"] == "codes"
    assert cli("history", idx).out.count("of codes") == 3
    assert "of removed codes" not in cli("history", idx).out
    report = cli("report", idx, "-o", tmp_path / "report", "--plan", codes, "--json")
    assert report.code == 0, report.err


def test_a_plan_chooses_rows_beside_codes_where_they_are_needed(cli, idx, tmp_path):
    with hx.open(idx) as index, index.store() as store:
        view = index.ivf.by_codes()
        store.save_profile(with_candidates(profile_of(view), index.ivf.code_size))
    asked = ("--budget", "4MiB", "--rate", 50)
    # What codes alone can do at most; a little less takes rows.
    nearest = cli("plan", idx, *asked, "--slo-ms", 0.001, "--coverage", 1.0, "--json").json["nearest_slo_ms"]
    asked = (*asked, "--slo-ms", 0.97 * nearest)
    made = cli("plan", idx, *asked, "--json").json
    assert (made["verdict"], made["precision"]) == ("feasible", "codes")
    assert made["n_resident_rows"] > 0
    assert made["bytes_by_precision"]["rows"] > 0
    shown = cli("plan", idx, *asked).out
    assert "of rows" in shown
    assert "of the candidates" in shown
    assert cli("apply", idx, "--plan", made["plan_id"], "--json").json["plan_id"] == made["plan_id"]
    dry = cli("repartition", idx, "--coverage", 0.25, "--json").json
    assert (dry["resident"]["rows"], dry["planned"]["rows"]) == (0, 0)
    queries = clustered(10, seed=4)
    np.save(tmp_path / "q.npy", queries)
    found = cli("search", idx, "-q", tmp_path / "q.npy", "--plan", "current", "--device", "cpu", "--json")
    assert found.code == 0, found.err
    with hx.open(idx) as index, index.router(plan=index.current_plan(), devices=["cpu"]) as router:
        router.search(queries, 5)
        assert router.row_residency.n_resident == made["n_resident_rows"]
    report = cli("report", idx, "-o", tmp_path / "report", "--plan", made["plan_id"], "--json")
    assert report.code == 0, report.err


def test_profile_measures_what_it_is_told_to(cli, idx, tmp_path):
    np.save(tmp_path / "q.npy", clustered(128, seed=4))
    asked = ("profile", "index", idx, "-q", tmp_path / "q.npy", "--no-device", "--max-seconds", 1, "--json")
    made = cli(*asked)
    assert made.code == 0, made.err
    assert (made.json["codec"], made.json["scanner"]) == ("rabitq1", "rabitq")
    assert (cli(*asked, "--precision", "rows").json["codec"]) == "flat"
    bad = cli(*asked, "--precision", "bits")
    assert bad.code != 0
    assert "precision is 'bits'" in bad.err


def test_rows_on_disk_are_searched_profiled_and_planned(cli, idx, tmp_path, caplog):
    np.save(tmp_path / "q.npy", clustered(128, seed=4))
    asked = ("search", idx, "-q", tmp_path / "q.npy", "--json")
    here, mapped = cli(*asked).json, cli(*asked, "--rows", "mapped").json
    assert (here["ids"], here["distances"]) == (mapped["ids"], mapped["distances"])
    refused = cli(*asked, "--rows", "mapped", "--precision", "rows")
    assert (refused.code, "rows is 'mapped' with precision 'rows'" in refused.err) == (ExitCode.BAD_INPUT, True)
    plan = ("plan", idx, "--slo-ms", 1000, "--budget", "4MiB", "--rate", 5)
    refused = cli(*plan, "--row-cache", "1MiB")
    assert (refused.code, "profile again with rows 'mapped'" in refused.err) == (ExitCode.NO_PROFILE, True)
    refused = cli(*plan, "--row-cache", "1MiB", "--hardware", "h100x8")
    assert (refused.code, "--row-cache is only for this machine" in refused.err) == (ExitCode.BAD_INPUT, True)
    with hx.open(idx) as index, index.store() as store:
        view = index.ivf.by_codes()
        store.save_profile(with_row_faults(with_candidates(profile_of(view), index.ivf.code_size)))
    made = cli(*plan, "--row-cache", 0, "--json").json
    assert made["row_cache_bytes"] == 0
    assert made["predicted_row_faults"] > 0
    assert "other_precision" not in made  # rows that are scanned are in memory
    assert cli("apply", idx, "--plan", made["plan_id"]).code == 0
    less = cli("repartition", idx, "--slo-ms", 900, "--apply", "--json")
    assert less.code == 0, less.err
    with hx.open(idx) as index:
        assert index.current_plan().request.row_cache_bytes == 0
    for given, kept in (("all", None), ("2MiB", 2 << 20)):
        assert cli("repartition", idx, "--slo-ms", 900, "--row-cache", given, "--apply", "--json").code == 0
        with hx.open(idx) as index:
            assert index.current_plan().request.row_cache_bytes == kept
    assert cli(*plan, "--row-cache", "all", "--json").json["row_cache_bytes"] is None
    with hx.open(idx) as index:
        plan = index.current_plan()
        for rows, said in (("resident", True), ("mapped", False)):
            caplog.clear()
            index.router(plan, ["cpu"], rows=rows).close()
            assert ("the plan is for rows on disk, but rows is 'resident'" in caplog.text) == said
    profiled = cli(
        "profile", idx, "-q", tmp_path / "q.npy", "--no-device", "--max-seconds", 1, "--rows", "mapped", "--json"
    )
    assert profiled.code == 0, profiled.err
    assert "file_system" in profiled.json["notes"]["row_faults"]


def test_search_and_bench_scan_what_they_are_told(cli, idx, tmp_path):
    np.save(tmp_path / "q.npy", clustered(10, seed=4))
    asked = ("-q", tmp_path / "q.npy")
    found = cli("search", idx, *asked, "--json").json
    assert found["precision"].startswith("codes: rabitq 1 bit, ")
    rows = cli("search", idx, *asked, "--precision", "rows", "--json").json
    assert rows["precision"] == "rows"
    # As many candidates as there are rows leave nothing out.
    every = cli("search", idx, *asked, "--candidates", 65536, "--json").json
    assert (every["ids"], every["distances"]) == (rows["ids"], rows["distances"])
    few = cli("search", idx, *asked, "--precision", "codes", "--candidates", 12)
    assert "12 candidates" in few.out
    for words, said in (
        (("--candidates", 9), "candidates is 9 and k is 10"),
        (("--precision", "half"), "precision is 'half'"),
        (("--precision", "rows", "--candidates", 50), "--candidates is 50, but searches scan rows"),
    ):
        refused = cli("search", idx, *asked, *words)
        assert (refused.code, said in refused.err) == (ExitCode.BAD_INPUT, True)
    load = ("bench", idx, *asked, "--rate", 100, "--duration", 0.1, "--json")
    for precision in ("rows", "codes"):
        ran = cli(*load, "--precision", precision).json
        assert ran["precision"].startswith(precision)
        with hx.open(idx) as index, index.store() as store:
            [view] = views_of(index.ivf, precision)[-1:]
            [kept] = latest_benches(store, view.fingerprint, -1)
        assert kept.payload["plan_id"] is None
        assert kept.payload["load"] == ran["load"]


def test_bench_without_a_query_opens_nothing(cli, idx, tmp_path, monkeypatch):
    np.save(tmp_path / "q.npy", clustered(10, seed=4)[:0])
    monkeypatch.setattr(hx, "open", None)
    refused = cli("bench", idx, "-q", tmp_path / "q.npy", "--rate", 100)
    assert (refused.code, "--queries holds 0 rows" in refused.err) == (ExitCode.BAD_INPUT, True)


def test_a_profile_of_the_other_precision_that_gives_no_plan_stops_none(cli, idx):
    with hx.open(idx) as index, index.store() as store:
        made = profile_of(index.ivf)
        store.save_profile(dataclasses.replace(made, stages=tuple(s for s in made.stages if s.stage != "host_scan")))
    made = cli("plan", idx, *ASKED, "--json")
    assert (made.code, made.json["precision"], "other_precision" in made.json) == (0, "codes", False)
    assert "not compared with a plan of rows: " in made.err
    assert [plan["id"] for plan in cli("history", idx, "--json").json["plans"]] == [made.json["plan_id"]]
    refused = cli("plan", idx, *ASKED, "--precision", "rows")
    assert refused.code == ExitCode.NO_PROFILE
    assert len(cli("history", idx, "--json").json["plans"]) == 1


def test_plans_of_the_other_precision_are_not_compared_offline(cli, idx):
    codes = cli("plan", idx, *ASKED, "--json").json["plan_id"]
    rows = cli("plan", idx, *ASKED, "--precision", "rows", "--json").json["plan_id"]
    assert cli("apply", idx, "--plan", codes, "--force").code == 0
    changed = cli("apply", idx, "--plan", rows, "--force", "--json")
    assert (changed.json["plan_id"], changed.json["current"], changed.json["hit_rate_before"]) == (rows, None, 0)
    assert "it is not compared" in changed.err
    again = cli("apply", idx, "--plan", rows, "--force", "--json")
    assert again.json["current"]["precision"] == "rows"
    assert again.json["gain"] == {**again.json["gain"], "latency_ms": 0, "hit_rate": 0}


def test_the_precision_chooses_the_plan(cli, idx, tmp_path):
    np.save(tmp_path / "q.npy", clustered(10, seed=4))
    codes = cli("plan", idx, *ASKED, "--json").json["plan_id"]
    cli("plan", idx, *ASKED, "--precision", "rows", "--json")
    asked = ("-q", tmp_path / "q.npy", "--device", "cpu", "--json")
    assert cli("search", idx, *asked).json["precision"].startswith("rows")  # what was planned last
    assert cli("search", idx, *asked, "--precision", "codes").json["precision"].startswith("codes")
    assert cli("bench", idx, *asked, "--precision", "codes", "--rate", 100, "--duration", 0.1).code == 0
    refused = cli("search", idx, *asked, "--plan", codes, "--precision", "rows")
    assert (refused.code, refused.json["error"]["type"]) == (ExitCode.NO_PROFILE, "ProfileMismatchError")
