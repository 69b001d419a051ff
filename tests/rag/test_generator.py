"""The generator against servers on loopback: good ones of both interfaces, and every kind of bad one."""

from __future__ import annotations

import itertools
import json
import math
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hybridindex.errors import GenerationError, InvalidInputError
from hybridindex.llm.events import MAX_LINE_BYTES
from hybridindex.rag.generator import Finished, OpenAIGenerator, Prompt, Sampling
from hybridindex.rag.pipelines import run_pipeline
from tests.rag.test_pipelines import QUESTION, SAID

PROMPT = Prompt(name="answer", text="what", max_tokens=9, stop=("\n",), logprobs=True)


class Server:
    """Answers every POST with ``answer(handler, body)``, a GET with ``listed(handler)``; remembers what was posted."""

    def __init__(self, answer, listed=None):
        self.asked = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.asked.append((self.path, body, dict(self.headers)))
                try:
                    answer(self, body)
                except (BrokenPipeError, ConnectionResetError):
                    outer.left.set()

            def do_GET(self):
                if listed is None:
                    self.send_error(501)
                else:
                    listed(self)

            def log_message(self, *_):
                pass

        self.left = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def serve():
    made = []

    def start(answer, listed=None):
        made.append(Server(answer, listed))
        return made[-1]

    yield start
    for server in made:
        server.close()


def stream(handler, *lines, status=200, headers=()):
    handler.send_response(status)
    handler.send_header("content-type", "text/event-stream")
    for name, value in headers:
        handler.send_header(name, value)
    handler.end_headers()
    for line in lines:
        handler.wfile.write(line if isinstance(line, bytes) else f"data: {json.dumps(line)}\n\n".encode())
        handler.wfile.flush()


def models(*names):
    """Lists these."""
    return lambda handler: stream(handler, json.dumps({"data": [{"id": name} for name in names]}).encode())


def never(_handler, _body):
    raise AssertionError("nothing was to be generated")


def chat_event(text, logprob=-0.5, finish=None):
    logprobs = {"content": [{"token": text, "logprob": logprob}]}
    return {"choices": [{"index": 0, "delta": {"content": text}, "logprobs": logprobs, "finish_reason": finish}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 12, "completion_tokens": 2}}
DONE = b"data: [DONE]\n\n"


def collect(url, prompt=PROMPT, **options):
    with OpenAIGenerator(url, model="m", **options) as generator:
        *pieces, finished = list(generator.generate(prompt))
    assert isinstance(finished, Finished)
    return pieces, finished


def test_a_chat_is_streamed(serve):
    first = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    server = serve(
        lambda h, _: stream(h, first, b": ping\r\n\r\n", chat_event("Hel"), chat_event("lo", -2.0, "stop"), USAGE, DONE)
    )
    pieces, finished = collect(server.url + "/v1/", key="secret")
    assert [p.text for p in pieces] == ["Hel", "lo"]
    assert [p.logprobs for p in pieces] == [(-0.5,), (-2.0,)]
    assert 0 < pieces[0].at_s <= pieces[1].at_s
    assert finished == Finished(reason="stop", prompt_tokens=12, completion_tokens=2)
    path, body, headers = server.asked[0]
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "what"}]
    assert (body["max_tokens"], body["stop"], body["logprobs"], body["temperature"]) == (9, ["\n"], True, 0.0)
    assert headers["authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    "usage", [None, 5, {}, {"prompt_tokens": "many"}, {"prompt_tokens": -1}, {"prompt_tokens": True}]
)
def test_counts_that_are_none_count_nothing(serve, usage):
    server = serve(lambda h, _: stream(h, {**chat_event("x", finish="stop"), "usage": usage}, DONE))
    assert collect(server.url)[1].prompt_tokens == 0


def test_a_completion_is_streamed(serve):
    event = {"choices": [{"text": " word", "finish_reason": "length", "logprobs": {"token_logprobs": [-1.0, -2.0]}}]}
    server = serve(lambda h, _: stream(h, event, DONE))
    pieces, finished = collect(
        server.url, mode="completions", sampling=Sampling(temperature=0.5, seed=None, extra={"ignore_eos": True})
    )
    assert [(p.text, p.tokens, p.logprobs) for p in pieces] == [(" word", 2, (-1.0, -2.0))]
    assert finished.reason == "length"
    assert server.asked[0][0] == "/v1/completions"
    assert server.asked[0][1]["prompt"] == "what"
    assert server.asked[0][1]["ignore_eos"] is True
    assert server.asked[0][1]["temperature"] == 0.5
    assert "seed" not in server.asked[0][1]


def test_what_goes_on_where_a_text_ends_is_never_a_chat(serve):
    server = serve(lambda h, _: stream(h, {"choices": [{"text": "x", "finish_reason": "stop"}]}, DONE))
    collect(server.url, Prompt(name="n", text="t", max_tokens=1, append=True), mode="chat")
    assert server.asked[0][0] == "/v1/completions"


def test_a_pipeline_talks_to_a_server(serve, retriever):
    """The recorded answers, spoken by a server."""
    left = [said.text for said in SAID["hyde"]]
    server = serve(lambda h, _: stream(h, chat_event(left.pop(0)), chat_event("", finish="stop"), DONE))
    with OpenAIGenerator(server.url, model="m") as generator:
        answer = run_pipeline("hyde", QUESTION, retriever, generator)
    assert answer.text == "dust and light"
    assert answer.passages[0].text in server.asked[1][1]["messages"][0]["content"]


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([b"<html>busy</html>\n"], "not an event stream"),
        ([b"data: {nonsense\n\n"], "not a JSON object"),
        ([b"data: 5\n\n"], "not a JSON object"),
        ([b"data: " + b"[" * 100_000 + b"\n\n"], "not a JSON object"),
        ([b"data: {}\n\n"], "expected an object with choices"),
        ([{"choices": [5]}], "expected an object"),
        ([{"choices": [{"delta": {"content": 5}}]}], "expected a string"),
        ([{"choices": [{"delta": {}, "logprobs": {"content": [{}]}}]}], "probabilities that cannot be read"),
        ([{"error": {"message": "out of memory"}}], "gave up: .*out of memory"),
        ([chat_event("half")], "ended its answer before it was finished"),
        ([b"data: " + b"x" * (MAX_LINE_BYTES + 9)], "a line of the answer is longer"),
    ],
)
def test_garbage_is_an_error_that_shows_it(serve, lines, complaint):
    server = serve(lambda h, _: stream(h, *lines))
    with pytest.raises(GenerationError, match=complaint):
        collect(server.url)


def test_refusals_say_why(serve):
    server = serve(lambda h, _: stream(h, b'{"error": "no such   model"}' + b"x" * 5000, status=404))
    with pytest.raises(GenerationError, match=r"is not there \(status 404\): .*no such model") as caught:
        collect(server.url)
    assert len(str(caught.value)) < 500
    server = serve(lambda h, _: stream(h, status=302, headers=[("location", "http://127.0.0.1:1/")]))
    with pytest.raises(GenerationError, match=r"failed \(status 302\): nothing more"):
        collect(server.url)
    server = serve(lambda h, _: stream(h, status=200, headers=[("content-encoding", "gzip")]))
    with pytest.raises(GenerationError, match="compressed"):
        collect(server.url)


def test_the_model_is_one_that_is_served(serve):
    with OpenAIGenerator(serve(never, models("a")).url) as generator:
        assert generator.ready() == generator.model == "a"
    url = serve(never, models("a", "b\x1b")).url
    with OpenAIGenerator(url, model="a") as generator:
        assert generator.ready() == "a"
    with OpenAIGenerator(url) as generator:
        for ask in (generator.ready, lambda: generator.model, lambda: list(generator.generate(PROMPT))):
            with pytest.raises(InvalidInputError, match=r"model is missing; http\S+ serves 'a', 'b': name one"):
                ask()
    with (
        OpenAIGenerator(url, model="c") as generator,
        pytest.raises(GenerationError, match=r"serves 'a', 'b', not 'c'$"),
    ):
        generator.ready()
    with OpenAIGenerator(serve(never, models()).url) as generator, pytest.raises(GenerationError, match=r"no model$"):
        generator.ready()
    with (
        OpenAIGenerator(serve(never, models(*map(str, range(20)))).url) as generator,
        pytest.raises(InvalidInputError, match=r"'0', .*, '11' and 8 more: name"),
    ):
        generator.ready()


def test_a_server_without_a_list_serves_what_was_named(serve):
    server = serve(never)
    with OpenAIGenerator(server.url, model="m") as generator:
        assert generator.ready() == "m"
    with OpenAIGenerator(server.url) as generator, pytest.raises(GenerationError, match="status 501"):
        generator.ready()


def test_a_server_that_loads_is_waited_for(serve):
    states = [503, 503, 200]
    error = b'{"error": {"message": "Loading model", "code": 503}}'

    def listed(handler):
        status = states.pop(0)
        if status == 200:
            models("a")(handler)
        else:
            stream(handler, error, status=status)

    server = serve(never, listed)
    with OpenAIGenerator(server.url, clock=lambda: 0.0) as generator:
        with pytest.raises(
            GenerationError, match=r"/v1/models is loading .* \(status 503\): 'Loading model'$"
        ) as caught:
            generator.ready()
        assert caught.value.status == 503
        assert generator.ready(0.01) == "a"
    assert states == []


@pytest.mark.parametrize("page", [b"<!doctype html><html>\n", b"{}", b"[1]", b'{"data": [5]}', b"[" * 100_000])
def test_what_is_no_list_of_models_is_shown(serve, page):
    with (
        OpenAIGenerator(serve(never, lambda handler: stream(handler, page)).url) as generator,
        pytest.raises(GenerationError, match=r"/v1/models lists no models: .*; expected the address of") as caught,
    ):
        generator.ready()
    assert "Error(" not in str(caught.value)


def test_a_list_without_end_is_cut_off(serve):
    with (
        OpenAIGenerator(serve(never, lambda handler: stream(handler, *[b"x" * (1 << 20)] * 9)).url) as generator,
        pytest.raises(GenerationError, match="where 8388608 are allowed"),
    ):
        generator.ready()


def test_a_model_without_a_chat_template_is_told_what_to_do(serve):
    said = {"error": {"message": "default chat template is no longer allowed", "code": 400}}
    server = serve(lambda h, _: stream(h, json.dumps(said).encode(), status=400))
    with pytest.raises(GenerationError, match=r"'default chat .* allowed'; .*--mode completions") as caught:
        collect(server.url)
    assert "{" not in str(caught.value)
    with pytest.raises(GenerationError, match=r"allowed'$"):
        collect(server.url, mode="completions")


def test_a_server_that_is_down():
    with pytest.raises(GenerationError, match=r"no answer from http://127\.0\.0\.1:9") as caught:
        collect("http://127.0.0.1:9")
    assert caught.value.status == 0


def test_a_silent_server_is_left(serve):
    over = threading.Event()
    server = serve(lambda h, _: (stream(h, chat_event("a")), over.wait(300)))
    with pytest.raises(GenerationError, match=r"silent for more than 0\.05 s"):
        collect(server.url, idle_s=0.05)
    over.set()


def test_a_slow_server_is_left(serve):
    ticks = itertools.count(0, 10)
    server = serve(lambda h, _: stream(h, *[chat_event("a")] * 50))
    with pytest.raises(GenerationError, match="longer than 5 s"):
        collect(server.url, timeout_s=5, clock=lambda: float(next(ticks)))


def test_a_connection_that_breaks(serve):
    def cut(handler, _):
        handler.send_response(200)
        handler.send_header("content-length", "1000")
        handler.end_headers()
        handler.wfile.write(b"data: ")

    with pytest.raises(GenerationError, match=r"http\S+ broke off during its answer \("):
        collect(serve(cut).url)
    with pytest.raises(GenerationError, match=r"no answer from http\S+ \("):
        collect(serve(lambda h, _: h.wfile.write(b"no HTTP\r\n\r\n")).url)


def test_whoever_stops_reading_hangs_up(serve):
    def endless(handler, _):
        stream(handler)
        while True:
            stream_line = f"data: {json.dumps(chat_event('more'))}\n\n".encode()
            handler.wfile.write(stream_line)

    server = serve(endless)
    with OpenAIGenerator(server.url, model="m") as generator:
        parts = generator.generate(PROMPT)
        next(parts)
        parts.close()
        assert server.left.wait(300), "the server notices that nobody reads"


def echo(handler, body):
    """As vLLM echoes: offsets and probabilities of the prompt, and one more token."""
    words, offsets, place = body["prompt"].split(" "), [], 0
    for word in words:
        offsets.append(max(0, place - 1))
        place += len(word) + 1
    found = {
        "text_offset": [*offsets, len(body["prompt"])],
        "token_logprobs": [None, *(-float(len(word)) for word in words[1:]), -9.0],
    }
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(json.dumps({"choices": [{"text": "", "logprobs": found}]}).encode())


def test_a_text_is_scored_after_its_prompt(serve):
    server = serve(echo)
    with OpenAIGenerator(server.url, model="m") as generator:
        assert generator.score("one two", " three four") == (-5.0, -4.0)
    assert server.asked[0][1]["echo"] is True


@pytest.mark.parametrize(
    "answer", [b"", b"{}", b'{"choices": [{"logprobs": null}]}', b'{"choices": []}', b"[" * 100_000]
)
def test_servers_that_do_not_echo(serve, answer):
    server = serve(lambda h, _: (h.send_response(200), h.end_headers(), h.wfile.write(answer)))
    with OpenAIGenerator(server.url, model="m") as generator, pytest.raises(GenerationError, match="no probabilities"):
        generator.score("one", " two")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"url": "ftp://x"}, "url is"),
        ({"mode": "other"}, "mode is"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"idle_s": math.inf}, "idle_s is inf"),
    ],
)
def test_wrong_arguments(options, field):
    with pytest.raises(InvalidInputError, match=field):
        OpenAIGenerator(**{"url": "http://x", "model": "m", **options})
    with pytest.raises(InvalidInputError, match="max_tokens"):
        Prompt(name="n", text="x", max_tokens=0)
    with pytest.raises(InvalidInputError, match="0 characters"):
        Prompt(name="n", text="", max_tokens=1)


@pytest.mark.parametrize("begun", [True, False], ids=["after some text", "before anything"])
@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "until it closes"])
def test_a_server_that_falls_silent_late_is_left_at_the_limit_of_the_whole(serve, begun, chunked):
    """And not after another ``idle_s``; the message says which limit it was."""
    over = threading.Event()

    def answer(handler, _):
        if chunked:
            handler.protocol_version = "HTTP/1.1"
        handler.send_response(200)
        if chunked:
            handler.send_header("transfer-encoding", "chunked")
        handler.end_headers()
        if begun:
            data = f"data: {json.dumps(chat_event('one'))}\n\n".encode()
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(data), data) if chunked else data)
            handler.wfile.flush()
        over.wait(20)

    server = serve(answer)
    began = time.monotonic()
    try:
        with pytest.raises(GenerationError, match=r"longer than 0\.5 s for one generation"):
            collect(server.url, timeout_s=0.5, idle_s=15.0)
        assert time.monotonic() - began < 5
    finally:
        over.set()


def test_a_server_that_says_nothing_at_all_is_left_at_the_nearer_limit(serve):
    over = threading.Event()
    server = serve(lambda *_: over.wait(20))
    try:
        for limits, complaint in (
            ({"timeout_s": 0.2, "idle_s": 15.0}, r"longer than 0\.2 s for one generation"),
            ({"timeout_s": 15.0, "idle_s": 0.2}, r"silent for more than 0\.2 s"),
        ):
            began = time.monotonic()
            with pytest.raises(GenerationError, match=complaint):
                collect(server.url, **limits)
            assert time.monotonic() - began < 5
    finally:
        over.set()


@pytest.mark.parametrize(
    ("limits", "complaint"),
    [
        ({"timeout_s": 0.6, "idle_s": 0.5}, r"silent for more than 0\.5 s"),
        ({"timeout_s": 0.5, "idle_s": 15.0}, r"longer than 0\.5 s for one generation"),
    ],
)
def test_a_server_whose_head_trickles_is_left(serve, limits, complaint):
    """A byte now and then is no answer."""
    over = threading.Event()

    def trickle(handler, _):
        for each in b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n":
            if over.wait(0.1):
                return
            handler.wfile.write(bytes([each]))

    server = serve(trickle)
    began = time.monotonic()
    try:
        with pytest.raises(GenerationError, match=complaint):
            collect(server.url, **limits)
        assert time.monotonic() - began < 5
    finally:
        over.set()


def test_silences_within_an_answer_count_one_by_one(serve):
    """Together they are longer than ``idle_s``."""

    def answer(handler, _):
        stream(handler)
        for said in [chat_event("a")] * 6 + [chat_event("b", finish="stop")]:
            time.sleep(0.25)
            handler.wfile.write(f"data: {json.dumps(said)}\n\n".encode())
            handler.wfile.flush()
        handler.wfile.write(DONE)

    pieces, _ = collect(serve(answer).url, idle_s=1.2, timeout_s=60.0)
    assert [piece.text for piece in pieces] == [*"aaaaaab"]


def test_a_generation_that_ends_in_time_leaves_no_timer(serve):
    server = serve(lambda h, _: stream(h, chat_event("x", finish="stop"), DONE))
    collect(server.url, timeout_s=60.0)
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(10)
            assert not thread.is_alive()
