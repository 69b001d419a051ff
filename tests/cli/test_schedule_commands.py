"""schedule and hardware as commands."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest

import hybridindex as hx
from hybridindex.cli.console import ExitCode
from tests.clustered import clustered
from tests.partitioner.synthetic import make_profile

PAPER = ("--chip", "xpu-c", "--chips", 128, "--servers", 32)


def test_the_frontier_of_a_case_is_printed(cli):
    shown = cli("schedule", "case2", *PAPER)
    assert shown.code == ExitCode.OK
    assert "32 servers retrieve, at most 128 xpu-c" in shown.out
    assert "encode+retrieval+prefix | decode" in shown.out
    assert "limited by decode" in shown.out


def test_json_has_every_point_with_its_stages(cli):
    answer = cli("schedule", "case2", *PAPER, "--baseline", "--json").json
    values = [point["qps_per_chip"] for point in answer["frontier"]]
    assert values == sorted(values)
    assert answer["feasible"]
    assert answer["chosen"] == len(values)
    last = answer["frontier"][-1]
    assert [stage["stage"] for stage in last["stages"]] == ["encode", "retrieval", "prefix", "decode"]
    assert last["qps_per_chip"] / answer["baseline"]["qps_per_chip"] == pytest.approx(1.7, rel=0.06)
    # The busiest chips are busy all the time, and none more.
    by_chips = {}
    for stage in last["stages"]:
        by_chips[stage["subsystem"]] = by_chips.get(stage["subsystem"], 0.0) + stage["busy"]
    assert max(by_chips.values()) == pytest.approx(1.0)


def test_a_schema_file_and_a_chosen_point(cli, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("generative_llm: llama3-8b\ndatabase_vectors: 1000000000\n")
    shown = cli("schedule", file, "--chips", 8, "--explain", 1, "--json")
    assert shown.code == ExitCode.OK
    assert shown.json["chosen"] == 1
    assert shown.json["next"].startswith("point 2 gives ")
    last = len(shown.json["frontier"])
    assert cli("schedule", file, "--chips", 8, "--explain", last, "--json").json["next"].startswith("no schedule")


def test_iterative_retrieval_keeps_its_prefix_busy(cli):
    answer = cli("schedule", "case3", "--chip", "h200", "--chips", 16, "--json").json
    for point in answer["frontier"]:
        assert all(0.0 < stage["busy"] <= 1.0 + 1e-9 for stage in point["stages"])


def test_a_goal_chooses_the_most_throughput_that_meets_it(cli):
    answer = cli("schedule", "case2", *PAPER, "--max-ttft-ms", 50, "--json").json
    chosen = answer["frontier"][answer["chosen"] - 1]
    assert chosen["ttft_ms"] <= 50
    assert all(p["ttft_ms"] > 50 for p in answer["frontier"][answer["chosen"] :])


def test_an_infeasible_goal_says_the_nearest(cli):
    shown = cli("schedule", "case2", *PAPER, "--max-ttft-ms", 1, "--json")
    assert shown.code == ExitCode.INFEASIBLE
    assert not shown.json["feasible"]
    assert shown.json["chosen"] == 1
    nearest = shown.json["frontier"][0]["ttft_ms"]
    assert shown.json["misses"] == [f"no schedule gives the first token in 1 ms; the nearest takes {nearest:.3g} ms"]


def test_an_infeasible_time_per_token_says_the_nearest(cli):
    shown = cli("schedule", "case1", "--chips", 8, "--max-tpot-ms", 0.001, "--json")
    assert shown.code == ExitCode.INFEASIBLE
    (miss,) = shown.json["misses"]
    assert miss.startswith("no schedule decodes a token in 0.001 ms; the nearest takes ")
    nearest = float(miss.split()[-2])
    assert cli("schedule", "case1", "--chips", 8, "--max-tpot-ms", nearest * 1.01, "--json").code == ExitCode.OK
    assert cli("schedule", "case1", "--chips", 8, "--max-tpot-ms", nearest * 0.99, "--json").code == ExitCode.INFEASIBLE


def test_servers_may_be_charged(cli):
    plain = cli("schedule", "case1", "--chips", 8, "--json").json["frontier"][-1]
    charged = cli("schedule", "case1", "--chips", 8, "--charge-servers", 2, "--json").json["frontier"][-1]
    whole = cli("schedule", "case1", "--chips", 8, "--whole-servers", "--json").json["frontier"][-1]
    assert plain["cost_chips"] == plain["chips"]
    assert charged["cost_chips"] == charged["chips"] + 2 * 16
    assert whole["cost_chips"] == 64


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("case9",), "SCHEMA is 'case9'; expected a .yaml file or one of case1"),
        (("none.yaml",), "none.yaml cannot be read"),
        (("case1", "--chip", "abacus"), "chip is 'abacus'; expected one of a100"),
        (("case1", "--server", "abacus"), "server is 'abacus'; expected one of epyc-milan"),
        (("case1", "--chips", 1), "chips is 1; expected 2 to"),
        (("case1", "--chips", -3), "chips is -3; expected 2 to"),
        (("case1", "--servers", 3), "servers is 3; the database"),
        (("case1", "--max-ttft-ms", -5), "--max-ttft-ms is -5.0; expected a number above 0"),
        (("case1", "--max-tpot-ms", "nan"), "--max-tpot-ms is nan; expected a number above 0"),
        (("case1", "--charge-servers", -1), "server_cost_chips is -1.0"),
        (("case1", "--chips", 8, "--explain", 99), "point is 99; expected 1 to"),
        (("case4", "--chip", "rtx4090", "--chips", 2), "chips is 2: no schedule fits that many rtx4090"),
    ],
)
def test_what_is_wrong_is_named(cli, words, says):
    shown = cli("schedule", *words)
    assert shown.code == ExitCode.BAD_INPUT
    assert says in shown.err.replace("\n", " ")
    assert shown.out == ""


def test_hardware_is_listed_with_its_sources(cli):
    listed = cli("hardware", "--json").json
    assert {"h100", "h200", "l40s", "a100", "rtx4090"} <= set(listed["chips"])
    assert "llama3-70b" in cli("hardware").out
    one = cli("hardware", "h100", "--json").json
    assert one["kind"] == "chips"
    assert one["flops_per_s"] == 989e12
    assert "NVIDIA" in one["sources"]["flops_per_s"]
    assert "data sheet" in cli("hardware", "h100").out
    refused = cli("hardware", "abacus")
    assert refused.code == ExitCode.BAD_INPUT
    assert "NAME is 'abacus'; expected one of a100" in refused.err


def test_retrieval_can_be_what_a_profile_measured(cli, planned_index, tmp_path):
    modelled, measured = (
        cli("schedule", "case1", "--chips", 8, *words, "--json").json["frontier"]
        for words in ((), ("--profile", planned_index))
    )
    assert measured != modelled
    empty = tmp_path / "bare"
    hx.build(clustered(300, seed=1), empty, nlist=8, metric="l2").close()
    assert cli("schedule", "case1", "--profile", empty, "--json").code == ExitCode.NO_PROFILE


def test_whose_measurement_retrieval_is_is_said(cli, planned_index):
    words = ("schedule", "case1", "--chips", 8, "--profile", planned_index)
    said = cli(*words, "--json").json["retrieval"]
    with hx.open(planned_index, verify="quick") as index, index.store() as store:
        profile = store.load_profile(said["profile_id"])
    assert said["plan_id"] is not None
    assert said["cpu_model"] == profile.hardware.cpu_model
    assert said["this_machine"]
    assert f"retrieval as profile {profile.id} measured it on {profile.hardware.cpu_model}" in cli(*words).out
    assert cli("schedule", "case1", "--chips", 8, "--json").json["retrieval"] is None


def test_a_profile_of_another_machine_is_told(cli, tmp_path):
    path = tmp_path / "idx"
    profile = make_profile(noise=0.05)
    elsewhere = replace(profile.hardware, fingerprint="elsewhere", cpu_model="Abacus 9")
    with hx.build(clustered(300, seed=1), path, nlist=8, metric="l2") as built, built.store() as store:
        store.save_profile(replace(profile, index_fingerprint=built.fingerprint, hardware=elsewhere))
    told = cli("schedule", "case1", "--chips", 8, "--profile", path)
    assert "measured it on Abacus 9, not this machine" in told.out


def test_points_that_are_alike_are_one_row_and_none_is_left_out(cli):
    answer = cli("schedule", "case4", "--json").json
    points, chosen = len(answer["frontier"]), answer["chosen"]
    shown = cli("schedule", "case4").out.split("point ")[0]
    rows = re.findall(r"^│ (\d+)(?: to (\d+))?( \*)? +│", shown, flags=re.M)
    spans = [(int(first), int(last or first)) for first, last, _ in rows]
    assert spans[0][0] == 1
    assert spans[-1][1] == points
    assert all(one[1] + 1 == other[0] for one, other in itertools.pairwise(spans))
    assert len(spans) < points / 2
    assert [(int(first), last) for first, last, star in rows if star] == [(chosen, "")]
