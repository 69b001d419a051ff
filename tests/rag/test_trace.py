"""Traces: what was recorded is replayed, with its times; files that are none are refused by line."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from hybridindex.errors import InvalidInputError, TraceError
from hybridindex.rag.generator import Finished, Prompt
from hybridindex.rag.pipelines import PIPELINES, run_pipeline
from hybridindex.rag.records import Generated, Piece
from hybridindex.rag.trace import ReplayGenerator, TraceWriter, read_traces
from tests.rag.test_pipelines import QUESTION, SAID, short
from tests.rag.world import replay, spoken


@pytest.fixture
def recorded(tmp_path, retriever):
    """A file with a run of each pipeline, and what they answered."""
    path = tmp_path / "trace.jsonl"
    answers = []
    with TraceWriter(path, model="recorded") as writer:
        for name in PIPELINES:
            answers.append(run_pipeline(name, QUESTION, retriever, replay(*SAID[name])))
            writer.append(answers[-1])
    return path, answers


def test_a_trace_holds_every_event(recorded):
    path, answers = recorded
    runs = list(read_traces(path))
    assert [run.pipeline for run in runs] == list(PIPELINES)
    for run, answer in zip(runs, answers, strict=True):
        assert run.events == answer.events
        assert run.question == QUESTION


def test_a_replay_is_the_same_run_again(recorded, retriever):
    path, answers = recorded
    for run, answer in zip(read_traces(path), answers, strict=True):
        generator = ReplayGenerator(run.generations, speed=math.inf)
        again = run_pipeline(run.pipeline, run.question, retriever, generator)
        assert again.text == answer.text
        assert short(again.events) == short(answer.events)
        assert generator.other_prompts == 0
        assert generator.left == 0


def test_other_prompts_are_counted(recorded, retriever):
    run = next(read_traces(recorded[0]))
    generator = ReplayGenerator(run.generations, speed=math.inf)
    run_pipeline(run.pipeline, "what is a reef", retriever, generator)
    assert generator.other_prompts == 2


def test_a_writer_goes_on_with_its_file(recorded):
    path, answers = recorded
    with TraceWriter(path, model="recorded") as writer:
        writer.append(answers[0])
    assert len(list(read_traces(path))) == len(PIPELINES) + 1


def test_a_trace_is_of_one_model(recorded):
    """Its header has one name, which would be wrong for the runs of another."""
    path, _ = recorded
    before = path.read_bytes()
    with pytest.raises(TraceError, match=r"trace\.jsonl is of the model 'recorded', not 'other'; .*another file"):
        TraceWriter(path, model="other")
    assert path.read_bytes() == before


@pytest.mark.parametrize("piece", [{"text": "\ud83d"}, {"text": "x", "logprobs": (-math.inf,)}])
def test_a_run_that_is_no_json_is_refused_and_the_others_stay(recorded, piece):
    path, answers = recorded
    (first, *_) = (event for event in answers[0].events if isinstance(event, Generated))
    bad = replace(answers[0], events=(replace(first, pieces=(Piece(tokens=1, at_s=0.1, **piece),)),))
    with TraceWriter(path, model="recorded") as writer:
        with pytest.raises(TraceError, match="does not fit a trace"):
            writer.append(bad)
        writer.append(answers[0])
    assert len(list(read_traces(path))) == len(PIPELINES) + 1


class Clock:
    """Time passes only in sleep."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        assert seconds > 0
        self.now += seconds


@pytest.mark.parametrize(("speed", "factor"), [(1.0, 1.0), (4.0, 0.25), (math.inf, 0.0)])
def test_pieces_come_when_they_came(speed, factor):
    clock = Clock()
    said = spoken("answer", "three short words")
    stream = ReplayGenerator([said], speed=speed, clock=clock, sleep=clock.sleep).generate(
        Prompt(name="answer", text="x", max_tokens=9)
    )
    times = []
    for part in stream:
        times.append(clock.now)
        if isinstance(part, Finished):
            assert part.reason == "stop"
    assert times == pytest.approx([factor * t for t in (0.05, 0.06, 0.07, 0.09)])


def test_another_step_is_refused():
    generator = ReplayGenerator([spoken("answer", "x")])
    with pytest.raises(TraceError, match="'other' was not recorded: the trace has 'answer'"):
        generator.generate(Prompt(name="other", text="x", max_tokens=9))
    with pytest.raises(InvalidInputError, match="speed is 0"):
        ReplayGenerator([], speed=0)


HEADER = '{"format": "hybridindex-trace", "version": 1, "model": "m"}\n'
PIECE = '{"text": "a", "tokens": 1, "at_s": 0.1, "logprobs": []}'


def line(pieces=PIECE, **fields):
    event = {
        "kind": "generated", "name": "n", "pieces": json.loads(f"[{pieces}]"), "finish": "stop", "prompt_tokens": 0,
        "completion_tokens": 0,
        "prompt_sha256": "", "max_tokens": 1, "started_s": 0.0, "seconds": 1.0, **fields,
    }  # fmt: skip
    return json.dumps({"pipeline": "p", "question": "q", "events": [event]}) + "\n"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "is not a trace"),
        ("[1]\n", "is not a trace"),
        ("[" * 100_000 + "\n", "is not a trace"),
        (HEADER.replace("1", "2"), "has version 2"),
        (HEADER + "{}\n", "line 2: not a run"),
        (HEADER + line() + "nonsense\n", "line 3: not a run"),
        (HEADER + line(kind="other"), "line 2: not a run"),
        (HEADER + line(extra=1), "line 2: not a run"),
        (HEADER + line(seconds="1"), "line 2: not a run"),
        (HEADER + line(PIECE.replace("0.1", "NaN")), "line 2: not a run"),
        (HEADER + line(PIECE.replace("0.1", "-1")), "not in the order"),
        (HEADER + line(PIECE.replace('"a"', "5")), "line 2: not a run"),
        (HEADER + line(PIECE.replace('s": 1', 's": -1')), "line 2: not a run"),
        (HEADER + '{"pipeline": "p", "question": "q", "events": [' + "0," * 20_000 + "0]}\n", "20001 events"),
    ],
)
def test_files_that_are_no_traces(tmp_path, content, complaint):
    path = tmp_path / "t.jsonl"
    path.write_text(content)
    with pytest.raises(TraceError, match=complaint):
        list(read_traces(path))


def test_a_good_line_is_read(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(HEADER + line())
    (run,) = read_traces(path)
    assert run.generations[0].text == "a"


def test_half_a_run_at_the_end_is_no_damage(recorded, caplog):
    """As a power cut leaves it."""
    path, answers = recorded
    with path.open("ab") as file:
        file.write(b'{"pipeline":"')
    assert len(list(read_traces(path))) == len(answers)
    assert "ends within a run" in caplog.text
    TraceWriter(path, model="recorded").close()
    assert len(list(read_traces(path))) == len(answers)
    assert path.read_bytes().endswith(b"}\n")


def test_places_that_cannot_be_used(tmp_path):
    with pytest.raises(TraceError, match="cannot be read"):
        list(read_traces(tmp_path / "none"))
    with pytest.raises(TraceError, match="cannot be written"):
        TraceWriter(tmp_path / "no" / "t", model="m")
    (tmp_path / "other").write_text("something else\n")
    with pytest.raises(TraceError, match="is not a trace"):
        TraceWriter(tmp_path / "other", model="m")
    assert (tmp_path / "other").read_text() == "something else\n"
