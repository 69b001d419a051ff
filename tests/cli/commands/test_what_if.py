"""plan --hardware: answers from a stored profile, stores nothing, and says what is wrong with a question."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from hybridindex.cli.commands import what_if
from hybridindex.cli.console import ExitCode, readable_bytes
from hybridindex.plans.current import current_plan_id
from tests.clustered import clustered
from tests.partitioner.synthetic import make_profile

ASKED = ("--hardware", "h100x8", "--llm", "llama3-8b", "--rate", 40, "--slo-ms", 400)


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """A small index that says of itself that it was profiled elsewhere, with long lists."""
    import hybridindex as hx

    path = tmp_path_factory.mktemp("what-if") / "idx"
    profile = make_profile(n=200, noise=0.05, device_per_byte_s=2e-11, mean_size=100_000)
    with hx.build(np.asarray(clustered(300, seed=1)), path, nlist=8, metric="l2") as built, built.store() as store:
        store.save_profile(replace(profile, index_fingerprint=built.fingerprint))
    return path


@pytest.fixture
def cli(cli):
    return partial(cli, "plan")


def test_a_what_if_answers_and_stores_nothing(cli, index):
    import hybridindex as hx

    told = cli(index, *ASKED, "--json")
    assert told.code == 0
    assert told.json["chosen"] in ("split", "dedicated-gpu", "all-gpu")
    assert [design["name"] for design in told.json["designs"]] == ["split", "dedicated-gpu", "all-gpu"]
    assert set(told.json["sensitivity"]) == {"rate", "slo", "hbm_bandwidth", "kv_memory", "skew", "host_latency"}
    assert any("llama3-8b in 16 bits" in sentence for sentence in told.json["assumptions"])
    with hx.open(index) as opened, opened.store() as store:
        assert store.list_plans(index_fingerprint=opened.fingerprint) == []
        assert current_plan_id(store, opened.fingerprint) is None


def test_people_get_tables_and_reasons(cli, index):
    told = cli(index, *ASKED)
    for words in ("40 requests/s, ttft p90 within 400 ms", "hot lists beside the LLM", "sustains", "host_latency"):
        assert words in told.out


def test_a_row_says_which_lists_allow_which_rate(cli, index):
    words = (index, "--hardware", "h100x8", "--rate", 40, "--slo-ms", 400)
    split = next(d for d in cli(*words, "--json").json["designs"] if d["name"] == "split")
    told = cli(*words).out
    assert "TTFT" not in told
    row = next(line for line in told.splitlines() if "split" in line and "yes" in line)
    cells = [cell.strip() for cell in row.strip("│ ").split("│")]
    at_rate, most = split["at_rate"], split["at_best"]
    assert float(cells[5]) == pytest.approx(at_rate["compliant_qps"], rel=1e-3)
    assert float(cells[6]) == pytest.approx(most["compliant_qps"], rel=1e-3)
    assert cells[2] == readable_bytes(at_rate["device_bytes"])
    assert cells[7] == readable_bytes(most["device_bytes"])


def test_an_infeasible_goal_ends_with_10_and_the_nearest_one_is_feasible(cli, index):
    told = cli(index, *ASKED[:4], "--rate", 5000, "--slo-ms", 400, "--json")
    assert told.code == ExitCode.INFEASIBLE
    assert told.json["nearest"]["binds"] == "llm"
    again = cli(index, *ASKED[:4], "--rate", told.json["nearest"]["rate_qps"], "--slo-ms", 400, "--json")
    assert again.code == 0


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--hardware", "v100x8", "--rate", 4, "--slo-ms", 9), "h200"),
        (("--hardware", "h100x8", "--llm", "gpt-9", "--rate", 4, "--slo-ms", 9), "llama3-70b"),
        (("--hardware", "h100x8", "--llm", "none.json", "--rate", 4, "--slo-ms", 9), "none.json"),
        (("--hardware", "h100x8", "--slo-ms", 9), "--rate"),
        (("--hardware", "h100x8", "--rate", -4, "--slo-ms", 9), "rate_qps is -4"),
        (("--hardware", "h100x8", "--rate", 4, "--slo-ms", 0), "slo_ms is 0"),
        (("--hardware", "rtx4090", "--llm", "llama3-70b", "--rate", 4, "--slo-ms", 9), "holds no llama3-70b"),
        (("--hardware", "h100x8", "--n-devices", 4, "--rate", 4, "--slo-ms", 9), "--n-devices"),
        (("--hardware", "h100x8", "--efficiency", 2, "--rate", 4, "--slo-ms", 9), "efficiency"),
        (("--slo-ms", 9), "--budget is missing"),
        (("--slo-ms", 9, "--budget", "1GiB", "--index-scale", 4), "they require --hardware"),
    ],
)
def test_wrong_questions_name_the_field(cli, index, words, named):
    told = cli(index, *words)
    assert told.code == ExitCode.BAD_INPUT
    assert named in told.err


CLUSTER = ("--hardware", "h100x2", "--budget", "4GiB", "--rate", 40, "--slo-ms", 400, "--node-memory", "64GiB")


def test_clusters_of_other_machines_are_simulated(cli, index, monkeypatch):
    monkeypatch.setattr(what_if, "_REQUESTS", 300)
    told = cli(index, *CLUSTER, "--nodes", "1,2", "--json")
    assert told.code == 0, told.err
    assert told.json["hardware"] == "h100x2"
    assert [each["nodes"] for each in told.json["nodes"]] == [1, 2]
    assert told.json["nodes"][0]["fan_out"] == 0.0
    assert any("2 devices" in sentence for sentence in told.json["assumptions"])
    assert told.json["explanation"]
    people = cli(index, *CLUSTER, "--nodes", "2")
    assert "assumed: every node is like the profiled machine" in people.out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--nodes", "2", "--slo-ms", 40, "--rate", 40), "they require --hardware"),
        ((*CLUSTER, "--nodes", "2;3"), "expected numbers of nodes such as 1,4,16"),
        ((*CLUSTER, "--nodes", "65"), "nodes is 65; give numbers from 1 to 64"),
        ((*CLUSTER, "--nodes", "2", "--slo-stage", "ttft"), "expected search"),
        ((*CLUSTER, "--nodes", "2", "--headroom", 0.3), "omit --headroom"),
        ((*CLUSTER, "--nodes", "2", "--epsilon", 0.5), "omit --epsilon"),
        ((*CLUSTER, "--nodes", "2", "--hit-rate-model", "beta"), "omit --hit-rate-model"),
    ],
)
def test_wrong_questions_about_clusters_are_named(cli, index, options, words):
    told = cli(index, *options)
    assert told.code == ExitCode.BAD_INPUT
    assert words in told.err
