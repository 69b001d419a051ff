"""What every benchmark prints and writes."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

import benchmarks.all as all_of_them
import hybridindex
from benchmarks.all import RUNS, Run, run_all
from benchmarks.common.measure import Attempts, environment, show, write_json
from benchmarks.device.tier import PARTS
from hybridindex.tiers.contract import driver

ROOT = Path(__file__).parents[2]


def test_every_listed_benchmark_is_a_module():
    modules = [
        f"benchmarks.{name}" for name in (*(run.module for run in RUNS), *(part.module for part in PARTS.values()))
    ]
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []


def test_every_result_that_a_document_quotes_is_made():
    templates = "".join(path.read_text() for path in (ROOT / "benchmarks/texts").glob("*.md"))
    quoted = set(re.findall(r'result\("(\w+)"\)', templates))
    made = [run.name for run in RUNS]
    assert len(made) == len(set(made))
    assert quoted <= set(made)


def test_what_runs_is_shown_and_what_fails_is_named_and_kept_apart(tmp_path, capsys):
    runs = [
        Run(name="gone", module="host.no_such_benchmark"),
        Run(name="code_answers", module="host.code_answers", quick="--answers 200"),
    ]
    assert run_all(runs, tmp_path, quick=True, again=False) == 1
    shown = (tmp_path / "index.html").read_text()
    assert "No module named" in shown
    assert "python -m benchmarks.host.code_answers --answers 200" in shown
    assert json.loads((tmp_path / "code_answers.json").read_text())["benchmark"] == "code_answers"
    assert not (tmp_path / "gone.json").exists()
    assert run_all(runs[1:], tmp_path, quick=True, again=False) == 0
    assert "is there already" in capsys.readouterr().out


def test_a_result_is_kept_only_of_the_same_command_and_with_its_seconds(tmp_path, monkeypatch, capsys):
    made = []

    def output_of(words, limit_s):
        made.append(words[5:])
        Path(words[4]).write_text(json.dumps({"environment": {"date": f"day {len(made)}"}}))
        clock[0] += 100.0
        return f"made {len(made)} times\n", ""

    clock = [0.0]
    monkeypatch.setattr(all_of_them, "_output_of", output_of)
    monkeypatch.setattr(all_of_them.time, "monotonic", lambda: clock[0])
    run = Run(name="one", module="host.one", options="--rounds 9", quick="--rounds 1")

    def page(*, quick, runs=(run,)):
        assert run_all(runs, tmp_path, quick=quick, again=False) == 0
        return (tmp_path / "index.html").read_text()

    assert "made 1 times" in page(quick=True)
    full = page(quick=False)
    assert "made 2 times" in full, "a quick result was kept as a full one"
    assert "Quick mode" not in full
    kept = page(quick=False)
    assert "is there already" in capsys.readouterr().out
    assert "made 2 times" in kept
    assert "100 s" in kept, "the seconds that a kept result took"
    assert made == [["--rounds", "1"], ["--rounds", "9"]]
    # What has no quick form says nothing of the full result that lies there.
    left = page(quick=True, runs=(Run(name="one", module="host.one", options="--rounds 9", quick=None),))
    assert "takes too long" in left
    assert "day 2" not in left
    # Nobody knows which command made it.
    next(tmp_path.glob("one.run*")).unlink()
    assert "made 3 times" in page(quick=False)


def test_quick_runs_have_a_folder_of_their_own(monkeypatch, capsys):
    folders = []
    monkeypatch.setattr(all_of_them, "run_all", lambda runs, output, **_: folders.append(output) or 0)
    for words in ([], ["--quick"], ["--quick", "--output", "here"]):
        monkeypatch.setattr("sys.argv", ["all", *words])
        all_of_them.main()
    assert folders == [Path("build/bench"), Path("build/bench-quick"), Path("here")]


def test_a_wide_table_keeps_its_figures_in_a_pipe(capsys):
    show("wide", [f"column {i}" for i in range(14)], [[1.25e-3] * 14])
    assert capsys.readouterr().out.count("0.00125") == 14


def test_a_table_tells_words_in_brackets_too(capsys):
    show("notes", ("note",), [("pip install 'hybridindex[gpu]'",)])
    assert "hybridindex[gpu]" in capsys.readouterr().out


def test_what_raises_is_told_and_the_rest_goes_on(capsys):
    attempts, done = Attempts(), []
    for n in (1, 0, 2):
        with attempts(f"one over {n}"):
            done.append(1 / n)
    assert done == [1.0, 0.5]
    assert attempts.failed == ["one over 0: ZeroDivisionError('division by zero')"]
    assert "Traceback" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="failed: one over 0"):
        attempts.end()
    Attempts().end()


def test_who_is_stopped_tries_nothing_else():
    with pytest.raises(KeyboardInterrupt), Attempts()("a row"):
        raise KeyboardInterrupt


def test_versions_name_the_driver_where_there_is_one(monkeypatch):
    monkeypatch.setattr(driver, "driver_version", lambda: "580.1")
    versions = environment()["versions"]
    assert (versions["driver"], versions["hybridindex"]) == ("580.1", hybridindex.__version__)
    assert ("triton" in versions) == (importlib.util.find_spec("triton") is not None)
    monkeypatch.setattr(driver, "driver_version", lambda: None)
    assert "driver" not in environment()["versions"]


def test_results_that_cannot_be_written_leave_the_former_ones(tmp_path):
    file = tmp_path / "results.json"
    write_json(file, {"rows": [1]})
    with pytest.raises(TypeError, match="is not JSON"):
        write_json(file, {"rows": [object()]})
    assert json.loads(file.read_text()) == {"rows": [1]}
