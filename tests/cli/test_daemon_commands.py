"""serve, status, repartition, drain and keys as commands."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing

import numpy as np
import pytest

from hybridindex.cli.console import ExitCode
from hybridindex.client import Client
from hybridindex.errors import PlanningError
from hybridindex.service import daemon as run
from hybridindex.store import ControlStore
from tests.clustered import clustered


@pytest.fixture
def running(launcher, index_path):
    with launcher.daemon(index_path, "--device", "cpu", "--port", 0) as (process, urls):
        yield index_path, process, urls[0]


def test_commands_find_the_daemon_of_an_index(cli, running):
    index, process, url = running
    by_index, by_url = cli("status", index, "--json"), cli("status", "--url", url, "--json")
    assert by_index.code == by_url.code == 0
    assert by_index.json["index"] == by_url.json["index"]
    assert by_index.json["plan_id"] == 1
    assert "cpu (stand-in)" in cli("status", index).out
    dry = cli("repartition", index, "--coverage", 0.5, "--json")
    assert dry.code == 0
    assert dry.json["bytes_to_move"] > 0
    shown = cli("repartition", index, "--coverage", 0.5)
    for word in ("dry run", "planned", "would be placed", "predicted latency", "To move", "Gain"):
        assert word in shown.out
    assert cli("repartition", index, "--coverage", 0.5, "--apply", "--json").json["plan_id"] == 2
    assert cli("status", index, "--json").json["plan_id"] == 2
    assert cli("repartition", index, "--slo-ms", 0.0001, "--coverage", "solve", "--json").code == ExitCode.INFEASIBLE
    assert cli("repartition", index, "--slo-ms", -1, "--json").code == ExitCode.BAD_INPUT
    for words in (("--slo-ms", 40), ("--coverage", "most")):
        refused = cli("repartition", index, *words, "--json")
        assert refused.code == ExitCode.BAD_INPUT
        assert "coverage is" in refused.json["error"]["message"]
    assert cli("drain", index).code == 0
    assert process.wait() == 0
    gone = cli("status", index, "--json")
    assert gone.code == ExitCode.SERVICE
    assert "no daemon serves" in gone.json["error"]["message"]


def test_an_index_is_replaced_under_its_daemon(cli, running, tmp_path):
    index, process, url = running
    np.save(tmp_path / "new.npy", clustered(600, seed=4))
    words = ("build", tmp_path / "new.npy", index, "--nlist", 8, "--metric", "l2")
    refused = cli(*words, "--json")
    assert refused.code == ExitCode.BAD_INPUT
    assert f"pid {process.pid} serves generation 1 at {url}" in refused.json["error"]["message"]
    replaced = cli(*words, "--replace")
    assert replaced.code == 0
    assert f"hybridindex reload {index}" in replaced.err.replace("\n", " ")
    assert cli("status", index, "--json").json["index"]["generation"] == 1
    reloaded = cli("reload", index, "--json")
    assert (reloaded.json["generation_before"], reloaded.json["generation"]) == (1, 2)
    assert "no plan is stored" in reloaded.json["note"]
    assert "serves already" in cli("reload", index).out
    assert json.loads((index / "daemon.json").read_text())["generation"] == 2
    for words_of_codes, said in (
        ((), "it takes up the new codes after"),
        (("--remove",), "codes that it has read until"),
    ):
        told = " ".join(cli("compress", index, *words_of_codes).err.split())
        assert f"{said}: hybridindex reload {index}" in told
    shown = cli("status", index).out
    assert "generation 2, reload manual: 1 done, 0 failed" in shown
    assert "no plan is stored" in shown
    assert cli(*words, "--replace").code == 0
    (index / "gen-000003" / "model.faiss").unlink()
    failed = cli("reload", index, "--json")
    assert failed.code == ExitCode.SERVICE
    assert "generation 2 goes on serving" in failed.json["error"]["message"]
    assert cli("rollback", index).code == 0
    assert cli("drain", index).code == 0
    assert process.wait() == 0


def test_explain_and_history_ask_the_daemon_or_the_store(cli, running, monkeypatch):
    index, process, _ = running
    assert cli("repartition", index, "--coverage", 0.5, "--apply").code == 0
    # The control store is out of the commands' reach: what they say comes from the daemon.
    with monkeypatch.context() as hidden:
        hidden.setattr(ControlStore, "open", lambda *_, **__: pytest.fail("a command opened the store"))
        live = {plan: cli("explain", index, plan, "--json") for plan in ("1", "2", "latest", "current")}
        history = cli("history", index, "--json")
        shown = cli("history", index)
        missing = cli("explain", index, "99", "--json")
    assert [live[plan].json["plan_id"] for plan in ("1", "2", "latest", "current")] == [1, 2, 2, 2]
    assert "plan, serves" in shown.out
    assert history.json["current"] == 2
    assert missing.code == ExitCode.SERVICE
    assert "no plan 99" in missing.json["error"]["message"]
    assert cli("drain", index).code == 0
    assert process.wait() == 0
    for plan in ("1", "2", "latest", "current"):
        assert cli("explain", index, plan, "--json").json == live[plan].json
    offline = cli("history", index, "--json").json
    assert history.json == offline
    assert "plan, applied" in cli("history", index).out
    assert len(offline["plans"]) == 2
    assert [a["plan_id"] for a in offline["applied"]] == [1, 2]


def test_prune_keeps_what_a_daemon_serves(cli, running):
    index = running[0]
    for coverage in (0.5, 0.6):
        assert cli("repartition", index, "--coverage", coverage, "--apply").code == 0
    assert cli("plan", index, "--slo-ms", 50, "--budget", "16MiB", "--json").code in (0, ExitCode.INFEASIBLE)
    few = ("--keep-plans", 1, "--keep-profiles", 1, "--keep-events", 1, "--json")
    dry = cli("prune", index, "--dry-run", *few)
    assert dry.json == {"dry_run": True, "plans": 2, "profiles": 0, "events": 2}
    assert len(cli("history", index, "--json").json["plans"]) == 4
    assert cli("prune", index, *few).json == {**dry.json, "dry_run": False}
    left = cli("history", index, "--json").json
    assert [p["id"] for p in left["plans"]] == [3, 4]
    assert left["current"] == 3
    assert "0 plans" in cli("prune", index).out
    assert cli("prune", index, "--keep-plans", 0, "--json").code == ExitCode.USAGE


def test_without_a_daemon_repartition_plans_for_the_next_one(cli, index_path):
    dry = cli("repartition", index_path, "--coverage", 0.5, "--json")
    assert dry.code == 0, dry.err
    assert dry.json["bytes_to_move"] > 0
    assert not dry.json["applied"]
    refused = cli("repartition", index_path, "--slo-ms", 40, "--json")
    assert refused.code == ExitCode.BAD_INPUT
    assert "coverage is 0.3, fixed by the plan in force, so slo_ms 40" in refused.json["error"]["message"]
    assert cli("repartition", index_path, "--slo-ms", 40, "--coverage", "solve", "--json").json["plan"]["slo_ms"] == 40
    assert "To move" in cli("repartition", index_path, "--coverage", 0.5).out
    assert len(cli("history", index_path, "--json").json["plans"]) == 1
    assert cli("repartition", index_path, "--coverage", 0.5, "--apply", "--json").json["plan_id"] == 2
    assert len(cli("history", index_path, "--json").json["plans"]) == 2


def test_a_plan_that_is_tried_changes_nothing_until_it_is_applied(cli, index_path):
    tried = ("plan", index_path, "--slo-ms", 50, "--budget", "16MiB", "--coverage", 0.6)
    dry = cli(*tried, "--dry-run", "--json")
    assert (dry.code, dry.json["plan_id"]) == (0, None)
    assert "Nothing was stored. Plan 1 remains the current one." in cli(*tried, "--dry-run").out
    assert len(cli("history", index_path, "--json").json["plans"]) == 1
    said = cli(*tried).out
    assert f"Plan 1 remains the current one. Apply this one with: hybridindex apply {index_path} --plan 2" in said
    assert cli("history", index_path, "--json").json["current"] == 1
    assert cli("explain", index_path, "current", "--json").json["plan_id"] == 1
    looked = cli("apply", index_path, "--dry-run", "--json")
    assert (looked.json["plan_id"], looked.json["applied"]) == (2, False)
    assert "applied plan 2" in cli("apply", index_path, "--plan", 2).out
    assert cli("history", index_path, "--json").json["current"] == 2
    assert cli("apply", index_path, "--plan", "none", "--json").code == ExitCode.BAD_INPUT
    assert cli("apply", index_path, "--plan", 7, "--json").code == ExitCode.NO_PROFILE


def test_an_infeasible_plan_is_applied_only_by_force(cli, index_path):
    assert cli("plan", index_path, "--slo-ms", 0.001, "--budget", "16MiB", "--json").code == ExitCode.INFEASIBLE
    for words in (
        ("apply", index_path),
        ("repartition", index_path, "--slo-ms", 0.001, "--coverage", "solve", "--apply"),
    ):
        refused = cli(*words, "--json")
        assert refused.code == ExitCode.INFEASIBLE
        assert "--force" in refused.json["error"]["message"]
    found = cli("history", index_path, "--json").json
    assert (found["current"], len(found["plans"])) == (1, 2)
    forced = cli("apply", index_path, "--force", "--json")
    assert (forced.code, forced.json["plan_id"]) == (ExitCode.INFEASIBLE, 2)
    assert cli("history", index_path, "--json").json["current"] == 2


def test_a_running_daemon_applies_a_stored_plan(cli, running):
    index = running[0]
    assert cli("plan", index, "--slo-ms", 50, "--budget", "16MiB", "--coverage", 0.6, "--json").code == 0
    assert cli("status", index, "--json").json["plan_id"] == 1
    shown = cli("apply", index, "--plan", 2)
    assert shown.code == 0, shown.err
    assert "applied plan 2" in shown.out
    status = cli("status", index, "--json").json
    assert (status["plan_id"], status["residency"]["lists"]) == (2, 15)
    assert cli("plan", index, "--slo-ms", 0.001, "--budget", "16MiB", "--json").code == ExitCode.INFEASIBLE
    assert cli("apply", index, "--json").code == ExitCode.INFEASIBLE
    assert cli("status", index, "--json").json["plan_id"] == 2


def test_neither_index_nor_url_is_an_error(cli):
    for command in ("status", "drain", "repartition"):
        assert cli(command, "--json").code == ExitCode.BAD_INPUT


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("--host", "0.0.0.0"), "key_file"),
        (("--no-tcp",), "uds"),
        (("--max-k", "0"), "max_k"),
        (("--plan", "newest"), "plan"),
        (("--keys", "/nonexistent/keys"), "key_file"),
        (("--tls-cert", "x"), "tls_key"),
    ],
)
def test_serve_refuses_by_field(cli, index_path, words, field):
    answer = cli("serve", index_path, *words, "--json")
    assert answer.code == ExitCode.BAD_INPUT
    assert field in answer.json["error"]["message"]


@pytest.mark.parametrize("command", ["serve", "status"])
def test_a_folder_that_is_not_there_is_not_made(cli, tmp_path, command):
    answer = cli(command, tmp_path / "typo", "--json")
    assert answer.code == ExitCode.BAD_INPUT
    assert "does not exist; expected an index directory" in answer.json["error"]["message"]
    assert not (tmp_path / "typo").exists()


def test_keys_are_made_listed_and_revoked(cli, tmp_path):
    file = tmp_path / "keys.json"
    made = cli("keys", "add", file, "web", "--json")
    assert made.code == 0
    assert made.json["key"].startswith("hix_")
    assert cli("keys", "add", file, "ops", "--role", "admin").out.startswith("hix_")
    assert cli("keys", "add", file, "web", "--json").code == ExitCode.BAD_INPUT
    listed = cli("keys", "list", file, "--json")
    assert [(k["name"], k["role"]) for k in listed.json["keys"]] == [("web", "search"), ("ops", "admin")]
    assert "sha256" not in json.dumps(listed.json)
    assert cli("keys", "revoke", file, "web").code == 0
    assert cli("keys", "revoke", file, "web", "--json").code == ExitCode.BAD_INPUT
    assert [k["name"] for k in cli("keys", "list", file, "--json").json["keys"]] == ["ops"]


def test_serve_hands_on_what_its_devices_shall_do(cli, index_path, monkeypatch):
    told = []

    def serve(_path, config, **_options):
        told.append((config.router.health.retry_open, config.router.pin_host_lists))
        return 0

    monkeypatch.setattr(run, "serve", serve)
    assert cli("serve", index_path).code == 0
    assert cli("serve", index_path, "--no-retry-open", "--pin-host-lists", "1MiB").code == 0
    assert told == [(True, None), (False, 1 << 20)]
    refused = cli("serve", index_path, "--pin-host-lists", "many", "--json")
    assert refused.code == ExitCode.BAD_INPUT


def test_another_plan_takes_the_place_of_one_that_is_damaged(cli, index_path):
    assert cli("repartition", index_path, "--coverage", 0.5, "--apply").code == 0
    with closing(sqlite3.connect(index_path / "control.sqlite")) as raw, raw:
        raw.execute("UPDATE plans SET coverage = 0.9 WHERE id = 2")
    damaged = cli("apply", index_path, "--plan", 2, "--json")
    assert damaged.code == ExitCode.NO_PROFILE
    assert "plan 2: damaged" in damaged.json["error"]["message"]
    other = cli("apply", index_path, "--plan", 1, "--json")
    assert (other.code, other.json["plan_id"]) == (0, 1)
    assert "the current plan is ignored" in other.err
    assert cli("history", index_path, "--json").json["current"] == 1


def test_a_daemon_that_makes_no_plan_ends_the_command(cli, index_path, monkeypatch):
    def fail(*_args, **_options):
        raise PlanningError("the process that plans was ended")

    monkeypatch.setattr(Client, "repartition", fail)
    failed = cli("repartition", "--url", "http://127.0.0.1:9", "--json")
    assert failed.code == ExitCode.SERVICE
    assert "was ended" in failed.json["error"]["message"]
