"""``hybridindex chat`` in a process of its own, with a real vLLM; it finds the router inside vLLM by the index's name.

What the model says is nonsense, broken characters included.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hybridindex.cli.console import ExitCode
from hybridindex.rag.documents import DocumentStore
from hybridindex.rag.records import LookedAhead, Retrieved
from hybridindex.rag.trace import read_traces
from tests.vllm.conftest import Library
from tests.vllm.server import Served
from tests.vllm.serving import MAX_MODEL_LEN, chat, environment, wait_for, wait_until_still, written
from tests.vllm.sides import QUESTION, Side

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="not verified: no vLLM here; make test-vllm"),
    pytest.mark.timeout(900),
]


def test_an_answer_is_recorded_inside_and_replayed_beside_vllm(
    served: Served, library: Library, tmp_path: Path
) -> None:
    """HyDE through vLLM's router, then the same words without it, without a daemon, and without lookahead."""
    alone, trace = tmp_path / "alone", tmp_path / "trace.jsonl"
    shutil.copytree(library.index, alone, ignore=shutil.ignore_patterns("daemon.*", "control.*"))
    done = chat(library.index, "--llm", served.url, "-q", QUESTION, "-k", 3, "--record", trace, "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["pipeline"], said["question"], said["lookaheads"]) == ("hyde", QUESTION, 1)
    assert len(said["passages"]) == 3
    with DocumentStore(library.documents) as store:
        texts = store.read([passage["id"] for passage in said["passages"]])
    for passage in said["passages"]:
        assert passage["text"] == texts[passage["id"]].document.text

    (run,) = read_traces(trace)
    draft, answer = run.generations
    assert answer.text.strip() == said["answer"]
    assert draft.completion_tokens == answer.completion_tokens == 128
    assert sum(event.seconds for event in run.generations) == pytest.approx(said["generation_s"])
    (search,) = [event for event in run.events if isinstance(event, Retrieved)]
    assert search.texts == (draft.text.strip(),)

    words = ["--replay", trace, "-k", 3, "--no-lookahead", "--speed", "inf", "--record", tmp_path / "again", "--json"]
    done = chat(alone, *words, "--device", "cpu", "--budget", "16MiB", "--plan", "none")
    assert done.returncode == 0, done.stderr
    again = json.loads(done.stdout)
    assert (again["answer"], again["passages"], again["lookaheads"]) == (said["answer"], said["passages"], 0)
    (replayed,) = read_traces(tmp_path / "again")
    assert [g.prompt_sha256 for g in replayed.generations] == [g.prompt_sha256 for g in run.generations]
    assert [type(event) for event in replayed.events] == [
        type(event) for event in run.events if not isinstance(event, LookedAhead)
    ]


def test_piperag_is_terminated_in_the_middle_and_leaves_nothing(
    served: Served, library: Library, far: Side, tmp_path: Path
) -> None:
    """Its session is in vLLM's router, its generation in vLLM: both end with it."""
    length = MAX_MODEL_LEN - 500
    words = [library.index, "--llm", served.url, "-q", QUESTION, "--mode", "completions"]
    words += ["--pipeline", "piperag", "--interval", length, "--max-tokens", length]
    tokens, done = written(served.url)
    started = [sys.executable, "-m", "tests.vllm.chat", "chat", *map(str, words)]
    with (
        (tmp_path / "said").open("wb") as output,
        subprocess.Popen(started, stdout=output, stderr=subprocess.PIPE, env=environment()) as process,
    ):
        try:
            # Not its text: of broken characters, vLLM shows none before they are whole.
            wait_for("vLLM writes for it", lambda: written(served.url)[0] > tokens)
            assert far.sessions() == 1
            process.send_signal(signal.SIGTERM)
            _, complaint = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == ExitCode.INTERRUPTED, (complaint, (tmp_path / "said").read_bytes()[:2000])
    assert b"interrupted" in complaint
    assert b"Traceback" not in complaint
    after = wait_until_still(lambda: written(served.url))
    assert after[0] - tokens < length
    assert after[1] == done
    far.wait_until_free()


def test_a_model_that_vllm_does_not_serve_is_one_line(served: Served, library: Library) -> None:
    done = chat(library.index, "--llm", served.url, "--model", "large", "-q", QUESTION, "--json")
    assert done.returncode == ExitCode.SERVICE
    assert "serves 'tiny', not 'large'" in json.loads(done.stdout)["error"]["message"]
    assert "Traceback" not in done.stderr
