"""Runs the benchmarks that the documents quote, each in its own process, and writes one page of what they print.

    python -m benchmarks.all --output build/bench                # hours; it can be resumed
    python -m benchmarks.all --output build/bench-quick --quick  # ten minutes at most: whether they run; no numbers
    python -m benchmarks.all --output build/bench --only recall_qps --again

A result that is there already is kept if the same command made it.
Benchmarks of devices are python -m benchmarks.device.NAME, on a machine that has some.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridindex.report.page import Block, page, pre_block, table_block, text_block
from hybridindex.report.tables import Table

__all__ = ["RUNS", "Run", "run_all"]

#: Of the quick mode: for all together, and for one, which shall leave time for the others.
_QUICK_S, _QUICK_EACH_S = 570.0, 45.0
_PAGE = "index.html"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One result file, and the command that makes it."""

    #: ``NAME.json``.
    name: str
    #: Of the package ``benchmarks``.
    module: str
    options: str = ""
    #: Options that make it short enough for the quick mode; None: nothing does.
    quick: str | None = ""
    #: What it does not find by itself, and the document that says more.
    needs: str = ""


def _run(module: str, quick: str | None = "", *, name: str = "", options: str = "", needs: str = "") -> Run:
    return Run(name=name or module.rpartition(".")[2], module=module, options=options, quick=quick, needs=needs)


#: In the order in which a reader meets them.
RUNS = (
    _run("host.recall_qps", None),
    _run("host.host_scan", "--quick --datasets 128"),
    _run("host.compressed", "--quick --bits 1 --threads 1"),
    _run("host.code_plans", "--quick"),
    _run("host.code_answers", "--answers 2000"),
    _run("host.code_build", "--quick"),
    _run("host.pq", "--dataset none --dims 96 --codecs pqfs --metrics ip --nprobes 32 --threads 1 --repeats 3"),
    _run("host.updates", None),
    _run("host.filters", None),
    _run("host.coarse", "--dataset none --shapes 1300x256 --repeats 3"),
    _run("host.split_probes", None),
    _run("host.solver", None),
    _run("host.router_overhead", "--repeats 1"),
    _run("host.early_dispatch", "--rounds 1"),
    _run("host.busy_neighbours", "--rounds 1 --seconds 0.2 --codecs flat --megabytes 16"),
    _run("host.first_searches", "--codecs flat --repeats 1 --cold-repeats 1 --megabytes 16"),
    _run("host.hit_rate", None),
    _run("host.hit_rate", None, name="hit_rate_full", options="--dataset full"),
    _run("host.latency", "--repeats 1 --profile-seconds 3"),
    _run("host.plan_calibration", None),
    _run("host.plan_consistency", None),
    _run("host.exactness", "--seconds 5", options="--seconds 60"),
    _run("host.schedulers", "--times"),
    _run("rag.lookahead_replay", None),
    _run("rag", needs="an LLM's server: docs/rag.md"),
    _run("rag.llm_plan", needs="an LLM's server: docs/vllm.md"),
    _run(
        "rag.bench_serve",
        options="--rounds 4 --prompts 40 --request-rate 2 --search-rate 100",
        needs="an LLM's server: docs/vllm.md",
    ),
    _run("service.http_overhead", "--vectors 20000 --repeats 20 --seconds 1"),
    _run("service.overload", "--seconds 6 --vectors 20000"),
    _run("service.flood", "--seconds 1 --vectors 20000 --only lookahead"),
    _run("service.drift", "--rounds 1 --mib 8 --windows 12"),
    _run("service.drift_trace", None),
    _run("service.repartition_cycle", "--rounds 1 --mib 64"),
    _run("service.repartition_load", None),
    _run("service.replacement", "--replacements 1 --vectors 20000 --quiet-s 1"),
    _run("service.simulator_check", "--vectors 50000 --repeats 1 --load 0.5 --coverage 0 --profile-seconds 3"),
    _run("service.soak", "--seconds 10 --requests 2000 --vectors 10000"),
    _run("service.cluster", "--quick --parts fan_out", options="--parts answers,hang,kill,fan_out"),
    _run("service.cluster", "--quick --parts changes", name="cluster_changes", options="--parts changes"),
    _run("service.cluster", None, name="cluster_generations", options="--parts generations"),
    _run(
        "service.cluster",
        None,
        name="cluster_codes",
        options="--parts answers,rate,forecast --code-bits 1 --dim 256 --mib 384 --nprobe 64",
    ),
    _run("service.cluster", None, name="cluster_rate", options="--parts routing,rate,forecast"),
    _run(
        "service.cluster", None, name="cluster_rate_four", options="--parts routing,rate,forecast --most-nodes 4"
    ),
    _run(
        "service.cluster",
        None,
        name="cluster_rate_large",
        options="--parts rate --most-nodes 4 --mib 1600 --nprobe 1024",
    ),
    _run("papers.schedule_figures"),
    _run("papers.figures", "--quick"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Done:
    run: Run
    command: str
    #: What it printed.
    text: str
    #: Empty: it did what it should.
    problem: str
    #: Why it did nothing here.
    left: str
    #: That the result took, also where it was kept.
    seconds: float
    result: dict[str, Any]


def run_all(runs: Sequence[Run], output: Path, *, quick: bool, again: bool) -> int:
    """How many failed. The page is written anew after each, so that it is there whatever happens."""
    output.mkdir(parents=True, exist_ok=True)
    ends_s = time.monotonic() + _QUICK_S
    done: list[_Done] = []
    for number, run in enumerate(runs, 1):
        file, said, made = (output / f"{run.name}.{ending}" for ending in ("json", "txt", "run"))
        command = f"python -m benchmarks.{run.module} {(run.quick or '') if quick else run.options}".rstrip()
        print(f"[{number}/{len(runs)}] {command}", flush=True)
        began, problem, left = time.monotonic(), "", ""
        kept_s = None if again or not (file.exists() and said.exists()) else _seconds_of(made, command)
        seconds = 0.0
        if kept_s is not None:
            text, seconds = said.read_text(), kept_s
            print(f"  is there already, made in {seconds:.0f} s; --again runs it anew", flush=True)
        elif run.needs:
            text, left = "", f"needs {run.needs}"
        elif quick and run.quick is None:
            text, left = "", "takes too long for the quick mode"
        elif quick and began > ends_s:
            text, problem = "", "not run: the ten minutes were over"
        else:
            made.unlink(missing_ok=True)
            words = [sys.executable, "-m", f"benchmarks.{run.module}", "--json", str(file), *command.split()[3:]]
            text, problem = _output_of(words, min(_QUICK_EACH_S, ends_s - began) if quick else None)
            seconds = time.monotonic() - began
            said.write_text(text)
            if problem:
                file.unlink(missing_ok=True)
            else:
                made.write_text(json.dumps({"command": command, "seconds": seconds}) + "\n")
        result = json.loads(file.read_text()) if file.exists() and not (problem or left) else {}
        done.append(
            _Done(run=run, command=command, text=text, problem=problem, left=left, seconds=seconds, result=result)
        )
        if problem or left:
            print(f"  {problem or left}", flush=True)
        (output / _PAGE).write_text(_page(done, len(runs), quick=quick), encoding="utf-8")
    return sum(bool(each.problem) for each in done)


def _seconds_of(made: Path, command: str) -> float | None:
    """What a kept result took; None: another command made it, or nobody knows which."""
    try:
        found = json.loads(made.read_text())
        return float(found["seconds"]) if found["command"] == command else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _output_of(words: list[str], limit_s: float | None) -> tuple[str, str]:
    """What it prints, and what went wrong."""
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            text, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            # With all that it started.
            os.killpg(process.pid, signal.SIGKILL)
            return process.communicate()[0], f"ended after {limit_s:.0f} s: it has no form for the quick mode"
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode == 0:
        return text, ""
    last = text.strip().splitlines()[-1:] or ["it said nothing"]
    return text, f"failed with {process.returncode}: {last[0][:300]}"


def _page(done: Sequence[_Done], n: int, *, quick: bool) -> str:
    rows = [[each.run.name, _date(each), each.problem or each.left or "ok", f"{each.seconds:.0f} s"] for each in done]
    blocks: list[Block] = []
    if quick:
        words = "These runs say whether the benchmarks work. They are too short for numbers to quote."
        blocks.append(text_block(words, kind="warning", lead="Quick mode."))
    machine = next((each.result["environment"] for each in done if "environment" in each.result), None)
    if machine is not None:
        blocks.append(
            table_block(Table(rows=[[k, _words(v)] for k, v in machine.items() if k != "date"]), heading="Machine")
        )
    blocks.append(table_block(Table(header=("benchmark", "date", "outcome", "took"), rows=rows), heading="All"))
    for each in done:
        blocks.append(text_block(each.command, heading=each.run.name))
        if each.problem:
            blocks.append(text_block(each.problem, kind="warning", lead="Not done."))
        elif each.left:
            blocks.append(text_block(each.left, kind="missing"))
        if each.text.strip():
            blocks.append(pre_block(each.text.strip()))
    under = (
        f"{len(done)} of {n} benchmarks. Both sides of a comparison ran in one process, in turns, with equal threads; "
        "where a table has a column or row A/A, that is one side against itself: what is smaller is noise."
    )
    return page("hybridindex: benchmarks", under, blocks)


def _date(each: _Done) -> str:
    return str(each.result.get("environment", {}).get("date", ""))


def _words(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, metavar="DIR", help="default: build/bench; quick: build/bench-quick")
    parser.add_argument("--quick", action="store_true", help="whether they run, in ten minutes; no numbers to keep")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=[run.name for run in RUNS], help="of these results"
    )
    parser.add_argument("--again", action="store_true", help="also where the result is there already")
    args = parser.parse_args()
    runs = [run for run in RUNS if args.only is None or run.name in args.only]
    output = args.output or Path("build/bench-quick" if args.quick else "build/bench")
    failed = run_all(runs, output, quick=args.quick, again=args.again)
    print(f"{output / _PAGE}: {len(runs)} benchmarks, {failed} failed")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
