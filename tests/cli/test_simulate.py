"""simulate: from a stored profile, with its exit statuses and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import hybridindex as hx
from hybridindex.cli.console import ExitCode
from hybridindex.index.compress import compress
from hybridindex.store.control import ControlStore
from tests.clustered import clustered
from tests.partitioner.synthetic import make_profile, with_candidates

FEW = ("--requests", 2000, "--budget", "64MiB", "--json")


def built_with_profiles(path, *profiles, seed=1):
    """An index whose control store holds these profiles as its own; its fingerprint."""
    with hx.build(np.asarray(clustered(300, seed=seed)), path, nlist=8, metric="l2") as built, built.store() as store:
        for profile in profiles:
            store.save_profile(replace(profile, index_fingerprint=built.fingerprint))
        return built.fingerprint


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """A small index that says of itself that it was profiled, and an LLM profile beside it."""
    folder = tmp_path_factory.mktemp("profiled") / "idx"
    built_with_profiles(folder, make_profile(noise=0.05, device_per_byte_s=2e-11))
    llm = {"kv_cache_bytes": 4 << 30, "throughput_rps": 200, "input_tokens": 512, "output_tokens": 64, "ttft_s": 0.02}
    (folder / "llm.json").write_text(json.dumps(llm))
    return folder


@pytest.fixture
def cli(cli):
    return partial(cli, "simulate")


def test_policies_are_compared_with_what_was_assumed(cli, index, tmp_path):
    picture = tmp_path / "ttft.png"
    told = cli(
        "--profile", index, "--rate", 50, "--slo-ms", 150, "--llm", index / "llm.json", "--devices", 2, *FEW,
        "--plot", picture,
    )  # fmt: skip
    assert told.code == 0
    by_name = {one["policy"]: one for one in told.json["policies"]}
    assert by_name["ours"]["outcome"]["attainment"] > 0.9
    assert by_name["ours"]["compliant_rate"]["rate"] > 50
    assert by_name["dedicated-gpu"]["outcome"]["kv_mean"] > by_name["cpu-only"]["outcome"]["kv_mean"]
    assert any("KV bytes per token" in sentence for sentence in told.json["assumptions"])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_an_llm_no_first_token_is_spoken_of(cli, index):
    words = ("--profile", index, "--rate", 50, "--slo-ms", 150, "--policy", "cpu-only", *FEW[:-1])
    alone = cli(*words).out
    assert "search p50 / p90 / p99 ms" in alone
    assert not {"TTFT", "TPOT", "KV use"} & {cell.split(" p50")[0].strip() for cell in alone.split("┃")}
    assert "TTFT p50" in cli(*words, "--llm", index / "llm.json").out


def test_an_infeasible_goal_names_the_nearest_feasible_rate(cli, index):
    words = ("--profile", index, "--rate", 5000, "--slo-ms", 2, "--policy", "cpu-only", "--requests", 5000)
    told = cli(*words, "--budget", "64MiB")
    assert told.code == ExitCode.INFEASIBLE
    assert "the nearest feasible rate is" in told.out
    data = cli(*words, "--budget", "64MiB", "--json").json
    nearest = data["policies"][0]["compliant_rate"]["rate"]
    assert 0 < nearest < 5000
    again = cli(*words[:3], nearest, *words[4:], *FEW[2:])
    assert again.code == 0


def test_a_faster_device_and_a_larger_index_change_the_answer(cli, index):
    def search_p50(*more: object) -> float:
        words = ("--profile", index, "--rate", 50, "--slo-ms", 50, "--policy", "all-gpu", "--no-find-rate", *FEW)
        told = cli(*words, *more, "--budget", "4GiB")
        return told.json["policies"][0]["outcome"]["search"]["p50"]

    slow, fast = search_p50("--device-bandwidth", "10GB"), search_p50("--device-bandwidth", "1000GB")
    large = search_p50("--device-bandwidth", "10GB", "--index-scale", 4)
    assert fast < slow < large


def test_a_named_device_is_what_its_hardware_profile_says(cli, index):
    words = ("--profile", index, "--rate", 200, "--slo-ms", 50, "--policy", "all-gpu", "--requests", 2000)

    def told(*more: object) -> dict:
        return cli(*words, "--no-find-rate", "--json", *more).json

    named = told("--devices", "h100x8", "--index-scale", 10)
    assert named["budget_bytes"] == 80_000_000_000
    assert any("0.5 of 3,350 GB/s" in sentence for sentence in named["assumptions"])
    shards = named["policies"][0]["outcome"]
    assert len(shards["device_use"]) == 8
    assert shards["hit_rate"] == 1
    stated = ("--device-bandwidth", "3350GB", "--budget", 80_000_000_000)
    assert told("--devices", 8, *stated, "--index-scale", 10)["policies"][0]["outcome"] == shards

    # A scan is an eighth of the bytes, or at another bandwidth.
    large = [
        told("--devices", devices, "--index-scale", 1000)["policies"][0]["outcome"]["search"]["p50"]
        for devices in ("h200x8", "h100x8", "h100x1")
    ]
    assert large == sorted(large)
    assert large[0] < large[1] < large[2]


def test_a_moved_hot_set_is_followed_or_not(cli, index):
    words = ("--profile", index, "--rate", 1000, "--slo-ms", 1, "--budget", "20MiB", "--requests", 12_000)
    told = cli(*words, "--drift", 3, "--json")
    assert told.code == 0
    followed, ignored = told.json["runs"]
    assert [followed["refreshed"], ignored["refreshed"]] == [True, False]
    assert followed["attainment"]["before"] == ignored["attainment"]["before"] > 0.9
    assert followed["attainment"]["at_end"] > ignored["attainment"]["at_end"] + 0.1
    assert any(step["what"].startswith("committed") for step in followed["history"])
    assert any("0.5 of all lists" in sentence for sentence in told.json["assumptions"])
    # Too little time is left to follow it.
    late = cli(*words, "--drift", 11)
    assert late.code == ExitCode.INFEASIBLE
    assert "infeasible: ours attains" in late.out


def test_clusters_are_compared_and_the_knee_is_explained(cli, index):
    words = (
        "--profile", index, "--rate", 500, "--slo-ms", 20, "--requests", 1000, "--nodes", "1,2,4",
        "--node-memory", "30MiB", "--network-us", 100, "--network-gbps", 25, "--message-us", 400,
        "--request-us", 0, "--client-us", 0,
    )  # fmt: skip
    told = cli(*words, "--json")
    assert told.code == 0
    one, two, four = told.json["nodes"]
    assert [each["nodes"] for each in (one, two, four)] == [1, 2, 4]
    assert "bytes of memory are missing" in one["refused"]
    assert "bytes of memory are missing" in two["refused"]
    assert four["outcome"]["attainment"] > 0.9
    assert four["compliant_rate"]["rate"] > 500
    assert 0 < four["fan_out"] < 3
    assert 0.2 < four["local_share"] < 1
    assert four["node_bytes"] <= 30 << 20
    assert four["costs"]["messages_s"] > 0
    assert "stops paying is not known" in told.json["explanation"]
    assert any("100 us from node to node, 25 Gbit/s" in sentence for sentence in told.json["assumptions"])
    assert cli(*words, "--json").json == told.json
    dear = cli(*words, "--request-us", 4000, "--client-us", 700, "--json").json
    assert dear["nodes"][2]["compliant_rate"]["rate"] < four["compliant_rate"]["rate"]
    assert any("4e+03 us per request" in sentence for sentence in dear["assumptions"])
    assert any("a client adds 700 us to each" in sentence for sentence in dear["assumptions"])
    shown = cli(*words, "--node-replicas", 1).out
    assert "nodes 1: " in shown
    assert "The next node still pays at 4 nodes" in shown
    assert "mostly by requests, messages and merging" in shown
    assert "short: at the highest rates of 2, 4 nodes" in shown


def test_nodes_have_devices_and_the_memory_of_the_profiled_machine(cli, index):
    words = ("--profile", index, "--rate", 500, "--slo-ms", 20, "--requests", 500, "--nodes", "2", "--no-find-rate")
    told = cli(*words, "--devices", "h100x8", "--json").json
    (two,) = told["nodes"]
    assert told["node_bytes"] == (1 << 34) * 4 // 5
    assert two["local_share"] == 1
    assert two["outcome"]["hit_rate"] > 0.99
    assert len(two["outcome"]["device_use"]) == 8
    assert two["compliant_rate"] is None
    assert told["explanation"] == ""


def test_a_rate_that_no_number_of_nodes_serves_is_infeasible(cli, index):
    words = ("--profile", index, "--rate", 50_000, "--slo-ms", 10, "--requests", 2000, "--nodes", "1,2")
    told = cli(*words)
    assert told.code == ExitCode.INFEASIBLE
    assert "infeasible: no number of nodes serves 50000 requests/s; the nearest feasible rate is" in told.out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--nodes", "1,x"), "--nodes is '1,x'"),
        (("--nodes", "65"), "nodes is 65"),
        (("--nodes", "0"), "nodes is 0"),
        (("--nodes", "2", "--policy", "ours"), "omit --policy"),
        (("--nodes", "2", "--llm", "latest"), "--llm"),
        (("--nodes", "2", "--drift", 1), "omit --drift"),
        (("--nodes", "2", "--plot", "x.png"), "omit --plot"),
        (("--nodes", "2", "--node-replicas", 0), "replicas is 0"),
        (("--nodes", "2", "--network-us", -1), "--network-us is -1"),
        (("--nodes", "2", "--network-gbps", 0), "--network-gbps is 0"),
        (("--nodes", "2", "--message-us", -1), "--message-us is -1"),
        (("--nodes", "2", "--request-us", -1), "--request-us is -1"),
        (("--nodes", "2", "--client-us", -1), "--client-us is -1"),
        (("--nodes", "2", "--devices", 9), "n_devices is 9"),
    ],
)
def test_what_is_wrong_with_a_cluster_is_named(cli, index, words, named):
    told = cli("--profile", index, "--rate", 10, "--slo-ms", 50, *FEW, *words)
    assert told.code in (ExitCode.BAD_INPUT, ExitCode.NO_PROFILE)
    assert named in told.json["error"]["message"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--rate", -1), "--rate is -1"),
        (("--slo-ms", 0), "--slo-ms is 0"),
        (("--policy", "best"), "--policy is 'best'"),
        (("--devices", "b9000x2"), "b9000"),
        (("--devices", "h100x0"), "--devices is 'h100x0'"),
        (("--devices", "65"), "--devices is '65'"),
        (("--requests", 0), "requests is 0"),
        (("--arrivals", "/none/there"), "trace /none/there"),
        (("--window-ms", 10), "--transfer-bandwidth"),
        (("--device-bandwidth", "0"), "--device-bandwidth is 0"),
        (("--max-batch", 0), "max_batch is 0"),
        (("--device-efficiency", 2), "device_efficiency"),
        (("--profile", "/none"), "--profile is /none"),
        (("--profile", 3), "--profile is the id 3"),
        (("--llm", "/none"), "--llm"),
        (("--overlap", 2), "overlap is 2"),
        (("--attainment", 2), "attainment is 2"),
        (("--drift", 1), "--drift simulates only ours"),
    ],
)
def test_what_is_wrong_is_named(cli, index, words, named):
    told = cli("--profile", index, "--rate", 10, "--slo-ms", 50, "--policy", "cpu-only", *FEW, *words)
    assert told.code in (ExitCode.BAD_INPUT, ExitCode.NO_PROFILE)
    assert named in told.json["error"]["message"]


QUICK = ("--rate", 50, "--slo-ms", 150, "--policy", "cpu-only", "--no-find-rate", *FEW)


def test_the_profile_of_another_index_in_the_same_store_is_not_taken(cli, tmp_path):
    shared = f"sqlite:///{tmp_path / 'shared.sqlite'}"
    profile = make_profile(noise=0.05)
    for name, seed in (("one", 1), ("two", 2), ("three", 3)):
        fingerprint = built_with_profiles(tmp_path / name, seed=seed)
        if name != "three":
            with ControlStore.open(shared) as store:
                store.save_profile(replace(profile, index_fingerprint=fingerprint))
    for name, profile_id in (("one", 1), ("two", 2)):
        told = cli("--profile", tmp_path / name, "--store", shared, *QUICK)
        assert told.code == 0, told.err
        assert told.json["profile_id"] == profile_id
    missing = cli("--profile", tmp_path / "three", "--store", shared, *QUICK)
    assert missing.code == ExitCode.NO_PROFILE
    assert "no profile of its rows" in missing.json["error"]["message"]
    # An id names its profile, of whatever index.
    assert cli("--profile", 1, "--store", shared, *QUICK).json["profile_id"] == 1


def test_a_profile_of_codes_is_taken_where_a_plan_would_take_it(cli, tmp_path):
    path = tmp_path / "idx"
    built_with_profiles(path, make_profile(noise=0.05))
    with hx.open(path) as opened:
        compress(opened.ivf, bits=1, queries=None)
    with hx.open(path) as opened, opened.store() as store:
        rows = store.load_profile(1)
        store.save_profile(replace(rows, id=None, index_fingerprint=opened.ivf.rows.by_codes().fingerprint))
        store.save_profile(replace(rows, id=None))
    assert cli("--profile", path, *QUICK).json["profile_id"] == 2
    words = (*QUICK[:4], "--no-find-rate", "--requests", 500, "--nodes", "1", "--json")
    assert cli("--profile", path, *words).json["profile_id"] == 2


@pytest.fixture(scope="module")
def coded(tmp_path_factory):
    """A small index with codes and a profile of them: 640,000 rows of 2 KiB, in codes of 64 bytes."""
    path = tmp_path_factory.mktemp("coded") / "idx"
    built_with_profiles(path)
    with hx.open(path) as opened:
        compress(opened.ivf, bits=1, queries=None)
    made = make_profile(noise=0.05, device_per_byte_s=2e-11, code_size=64, mean_size=2400)
    made = with_candidates(replace(made, codec="rabitq1"), 2048)
    with hx.open(path) as opened, opened.store() as store:
        store.save_profile(replace(made, index_fingerprint=opened.ivf.rows.by_codes().fingerprint))
    return path, made


def test_nodes_that_scan_codes_hold_all_of_them_beside_their_rows(cli, coded):
    path, made = coded
    words = ("--profile", path, "--rate", 500, "--slo-ms", 20, "--requests", 1000, "--nodes", "1,4", "--no-find-rate")
    told = cli(*words, "--json").json
    assert told["code_bytes"] == made.nbytes
    assert told["node_bytes"] == (1 << 34) * 4 // 5 - made.nbytes
    (said,) = (each for each in told["assumptions"] if "every node is like" in each)
    assert "of rows beside 39.1 MiB, the codes of all lists, which it scans, and none of them on devices" in said
    # Two replicas of 1.2 GiB of rows on four nodes.
    one, four = cli(*words, "--node-memory", "800MiB", "--json").json["nodes"]
    assert "bytes of memory are missing" in one["refused"]
    assert 500 << 20 < four["node_bytes"] <= 800 << 20
    assert four["fan_out"] > 0.2
    assert 0.2 < four["local_share"] < 1
    assert 0 < four["costs"]["compare_s"] < four["costs"]["node_s"]


def test_codes_that_leave_no_memory_for_rows_are_named(cli, coded, tmp_path):
    _, made = coded
    large = replace(made, hardware=replace(made.hardware, memory_bytes=48 << 20), index_fingerprint="large")
    with ControlStore.open(f"sqlite:///{tmp_path / 'store.sqlite'}") as store:
        number = store.save_profile(large).id
    words = ("--profile", number, "--store", f"sqlite:///{tmp_path / 'store.sqlite'}", *QUICK[:4], "--nodes", "2")
    told = cli(*words, "--requests", 500, "--no-find-rate", "--json")
    assert told.code == ExitCode.BAD_INPUT
    assert "the codes of all lists take 39.1 MiB, and 80% of the profiled memory is 38.4 MiB" in told.err
    assert cli(*words, "--requests", 500, "--no-find-rate", "--node-memory", "2GiB", "--json").code == 0


def test_what_lookahead_may_use_is_said_and_a_window_without_an_arena_is_refused(cli, index):
    words = ("--profile", index, *QUICK, "--window-ms", 20, "--transfer-bandwidth", "10GB")
    refused = cli(*words)
    assert refused.code == ExitCode.BAD_INPUT
    assert "--arena is 0" in refused.json["error"]["message"]
    told = cli(*words, "--arena", "8MiB", "--overlap", 0.7)
    assert any("20 ms" in s and "0.7" in s and "8.0 MiB" in s for s in told.json["assumptions"]), told.json


@pytest.mark.parametrize("more", [("--no-find-rate",), ("--drift", 1), ("--nodes", "2", "--no-find-rate")])
def test_an_attainment_in_per_cent_is_refused_always(cli, index, more):
    told = cli("--profile", index, "--rate", 50, "--slo-ms", 150, *FEW, "--attainment", 90, *more)
    assert told.code == ExitCode.BAD_INPUT
    assert "--attainment is 90" in told.json["error"]["message"]


@pytest.mark.parametrize("more", [("--policy", "cpu-only"), ("--nodes", "1")])
def test_as_many_requests_are_told_as_a_trace_has(cli, index, tmp_path, more):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("0\n1\n2\n4\n")
    words = ("--profile", index, "--rate", 50, "--slo-ms", 150, "--no-find-rate", *FEW, "--arrivals", trace)
    told = cli(*words, *more)
    assert any(f"4 requests, {trace} arrivals" in sentence for sentence in told.json["assumptions"])


def test_the_same_number_of_nodes_twice_is_one(cli, index):
    words = ("--profile", index, "--rate", 50, "--slo-ms", 150, "--requests", 300, "--nodes", "2,1,2", "--json")
    told = cli(*words)
    assert [each["nodes"] for each in told.json["nodes"]] == [2, 1]


def test_what_is_said_of_nodes_is_true_of_them(cli, tmp_path):
    built_with_profiles(tmp_path / "idx", make_profile(noise=0.05))
    words = (
        "--profile",
        tmp_path / "idx",
        "--rate",
        50,
        "--slo-ms",
        150,
        "--requests",
        300,
        "--no-find-rate",
        "--json",
    )

    def said(*more: object) -> str:
        return next(s for s in cli(*words, *more).json["assumptions"] if "every node is like" in s)

    without = said("--nodes", "1", "--devices", 2, "--budget", "64MiB")
    assert "none of them on devices: the profile has no scans of a device" in without
    assert "every node holds all lists" in without
    assert "on 2 nodes" not in without
    assert "each list is on 2 nodes, or on all where there are fewer" in said("--nodes", "1,4")
    assert "each list is on 2 nodes;" in said("--nodes", "2,4")
    assert "none of them on devices" in said("--nodes", "2")


def test_a_dedicated_device_is_whole_where_it_is_named(cli, index):
    words = (
        "--profile", index, "--rate", 50, "--slo-ms", 150, "--llm", index / "llm.json", "--policy", "dedicated-gpu",
        "--no-find-rate", "--requests", 500, "--json", "--index-scale", 200,
    )  # fmt: skip
    told = cli(*words, "--devices", "h100x2")
    bytes_of = [cli(*words, *more).json["policies"][0]["index_bytes"] for more in (
        ("--devices", 2, "--device-bandwidth", "3350GB"), ("--devices", "h100x2")
    )]  # fmt: skip
    assert bytes_of[0] <= 2 << 30 < bytes_of[1]
    assert any("dedicated-gpu" in sentence and "80 GB" in sentence for sentence in told.json["assumptions"])


def test_without_a_budget_nothing_says_what_an_index_may_take(cli, index):
    told = cli("--profile", index, "--rate", 10, "--slo-ms", 50, "--json")
    assert told.code == ExitCode.BAD_INPUT
    assert "--budget is missing" in told.json["error"]["message"]
