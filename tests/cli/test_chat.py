"""chat: questions, streamed answers, passages, records and replays, and one clear line for what went wrong."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from hybridindex.cli.chat_parts import settings_of
from hybridindex.cli.commands import chat as commands_chat
from hybridindex.cli.console import ExitCode
from hybridindex.rag import embed
from hybridindex.rag.documents import DocumentStore, write_documents
from hybridindex.rag.embed import EMBEDDER
from hybridindex.rag.periodic import PeriodicRetrieval
from hybridindex.rag.pipelines import PIPELINES, run_pipeline
from hybridindex.rag.records import Answer, Passage
from hybridindex.rag.shift import shift_passage
from hybridindex.rag.steps import Steps
from hybridindex.rag.trace import TraceWriter, read_traces
from tests.rag.conftest import documents, retriever, router, source, world
from tests.rag.test_generator import DONE, chat_event, models, never, serve, stream
from tests.rag.test_pipelines import ANSWERS, QUESTION, SAID
from tests.rag.test_tokens import Subwords
from tests.rag.world import DIM, embedder, replay, spoken
from tests.rag.world import documents as all_documents

__all__ = ["documents", "retriever", "router", "serve", "source", "world"]


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


@pytest.mark.parametrize("plan", ["none", "latest", "current"])
def test_a_chat_needs_no_control_store(cli, index, serve, tmp_path, plan):
    server = serve(lambda h, _: stream(h, chat_event("dust"), chat_event("", finish="stop"), DONE))
    damaged = tmp_path / "damaged.sqlite"
    damaged.write_bytes(b"no database" * 1000)
    words = ["--llm", server.url, "--model", "m", "--question", QUESTION, "--pipeline", "plain", "--json"]
    answer = cli("chat", index, *words, "--plan", plan, "--store", damaged)
    assert answer.code == 0, answer.err
    assert answer.json["answer"] == "dust"
    assert "the LLM's measured speed is unknown: control store" in answer.err
    assert ("no plan: the host searches" in answer.err) == (plan != "none")


def test_a_chat_says_that_it_does_not_refresh(cli, index, serve, tmp_path):
    server = serve(lambda h, _: stream(h, chat_event("dust"), chat_event("", finish="stop"), DONE))
    file = tmp_path / "s.toml"
    file.write_text("[refresh]\n")
    words = ["--llm", server.url, "--model", "m", "--question", QUESTION, "--pipeline", "plain"]
    answer = cli("chat", index, *words, "--config", file)
    assert answer.code == 0, answer.err
    assert "the settings file has [refresh]" in answer.err
    assert "refresh" not in cli("chat", index, *words).err


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
    assert "not an event stream" in shown.err
    assert "there" in shown.out


def test_piperag_is_a_pipeline_here(cli, index, serve):
    def answer(handler, _):
        stream(handler, {"choices": [{"text": "It is.", "finish_reason": "stop"}]}, DONE)

    found = cli(
        "chat", index, "--llm", serve(answer).url, "--model", "m", "-q", QUESTION, "--pipeline", "piperag", "--json"
    )
    assert found.json["answer"] == "It is."
    assert found.json["pipeline"] == "piperag_pipelined"


@pytest.fixture
def letters(index, world, monkeypatch):
    """The same store with letters for tokens."""
    path = index / "letters.sqlite"
    write_documents(
        path, all_documents(), index_fingerprint=world[0].fingerprint, embedder=EMBEDDER, dim=DIM, mean=world[2],
        token_starts=Subwords().token_starts, tokenizer="letters",
    )  # fmt: skip
    yield path
    path.unlink()


def chunks(left):
    def answer(handler, _):
        reason = "length" if len(left) > 1 else "stop"
        stream(handler, {"choices": [{"text": left.pop(0), "finish_reason": reason}]}, DONE)

    return answer


def test_piperag_shifts_by_the_tokens_of_the_store(cli, index, letters, serve, monkeypatch):
    monkeypatch.setattr(embed, "load_embedder", lambda _folder: Subwords())
    server = serve(chunks(["oak beech", " wave tide", " comet"]))
    found = cli(
        "chat", index, "--llm", server.url, "--model", "m", "-q", QUESTION, "--pipeline", "piperag", "--json",
        "--documents", letters, "--interval", 2, "--max-tokens", 9, "--min-nprobe", 2,
    )  # fmt: skip
    assert found.json["answer"] == "oak beech wave tide comet", found.err
    asked = [body for _, body, _ in server.asked]
    assert [body["max_tokens"] for body in asked] == [2, 2, 2]
    first = found.json["passages"][0]["id"]
    with DocumentStore(letters) as store:
        assert shift_passage(store, first, len("oakbeech")) in asked[1]["prompt"]


def test_piperag_of_other_tokens_is_refused_before_anybody_asks(cli, index, letters):
    found = cli("chat", index, "--llm", "http://127.0.0.1:9", "--pipeline", "piperag", "--documents", letters)
    assert found.code == ExitCode.BAD_INPUT
    assert "of 'letters'" in found.err


def test_a_recorded_piperag_is_replayed_with_its_own_settings(cli, index, serve, tmp_path):
    words = ["--pipeline", "piperag", "--interval", 2, "--max-tokens", 4, "--record", tmp_path / "t", "-q", QUESTION]
    said = cli("chat", index, "--llm", serve(chunks(["oak", " tide", ""])).url, "--model", "m", "--json", *words)
    assert said.json["answer"] == "oak tide", said.err
    again = cli("chat", index, "--replay", tmp_path / "t", "--speed", "inf", "--json")
    assert again.json["answer"] == "oak tide", again.err


def test_an_error_after_a_part_of_an_answer_has_a_line_of_its_own(cli, index, serve):
    left = [chat_event("draft", finish="stop"), chat_event("a half")]
    server = serve(lambda h, _: stream(h, left.pop(0), DONE))
    found = cli("chat", index, "--llm", server.url, "--model", "m", "-q", QUESTION)
    assert found.out == "a half\n"
    assert "before it was finished" in found.err


def test_settings_are_those_given_then_those_recorded():
    none = {"interval": None, "max_tokens": None, "min_nprobe": None}
    assert settings_of(none) == PeriodicRetrieval()
    cut = spoken("chunk", "a", finish="length")
    found = settings_of({**none, "min_nprobe": 3}, (cut, cut))
    assert (found.interval, found.max_tokens, found.min_nprobe) == (64, 128, 3)
    ended = settings_of({**none, "interval": 5}, (cut, spoken("chunk", "a")))
    assert (ended.interval, ended.max_tokens) == (5, 256)


@pytest.mark.parametrize(
    ("listed", "words", "code", "complaint"),
    [
        (models("a", "b"), ["--model", "c"], ExitCode.SERVICE, "serves 'a', 'b', not 'c'"),
        (models("a", "b"), [], ExitCode.BAD_INPUT, "serves 'a', 'b': name one"),
        (lambda h: stream(h, b"<html>hello"), [], ExitCode.SERVICE, "lists no models: '<html>hello'; expected the"),
        (lambda h: stream(h, b"{}", status=503), [], ExitCode.SERVICE, "is loading or overloaded (status 503)"),
        (lambda h: stream(h, b"{}", status=503), ["--wait", "0.01"], ExitCode.SERVICE, "(waited 0.01 s)"),
        (lambda h: stream(h, b"", status=401), [], ExitCode.SERVICE, "asks for another API key"),
    ],
)
def test_an_llm_that_is_not_there_as_asked(cli, index, serve, listed, words, code, complaint):
    """Found out before anything is asked."""
    found = cli("chat", index, "--llm", serve(never, listed).url, *words)
    assert found.code == code
    assert complaint in found.err
    assert "{" not in found.err or "'{}'" in found.err


def test_a_server_that_loads_is_waited_for(cli, index, serve):
    states = [503, 200]

    def listed(handler):
        (lambda h: stream(h, b"", status=503))(handler) if states.pop(0) == 503 else models("m")(handler)

    server = serve(chunks(["It is."]), listed)
    words = ["-q", QUESTION, "--pipeline", "piperag", "--json", "--wait", 5]
    assert cli("chat", index, "--llm", server.url, *words).json["answer"] == "It is."


def test_a_silent_server_has_the_time_it_is_given(cli, index, serve):
    over = threading.Event()
    server = serve(lambda h, _: (stream(h), over.wait(300)))
    words = ["--llm", server.url, "--model", "m", "-q", QUESTION]
    found = cli("chat", index, *words, "--llm-timeout", "0.05")
    over.set()
    assert found.code == ExitCode.SERVICE
    assert "was silent for more than 0.05 s" in found.err


@pytest.mark.parametrize(
    ("words", "code", "complaint"),
    [
        (["--llm", "http://127.0.0.1:9", "--model", "m", "-q", "x"], ExitCode.SERVICE, "--wait SECONDS waits"),
        (
            ["--llm", "http://x", "--min-nprobe", "2", "--interval", "8"],
            ExitCode.BAD_INPUT,
            "--interval, --min-nprobe: ",
        ),
        (["--llm", "http://x", "--llm-timeout", "0", "-q", "x"], ExitCode.BAD_INPUT, "timeout_s is 0.0"),
        (["--llm", "http://127.0.0.1:9", "-q", "x"], ExitCode.SERVICE, "no answer from"),
        (["--llm", "ftp://x", "-q", "x"], ExitCode.BAD_INPUT, "url is"),
        (["--llm", "http://x", "--mode", "loud", "-q", "x"], ExitCode.BAD_INPUT, "mode is"),
        (["--llm", "http://x", "--pipeline", "other"], ExitCode.BAD_INPUT, "--pipeline is 'other'"),
        (["--llm", "http://x", "--json"], ExitCode.BAD_INPUT, "--json requires --question or --replay"),
        ([], ExitCode.BAD_INPUT, "exactly one of --llm and --replay"),
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


def interrupted_by(act, ended):
    """Steps whose first generation is interrupted; they note whether their session was closed."""

    class Interrupted(Steps):
        def generate(self, *_args, **_kwargs):
            act()

        def __exit__(self, *error):
            super().__exit__(*error)
            ended.append(self._session is None)

    return Interrupted


def test_sigterm_ends_the_chat_and_its_session(cli, index, serve, monkeypatch):
    """The conversation, too: the second question is not asked."""
    typed, ended = [QUESTION, QUESTION], []
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("hybridindex.cli.console.out.input", lambda *_: typed.pop(0))
    monkeypatch.setattr(commands_chat, "Steps", interrupted_by(lambda: os.kill(os.getpid(), signal.SIGTERM), ended))
    shown = cli("chat", index, "--llm", serve(never).url, "--model", "m")
    assert shown.code == ExitCode.INTERRUPTED
    assert "interrupted" in shown.err
    assert (ended, typed) == ([True], [QUESTION])
    assert signal.getsignal(signal.SIGTERM) is before


def test_ctrl_c_ends_an_answer_and_its_session(cli, index, serve, monkeypatch):
    """In the middle of the first answer; the conversation goes on."""
    typed = iter([QUESTION])

    def read(*_args, **_kwargs):
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    ended = []

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr("hybridindex.cli.console.out.input", read)
    monkeypatch.setattr(commands_chat, "Steps", interrupted_by(interrupt, ended))
    shown = cli("chat", index, "--llm", serve(never).url, "--model", "m")
    assert shown.code == 0
    assert "session is closed" in shown.err
    assert ended == [True]


def test_brackets_in_passages_are_shown(printed):
    passage = Passage(id=1, score=0.5, text="[/b] " + "x" * 500, source="[red]")
    answer = Answer(pipeline="p", question="q", text="", passages=(passage,), events=(), seconds=1.0)
    shown = printed(commands_chat._table(answer))
    assert "[/b] xxx" in shown
    assert "[red]" in shown
    assert "x" * 200 not in shown
