"""The command line: every command, its JSON, its exit status, and one clear line for what went wrong."""

from __future__ import annotations

import gc
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from rich.table import Table
from rich.text import Text

from hybridindex.cli import main
from hybridindex.cli.console import ExitCode, parse_bytes, readable_bytes, to_json
from hybridindex.cli.main import PANELS, command_name, make_app, run
from hybridindex.errors import InvalidInputError
from hybridindex.index import open_index
from hybridindex.index.share.share import create_share
from hybridindex.index.share.source import FolderSource
from tests.clustered import DIM, clustered


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    np.save(folder / "vectors.npy", clustered(2500, seed=1))
    np.save(folder / "calibration.npy", clustered(300, seed=2))
    np.save(folder / "test.npy", clustered(40, seed=3))
    return folder


@pytest.fixture(scope="module")
def planned(planned_index, tmp_path_factory):
    return shutil.copytree(planned_index, tmp_path_factory.mktemp("planned") / "idx")


def test_the_whole_way_by_commands(cli, files, tmp_path):
    idx = tmp_path / "idx"
    built = cli("build", files / "vectors.npy", idx, "--nlist", 24, "--metric", "l2", "--json")
    assert built.code == 0
    assert built.json["count"] == 2500
    assert built.json["nlist"] == 24
    profiled = cli(
        "profile",
        idx,
        "-q",
        files / "calibration.npy",
        "--recall",
        0.9,
        "--max-seconds",
        1,
        "--device",
        "cpu",
        "--json",
    )
    assert profiled.code == 0, profiled.err
    assert profiled.json["profile_id"] == 1
    timed = {(one["stage"], one["device"], one["coverage"] > 0) for one in profiled.json["latencies"]}
    stand_in = "cpu (stand-in)"
    assert {("coarse", "", False), ("host_scan", "", False), ("device_scan", stand_in, False)} <= timed
    assert {("batch", "", False), ("batch", stand_in, True)} <= timed
    assert all(one["median_ms"] > 0 for one in profiled.json["latencies"])
    assert max(p["recall"] for p in profiled.json["recall"] if p["nprobe"] <= profiled.json["nprobe"]) >= 0.9
    planned = cli("plan", idx, "--slo-ms", 1000, "--budget", "16MiB", "--coverage", 0.25, "--json")
    assert planned.code == 0, planned.err
    assert planned.json["verdict"] == "feasible"
    assert planned.json["coverage"] == 0.25
    explained = cli("explain", idx, "--json")
    assert explained.code == 0
    assert explained.json["explanation"].count("\n") == 10
    found = cli("search", idx, "-q", files / "test.npy", "-k", 3, "--device", "cpu", "--json")
    assert found.code == 0
    assert np.shape(found.json["ids"]) == (40, 3)
    assert found.json["devices"] == ["cpu (stand-in)"]
    assert found.json["hit_rate"] > 0
    host = cli(
        "search",
        idx,
        "-q",
        files / "test.npy",
        "-k",
        3,
        "--plan",
        "none",
        "--nprobe",
        planned_nprobe(cli, idx),
        "--json",
    )
    assert host.json["ids"] == found.json["ids"]
    bench = cli("bench", idx, "-q", files / "test.npy", "--rate", 200, "--duration", 0.5, "--device", "cpu", "--json")
    assert bench.code == 0
    assert bench.json["load"][0]["n_failed"] == 0
    assert bench.json["load"][0]["attainment"] is not None
    history = cli("history", idx, "--json")
    assert len(history.json["profiles"]) == len(history.json["plans"]) == 1
    assert cli("verify", idx, "--json").json["ok"] is True
    report = cli("report", idx, "-o", tmp_path / "report", "--json")
    assert report.code == 0, report.err
    shown = Path(report.json["html"]).read_text()
    assert "<html" in shown.lower()
    assert "as bench measured it at" in shown
    assert f"<td>plan {report.json['plan_id']}</td><td>200</td>" in shown
    assert "No load test was run" not in shown


def planned_nprobe(cli, idx) -> int:
    return cli("history", idx, "--json").json["profiles"][0]["nprobe"]


def test_faiss_files_come_in_and_go_out(cli, planned, tmp_path):
    exported = cli("export", planned, tmp_path / "out.faiss", "--json")
    assert exported.code == 0, exported.err
    imported = cli("import", tmp_path / "out.faiss", tmp_path / "again", "--json")
    assert imported.code == 0, imported.err
    assert imported.json["count"] == 2500
    assert imported.json["previous_generation"] is None
    refused = cli("import", tmp_path / "out.faiss", tmp_path / "again", "--json")
    assert refused.code == ExitCode.BAD_INPUT
    assert "generation 1, 2,500 x " in refused.json["error"]["message"]
    replaced = cli("import", tmp_path / "out.faiss", tmp_path / "again", "--replace", "--json")
    assert (replaced.json["generation"], replaced.json["previous_generation"]) == (2, 1)
    assert "hybridindex rollback" in replaced.err
    assert cli("rollback", tmp_path / "again", "--json").json == {"generation": 1, "rolled_back": 2}
    assert cli("gc", tmp_path / "again", "--json").json == {"removed": [2]}
    assert cli("rollback", tmp_path / "again", "--json").code == ExitCode.BAD_INPUT
    assert cli("verify", tmp_path / "again", "--json").json["generation"] == 1


def test_vectors_come_from_columns_and_an_import_says_its_nprobe(cli, tmp_path, caplog):
    x = clustered(600, seed=1)
    rows = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), x.shape[1])
    pq.write_table(pa.table({"v": rows, "w": rows, "key": np.arange(600) + 9}), tmp_path / "x.parquet")
    words = ["build", tmp_path / "x.parquet", tmp_path / "idx", "--nlist", 8, "--nprobe", 1]
    built = cli(*words, "--column", "v", "--ids-column", "key", "--json")
    assert built.code == 0, built.err
    assert built.json["count"] == 600
    assert "2 columns of vectors" in cli(*words, "--replace").err
    assert cli("export", tmp_path / "idx", tmp_path / "x.faiss").code == 0
    assert cli("import", tmp_path / "x.faiss", tmp_path / "a", "--nprobe", 3, "--json").json["nprobe"] == 3
    assert caplog.text == ""
    assert cli("import", tmp_path / "x.faiss", tmp_path / "b", "--json").json["nprobe"] == 1
    assert "nprobe 1, faiss's default" in caplog.text
    heads = np.full((600, 1), x.shape[1], np.int32).view(np.float32)
    np.hstack([heads, x]).tofile(tmp_path / "q.fvecs")
    np.save(tmp_path / "q.npy", x)
    np.save(tmp_path / "half.npy", x.astype(np.float16))
    found = [
        cli("search", tmp_path / "a", "-q", tmp_path / name, "--json").json["ids"] for name in ("q.fvecs", "q.npy")
    ]
    assert found[0] == found[1]
    assert cli("search", tmp_path / "a", "-q", tmp_path / "half.npy", "--json").code == 0
    refused = cli("import", tmp_path / "x.faiss", tmp_path / "c", "--refine", "drop")
    assert (refused.code, "holds no refinement" in refused.err) == (ExitCode.BAD_INPUT, True)


def test_infeasible_is_an_exit_status_not_an_error(cli, planned):
    answer = cli("plan", planned, "--slo-ms", 0.0001, "--budget", "1GiB", "--json")
    assert answer.code == ExitCode.INFEASIBLE
    assert answer.json["verdict"] == "infeasible"


def test_a_file_that_cannot_be_written_is_a_bad_option(cli, planned, files, tmp_path):
    answer = cli("search", planned, "-q", files / "test.npy", "-o", tmp_path / "none" / "found.npz", "--plan", "none")
    assert answer.code == ExitCode.BAD_INPUT
    assert f"{tmp_path}/none/found.npz cannot be made" in answer.err


def test_search_writes_arrays(cli, planned, files, tmp_path):
    answer = cli("search", planned, "-q", files / "test.npy", "-o", tmp_path / "found.npz", "--json")
    assert answer.code == 0
    with np.load(tmp_path / "found.npz") as found:
        assert found["ids"].shape == (40, 10)


def test_search_takes_ids_from_files(cli, planned, files, tmp_path):
    np.save(tmp_path / "some.npy", np.arange(0, 1000, 5))
    (tmp_path / "some.txt").write_text("\n".join(map(str, range(0, 1000, 5))) + "\n\n")
    (tmp_path / "none.txt").write_text("")
    words = ("search", planned, "-q", files / "test.npy", "--json")
    by_array, by_text = (cli(*words, "--allow-ids", tmp_path / name).json for name in ("some.npy", "some.txt"))
    assert by_array["ids"] == by_text["ids"]
    found = np.array(by_array["ids"])
    assert (found[found >= 0] % 5 == 0).all()
    denied = np.array(cli(*words, "--deny-ids", tmp_path / "some.npy").json["ids"])
    assert (denied % 5 != 0)[denied < 1000].all()
    assert (np.array(cli(*words, "--allow-ids", tmp_path / "none.txt").json["ids"]) == -1).all()


def test_a_build_takes_attributes_of_rows_whose_ids_the_file_has(cli, tmp_path):
    rows, ids = clustered(300), np.arange(300)[::-1] * 2
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), rows.shape[1])
    pq.write_table(pa.table({"v": vectors, "id": ids}), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"row": row}) for row in range(300)))
    np.save(tmp_path / "query.npy", rows[7:8])
    words = ("build", tmp_path / "rows.parquet", tmp_path / "idx", "--column", "v", "--ids-column", "id")
    assert cli(*words, "--attributes", tmp_path / "rows.jsonl", "--json").json["attributes"] == {"row": "int"}
    found = cli(
        "search", tmp_path / "idx", "-q", tmp_path / "query.npy", "-k", "1", "--where", "row = 7", "--json"
    ).json
    assert found["ids"] == [[int(ids[7])]]


def test_attributes_are_given_searched_and_removed(cli, planned, files, tmp_path):
    rows = [{"doc": i, "year": 1980 + i % 40, "lang": ["en", "de"][i % 2]} for i in range(500)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = cli("attributes", planned, tmp_path / "rows.jsonl", "--id-column", "doc", "--json").json
    assert given["attributes"] == {"year": "int", "lang": "string"}
    assert given["rows"] == 500
    assert "lang" in cli("attributes", planned, tmp_path / "rows.jsonl", "--id-column", "doc").out
    words = ("search", planned, "-q", files / "test.npy", "--plan", "none", "--json")
    found = np.array(cli(*words, "--where", "lang = 'de' AND year < 2000").json["ids"])
    assert (found % 2 == 1)[found >= 0].all()
    assert (found % 40 < 20)[found >= 0].all()
    assert found.max() < 500
    said = cli("verify", planned, "--json").json
    assert (said["attributes"], said["attributes_problem"]) == ({"year": "int", "lang": "string"}, None)
    assert "year (int), lang (string)" in cli("verify", planned).out
    refused = cli("attributes", planned, tmp_path / "rows.jsonl", "--id-column", "id")
    assert (refused.code, "expected one of doc, year, lang" in refused.err) == (ExitCode.BAD_INPUT, True)
    refused = cli(*words, "--where", "lang = de")
    assert (refused.code, "put texts in single quotes" in refused.err) == (ExitCode.BAD_INPUT, True)
    file = next(planned.glob("gen-*/attributes-*.arrow"))
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    refused = cli("verify", planned)
    assert (refused.code, "the attributes cannot be used" in refused.out) == (ExitCode.BAD_INDEX, True)
    assert cli("attributes", planned, "--remove", "--json").json["removed_bytes"] > 0
    assert cli("verify", planned, "--json").json["attributes"] is None
    assert cli("attributes", planned).code == ExitCode.BAD_INPUT


def test_doctor_says_what_is_here(cli):
    answer = cli("doctor", "--json")
    assert answer.code == 0
    states = {f["what"]: f["state"] for f in answer.json["findings"]}
    assert states["faiss"] in ("ok", "note")
    assert "native extension" in states
    assert "faiss" in cli("doctor").out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["verify", "{tmp}/nothing"], ExitCode.BAD_INPUT, "nothing"),
        (["search", "{idx}", "-q", "{tmp}/none.npy"], ExitCode.BAD_INPUT, "does not exist"),
        (["search", "{idx}", "-q", "{tmp}/text.npy"], ExitCode.BAD_INPUT, "not a readable .npy"),
        (["search", "{idx}", "-q", "{test}", "--allow-ids", "{tmp}/none.txt"], ExitCode.BAD_INPUT, "--allow-ids"),
        (["search", "{idx}", "-q", "{test}", "--deny-ids", "{tmp}/words.txt"], ExitCode.BAD_INPUT, "line 2 of"),
        (["search", "{idx}", "-q", "{test}", "--deny-ids", "{test}"], ExitCode.BAD_INPUT, "deny_ids is a "),
        (["search", "{idx}", "-q", "{test}", "-k", "0"], ExitCode.USAGE, "-k"),
        (["search", "{idx}", "-q", "{test}", "-k", "5000"], ExitCode.BAD_INPUT, "k is 5000"),
        (["search", "{idx}", "-q", "{test}", "--nprobe", "9999"], ExitCode.BAD_INPUT, "nprobe is 9999"),
        (["search", "{idx}", "-q", "{test}", "--device", "cuda:77"], ExitCode.MISSING, "cuda:77"),
        (["search", "{idx}", "-q", "{test}", "--plan", "99"], ExitCode.NO_PROFILE, "99"),
        (["search", "{idx}", "-q", "{test}", "--plan", "best"], ExitCode.BAD_INPUT, "'best'"),
        (["plan", "{idx}", "--slo-ms", "0", "--budget", "1GiB"], ExitCode.BAD_INPUT, "slo_ms"),
        (["plan", "{idx}", "--slo-ms", "5", "--budget", "lots"], ExitCode.BAD_INPUT, "'lots'"),
        (
            ["plan", "{idx}", "--slo-ms", "5", "--budget", "1GiB", "--llm", "{tmp}/text.npy"],
            ExitCode.BAD_INPUT,
            "--llm",
        ),
        (["build", "{tmp}/text.npy", "{tmp}/new"], ExitCode.BAD_INPUT, "not a readable .npy"),
        (["build", "{test}", "{tmp}/new", "--nlist", "500"], ExitCode.BAD_INPUT, "nlist"),
        (["build", "{test}", "{tmp}/new", "--metric", "cosine"], ExitCode.BAD_INPUT, "cosine"),
        (["import", "{tmp}/text.npy", "{tmp}/new"], ExitCode.BAD_INDEX, "text.npy"),
        (["bench", "{idx}", "-q", "{test}", "--rate", "-1"], ExitCode.BAD_INPUT, "rate is -1"),
        (["nonsense"], ExitCode.USAGE, "nonsense"),
    ],
)
def test_bad_input_gives_one_clear_error(cli, planned, files, tmp_path, words, code, message):
    (tmp_path / "text.npy").write_text("this is no array")
    (tmp_path / "words.txt").write_text("7\nseven\n")
    names = {"tmp": tmp_path, "idx": planned, "test": files / "test.npy"}
    answer = cli(*(w.format(**names) for w in words))
    assert answer.code == code, answer.err
    assert message in answer.err
    assert "Traceback" not in answer.err
    assert not (tmp_path / "new" / "CURRENT").exists()


def test_errors_are_json_too(cli, planned, tmp_path):
    answer = cli("search", planned, "-q", tmp_path / "none.npy", "--json")
    assert answer.json["error"]["type"] == "InvalidInputError"
    assert answer.json["error"]["exit_code"] == answer.code == ExitCode.BAD_INPUT


def test_plan_without_profile_says_so(cli, files, tmp_path):
    assert cli("build", files / "vectors.npy", tmp_path / "i", "--nlist", 8, "--json").code == 0
    answer = cli("plan", tmp_path / "i", "--slo-ms", 5, "--budget", "1GiB")
    assert answer.code == ExitCode.NO_PROFILE
    assert "profile" in answer.err


def test_ctrl_c_is_130(cli, planned, monkeypatch):
    import hybridindex as hx

    def interrupted(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(hx, "open", interrupted)
    assert cli("verify", planned).code == ExitCode.INTERRUPTED


def test_every_command_takes_json_and_explains_itself():
    commands = dict(typer.main.get_command(make_app()).commands)
    for group in ("keys", "profile", "refresh-schedule", "cluster"):
        commands |= {f"{group} {name}": command for name, command in commands.pop(group).commands.items()}
    for name, command in commands.items():
        assert command.help, name
        assert not any("\n" in paragraph for paragraph in command.help.split("\n\n")), name  # Typer would keep it
        assert any("--json" in p.opts for p in command.params), name
        # Rich takes a word in brackets as a style, and does not show it.
        for told in (command.help, *(getattr(p, "help", None) or "" for p in command.params)):
            assert Text.from_markup(told).plain == told, name


def test_help_shows_every_command_in_a_group(cli):
    app = make_app()
    named = [command_name(each) for each in (*app.registered_commands, *app.registered_groups)]
    assert sorted(named) == sorted(name for names in PANELS.values() for name in names)
    shown = cli("--help").out
    assert all(f" {panel} " in shown for panel in PANELS)
    assert shown.index(" Index ") < shown.index(" build ") < shown.index(" Search ") < shown.index(" bench ")
    assert "Commands" not in shown


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands(shell, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hybridindex"])
    monkeypatch.setenv("_HYBRIDINDEX_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "hybridindex rep")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    monkeypatch.setenv("COMP_WORDS", "hybridindex rep")
    monkeypatch.setenv("COMP_CWORD", "1")
    with pytest.raises(SystemExit):
        run()
    said = capsys.readouterr().out
    assert "report" in said
    assert "repartition" in said
    assert "build" not in said


def test_each_command_is_found_in_its_module():
    named = {name for names in main._COMMANDS.values() for name in names}
    assert named == set(typer.main.get_command(make_app()).commands)
    for word in named:
        assert word in typer.main.get_command(make_app(word)).commands
        assert len(typer.main.get_command(make_app(word)).commands) < len(named)
    assert set(typer.main.get_command(make_app("verfy")).commands) == named


@pytest.mark.parametrize(
    ("text", "nbytes"), [("2GiB", 2 << 30), ("512 MB", 512_000_000), ("1.5k", 1536), ("7", 7), ("3T", 3 << 40)]
)
def test_sizes(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 parsec", "1e9"])
def test_sizes_that_are_none(text):
    with pytest.raises(InvalidInputError):
        parse_bytes(text)


def test_readable_sizes_and_plain_json():
    assert readable_bytes(1536) == "1.5 KiB"
    assert readable_bytes(12) == "12 B"
    assert to_json({"a": np.float32(np.inf), "b": (np.int64(3),), "c": np.arange(2)}) == {
        "a": None,
        "b": [3],
        "c": [0, 1],
    }


def test_dimension_of_demo_vectors_is_checked(cli, planned, tmp_path):
    np.save(tmp_path / "wide.npy", np.zeros((2, DIM + 1), np.float32))
    assert f"(n, {DIM})" in cli("search", planned, "-q", tmp_path / "wide.npy").err


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_during_a_command_says_so(cli, monkeypatch, as_json):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("hybridindex.cli.commands.doctor.examine", interrupted)
    answer = cli("doctor", *(["--json"] if as_json else []))
    assert answer.code == ExitCode.INTERRUPTED
    assert "KeyboardInterrupt: interrupted" in answer.err
    assert (answer.json["error"]["exit_code"] if as_json else answer.json) == (130 if as_json else None)


def test_ctrl_c_during_start_up_says_so(monkeypatch, capsys):
    def interrupted(name, *rest):
        if name == "hybridindex.cli.main":
            raise KeyboardInterrupt
        return real(name, *rest)

    import builtins

    from hybridindex.cli import entry

    real = builtins.__import__
    monkeypatch.setattr(sys, "argv", ["hybridindex", "doctor", "--json"])
    monkeypatch.setattr(builtins, "__import__", interrupted)
    with pytest.raises(SystemExit) as stopped:
        entry.run()
    assert stopped.value.code == 130
    captured = capsys.readouterr()
    assert captured.err.startswith("KeyboardInterrupt: interrupted")
    assert json.loads(captured.out)["error"]["type"] == "KeyboardInterrupt"


def test_the_entry_point_runs_commands(monkeypatch, capsys):
    from hybridindex.cli import entry

    left_alone = []
    monkeypatch.setattr(gc, "freeze", lambda: left_alone.append(True))
    monkeypatch.setattr(sys, "argv", ["hybridindex", "--version"])
    entry.run()
    at_once = capsys.readouterr().out
    assert at_once.startswith("hybridindex ")
    # By the command line proper.
    monkeypatch.setattr(sys, "argv", ["hybridindex", "--version", "build"])
    with pytest.raises(SystemExit) as stopped:
        entry.run()
    assert not stopped.value.code
    assert capsys.readouterr().out == at_once
    # What is collected at the end of a process delays it: a daemon's by seconds.
    assert left_alone


def test_wrong_usage_is_json_too(cli):
    answer = cli("doctor", "--json", "--nonsense")
    assert answer.code == ExitCode.USAGE
    assert answer.json["error"]["type"] == "UsageError"
    assert "--nonsense" in answer.json["error"]["message"]
    assert answer.json["error"]["exit_code"] == 2
    assert "--nonsense" in answer.err


@pytest.mark.parametrize("as_json", [False, True])
def test_an_error_of_the_system_is_one_line(cli, monkeypatch, as_json):
    def full():
        raise OSError(28, "No space left on device", "somewhere")

    monkeypatch.setattr("hybridindex.cli.commands.doctor.examine", full)
    answer = cli("doctor", *(["--json"] if as_json else []))
    assert answer.code == ExitCode.UNEXPECTED
    assert "No space left on device" in answer.err
    assert answer.err.count("\n") == 1
    assert (answer.json["error"]["exit_code"] if as_json else answer.json) == (1 if as_json else None)


def test_names_in_square_brackets_are_printed_as_they_are(cli, printed, tmp_path):
    """Not taken for markup: neither lost, nor an error."""
    missing = tmp_path / "[red]idx[/x]"
    assert str(missing) in cli("plan", missing, "--slo-ms", 5, "--budget", "1MiB").err
    shown = printed(Table("[/y] " + "x" * 20, title="[red]title[/x]"))
    assert "[/y] x" in shown
    assert "[red]title[/x]" in shown


def test_an_index_is_compressed_described_and_freed_of_its_codes(cli, files, tmp_path):
    idx = tmp_path / "idx"
    assert cli("build", files / "vectors.npy", idx, "--nlist", 16, "--bits", 2, "--json").json["rabitq_bits"] == 2
    made = cli("compress", idx, "--recall-loss", 0.02, "-q", files / "test.npy", "--json")
    assert made.code == 0, made.err
    assert (made.json["bits"], made.json["measured_with"], made.json["recall_loss"]) == (1, "queries", 0.02)
    assert made.json["codes_bytes"] < made.json["rows_bytes"] / 4
    assert len(made.json["candidates"]["r"]) == 3
    told = cli("compress", idx)
    assert "candidates of a search" in told.out
    assert "real queries (--queries) may need more" in told.err
    whole = cli("verify", idx, "--json")
    assert (whole.json["rabitq_bits"], whole.json["rabitq_problem"], whole.json["ok"]) == (1, None, True)
    (table,) = idx.glob("gen-*/lists.xxh3.npy")
    digests = table.read_bytes()
    table.write_bytes(digests[:-1] + bytes([digests[-1] ^ 1]))
    damaged = cli("verify", idx, "--json")
    assert (damaged.code, damaged.json["ok"]) == (ExitCode.BAD_INDEX, False)
    assert "lists.xxh3.npy is damaged" in damaged.json["digests_problem"]
    table.write_bytes(digests)
    next(idx.glob("gen-*/rabitq-*.bin")).write_bytes(b"")
    damaged = cli("verify", idx, "--json")
    assert damaged.code == ExitCode.BAD_INDEX
    assert damaged.json["ok"] is False
    assert "has 0 bytes" in damaged.json["rabitq_problem"]
    refused = cli("compress", idx, "--remove", "--bits", 1, "--seed", 3)
    assert (refused.code, "--bits and --seed" in refused.err) == (ExitCode.BAD_INPUT, True)
    assert cli("compress", idx, "--remove", "--json").json["removed_bytes"] > 0
    assert cli("verify", idx, "--json").json["rabitq_bits"] is None


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--bits", 3], ExitCode.BAD_INPUT, "bits is 3"),
        (["--recall-loss", 1], ExitCode.BAD_INPUT, "recall_loss is 1"),
        (["--queries", "nowhere.npy"], ExitCode.BAD_INPUT, "nowhere.npy does not exist"),
    ],
)
def test_what_cannot_be_compressed_is_refused_by_name(cli, planned, words, code, message, tmp_path):
    damaged = tmp_path / "idx"
    shutil.copytree(planned, damaged)
    [lists] = damaged.glob("gen-*/lists.bin")
    whole = lists.read_bytes()
    lists.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    for index in (planned, damaged):  # the rows are not read for that
        refused = cli("compress", index, *words)
        assert refused.code == code
        assert message in refused.err
    assert cli("compress", damaged).code == ExitCode.BAD_INDEX


def test_a_share_is_described_and_its_damage_said(cli, planned, files, tmp_path):
    source, path = FolderSource(planned), tmp_path / "share"
    create_share(path, source)
    with open_index(path) as index:
        index.share.hold([0, 1, 2], source)
        held_bytes = index.share.held_bytes
        at = int(index.integrity.spans[1, 0, 0])
    said = cli("verify", path, "--json").json
    assert (said["ok"], said["share_lists"], said["share_bytes"]) == (True, 3, held_bytes)
    assert "a share: all checksums of its lists match" in cli("verify", path).out
    assert cli("verify", planned, "--json").json["share_lists"] is None
    refused = cli("search", path, "-q", files / "test.npy", "--plan", "none")
    assert (refused.code, "which this share does not hold" in refused.err) == (ExitCode.BAD_INDEX, True)
    refused = cli("export", path, tmp_path / "out.faiss")
    assert "is a share" in refused.err
    file = next(path.glob("gen-*/lists.bin"))
    with file.open("r+b") as lists:
        lists.seek(at)
        byte = lists.read(1)[0]
        lists.seek(at)
        lists.write(bytes([byte ^ 1]))
    refused = cli("verify", path, "--json")
    assert (refused.code, refused.json["share_lists"]) == (ExitCode.BAD_INDEX, 2)
    assert "list 1 of the share" in refused.json["share_problem"]
