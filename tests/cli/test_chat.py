"""chat: questions, streamed answers, passages, records and replays, and one clear line for what went wrong."""

from __future__ import annotations

import pytest
from rich.console import Console

from hybridindex.cli import commands_chat
from hybridindex.cli.console import ExitCode
from hybridindex.demo import embed
from hybridindex.demo.documents import EMBEDDER
from hybridindex.rag.documents import write_documents
from hybridindex.rag.pipelines import PIPELINES, run_pipeline
from hybridindex.rag.records import Answer, Passage
from hybridindex.rag.steps import Steps
from hybridindex.rag.trace import TraceWriter, read_traces
from tests.cli.test_cli import cli
from tests.rag.conftest import documents, retriever, router, source, world
from tests.rag.test_generator import DONE, chat_event, serve, stream
from tests.rag.test_pipelines import ANSWERS, QUESTION, SAID
from tests.rag.world import DIM, embedder, replay
from tests.rag.world import documents as all_documents

__all__ = ["cli", "documents", "retriever", "router", "serve", "source", "world"]


@pytest.fixture
def index(world, monkeypatch):
    """The index directory with a store whose embedder is the demo's by name, and a small one in its place."""
    index, _, mean = world
    write_documents(
        index.path / "documents.sqlite", all_documents(), index_fingerprint=index.fingerprint, embedder=EMBEDDER,
        dim=DIM, mean=mean, token_starts=embedder().token_starts,
    )  # fmt: skip
    monkeypatch.setattr(embed, "load_embedder", lambda _folder: embedder())
    return index.path


@pytest.fixture
def trace(tmp_path, retriever):
    path = tmp_path / "trace.jsonl"
    with TraceWriter(path, model="recorded") as writer:
        for name in PIPELINES:
            writer.append(run_pipeline(name, QUESTION, retriever, replay(*SAID[name])))
    return path


def test_a_trace_is_asked_again(cli, index, trace, tmp_path):
    again = tmp_path / "again.jsonl"
    shown = cli("chat", index, "--replay", trace, "--speed", "inf", "-k", 3, "--record", again)
    assert shown.code == 0, shown.err
    for name in PIPELINES:
        assert ANSWERS[name] in shown.out
        assert f"{name}:" in shown.out
    assert "stars" in shown.out
    before, after = list(read_traces(trace)), list(read_traces(again))
    assert [run.pipeline for run in after] == [run.pipeline for run in before]
    assert [[g.prompt_sha256 for g in run.generations] for run in after] == [
        [g.prompt_sha256 for g in run.generations] for run in before
    ]


def test_a_server_is_asked(cli, index, serve):
    left = ["a moon of dust", "An orbit [bold]."]
    server = serve(lambda h, _: stream(h, chat_event(left.pop(0)), chat_event("", finish="stop"), DONE))
    words = ["--llm", server.url, "--model", "m", "--question", QUESTION, "--json"]
    answer = cli("chat", index, *words, "--device", "cpu", "--budget", "16MiB", "--plan", "none").json
    assert answer["answer"] == "An orbit [bold]."
    assert answer["pipeline"] == "hyde"
    assert {p["source"] for p in answer["passages"]} == {"stars"}
    assert len(answer["passages"]) == 5
    assert answer["lookaheads"] == 1


def test_a_conversation_goes_on_after_its_first_answer(cli, index, serve, monkeypatch):
    said = ["draft", "first [x]", "draft", "second"]
    typed = iter([QUESTION, "", "what is a reef"])

    def answer(handler, _):
        stream(handler, chat_event(said.pop(0)), chat_event("", finish="stop"), DONE)

    def read(*_args, **_kwargs):
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("hybridindex.cli.console.out.input", read)
    shown = cli("chat", index, "--llm", serve(answer).url, "--model", "m")
    assert shown.code == 0, shown.err
    assert "first [x]" in shown.out
    assert shown.out.index("first") < shown.out.index("second")


def test_a_conversation_outlives_a_server_that_fails(cli, index, serve, monkeypatch):
    typed = iter([QUESTION, QUESTION])
    lines = [[b"busy\n"], *[[chat_event(text), chat_event("", finish="stop"), DONE] for text in ("draft", "there")]]

    def read(*_args, **_kwargs):
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("hybridindex.cli.console.out.input", read)
    shown = cli("chat", index, "--llm", serve(lambda h, _: stream(h, *lines.pop(0))).url, "--model", "m")
    assert shown.code == 0, shown.err
    assert "no event stream" in shown.err
    assert "there" in shown.out


def test_piperag_is_a_pipeline_here(cli, index, serve):
    def answer(handler, _):
        stream(handler, {"choices": [{"text": "It is.", "finish_reason": "stop"}]}, DONE)

    found = cli(
        "chat", index, "--llm", serve(answer).url, "--model", "m", "-q", QUESTION, "--pipeline", "piperag", "--json"
    )
    assert found.json["answer"] == "It is."
    assert found.json["pipeline"] == "piperag_pipelined"


@pytest.mark.parametrize(
    ("words", "code", "complaint"),
    [
        (["--llm", "http://127.0.0.1:9", "--model", "m", "-q", "x"], ExitCode.SERVICE, "no answer from"),
        (["--llm", "http://127.0.0.1:9", "-q", "x"], ExitCode.SERVICE, "no answer from"),
        (["--llm", "ftp://x", "-q", "x"], ExitCode.BAD_INPUT, "url is"),
        (["--llm", "http://x", "--mode", "loud", "-q", "x"], ExitCode.BAD_INPUT, "mode is"),
        (["--llm", "http://x", "--pipeline", "other"], ExitCode.BAD_INPUT, "--pipeline is 'other'"),
        (["--llm", "http://x", "--json"], ExitCode.BAD_INPUT, "nobody is there to ask"),
        ([], ExitCode.BAD_INPUT, "--llm or --replay"),
        (["--replay", "nowhere"], ExitCode.BAD_INPUT, "cannot be read"),
        (["--llm", "http://x", "--documents", "nowhere"], ExitCode.BAD_INDEX, "does not exist"),
    ],
)
def test_what_went_wrong_is_one_line(cli, index, words, code, complaint):
    found = cli("chat", index, *words)
    assert found.code == code
    assert complaint in found.err


def test_texts_of_another_index_or_embedder_are_refused(cli, index, world, tmp_path):
    for name, facts, complaint in (
        ("other", {"index_fingerprint": "other", "embedder": EMBEDDER}, "belongs to index other"),
        ("foreign", {"index_fingerprint": world[0].fingerprint, "embedder": "mine"}, "embedded by 'mine'"),
    ):
        write_documents(tmp_path / name, [], dim=DIM, **facts)
        found = cli("chat", index, "--llm", "http://x", "--documents", tmp_path / name, "-q", "x")
        assert found.code in (ExitCode.BAD_INDEX, ExitCode.MISSING)
        assert complaint in found.err


def test_ctrl_c_ends_an_answer_and_its_session(cli, index, serve, monkeypatch):
    """In the middle of the first answer; the conversation goes on."""
    typed = iter([QUESTION])

    def read(*_args, **_kwargs):
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    ended = []

    class Interrupted(Steps):
        def generate(self, *_args, **_kwargs):
            raise KeyboardInterrupt

        def __exit__(self, *error):
            super().__exit__(*error)
            ended.append(self._session is None)

    monkeypatch.setattr("hybridindex.cli.console.out.input", read)
    monkeypatch.setattr(commands_chat, "Steps", Interrupted)
    shown = cli("chat", index, "--llm", "http://127.0.0.1:9", "--model", "m")
    assert shown.code == 0
    assert "session is closed" in shown.err
    assert ended == [True]


def test_brackets_in_passages_are_shown(capsys):
    passage = Passage(id=1, score=0.5, text="[/b] " + "x" * 500, source="[red]")
    answer = Answer(pipeline="p", question="q", text="", passages=(passage,), events=(), seconds=1.0)
    console = Console(width=400)
    console.print(commands_chat._table(answer))
    shown = capsys.readouterr().out
    assert "[/b] xxx" in shown
    assert "[red]" in shown
    assert "x" * 200 not in shown
