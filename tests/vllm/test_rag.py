"""RAG on a real vLLM: the six pipelines, PipeRAG and its likelihoods, searched in this process and in vLLM's.

The model's weights are random: what it says is chosen from words of the texts, so that it can be searched. What goes
wrong is in ``test_rag_ends.py``, the command in ``test_chat.py``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.rag.answer_quality import Likelihood, answer_likelihood, periodic_likelihood
from hybridindex.rag.documents import DocumentStore
from hybridindex.rag.generator import Finished, Prompt
from hybridindex.rag.periodic import PeriodicRetrieval, Schedule
from hybridindex.rag.pipelines import run_pipeline
from hybridindex.rag.pipelines.flare import flare
from hybridindex.rag.prompts import answer_prompt
from hybridindex.rag.records import Answer, Generated, LookedAhead, Retrieved
from hybridindex.rag.steps import Steps
from hybridindex.rag.trace import ReplayGenerator, TraceWriter, read_traces
from tests.rag.test_pipelines import short
from tests.vllm.conftest import NPROBE
from tests.vllm.server import Served
from tests.vllm.sides import QUESTION, Side, Speaker

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="not verified: no vLLM here; make test-vllm"),
    pytest.mark.timeout(900),
]

#: Of one logarithm: vLLM computes in bfloat16.
NOISE = 0.1
REFERENCE = " comet orbit moon dust galaxy nova planet light lens eclipse nova tide reef salt wave oak beech flour"
Exact = Callable[[str, str], list[float]]

#: Short ones, and FLARE looks up whatever is written.
OPTIONS = {
    "hyde": {"draft_tokens": 16, "answer_tokens": 8},
    "sub_question": {"list_tokens": 24, "answer_tokens": 8},
    "iterative": {"rounds": 2, "question_tokens": 12, "answer_tokens": 8},
    "iter_retgen": {"rounds": 2, "answer_tokens": 12},
    "flare": {"sentences": 2, "sentence_tokens": 16, "threshold": 1.0},
    "self_rag": {"candidates": 2, "answer_tokens": 8},
}
STEPS = {
    "hyde": ["L question", "G hypothesis", "R hypothesis", "G answer"],
    "sub_question": ["L question", "G sub_questions", "R sub_questions", "G answer"],
    "iterative": [
        "L question", "G narrow", "R narrow", "G answer", "L round", "G judge", "G narrow", "R narrow", "G answer",
        "G final",
    ],
    "iter_retgen": ["R round", "L round", "G answer", "R round", "G answer"],
    "flare": ["L sentence", "G tentative", "R sentence", "G sentence"] * 2,
    "self_rag": ["L question", "G decide", "R question", *["G answer", "G critique"] * 2],
}  # fmt: skip


def events_of(answer: Answer, kind: type) -> list:
    return [event for event in answer.events if isinstance(event, kind)]


def check_generations(speaker: Speaker, generations: list[Generated]) -> None:
    """Times, and counts of tokens by the model's own tokenizer."""
    assert len(generations) == len(speaker.asked)
    for prompt, done in zip(speaker.asked, generations, strict=True):
        assert done.prompt_sha256 == hashlib.sha256(prompt.text.encode()).hexdigest()
        assert done.prompt_tokens == speaker.count(speaker.seen(prompt))
        assert 0 < done.completion_tokens <= done.max_tokens == prompt.max_tokens
        assert done.finish == "length" or (done.finish == "stop" and prompt.stop)
        assert done.finish == "stop" or done.completion_tokens == done.max_tokens
        times = [piece.at_s for piece in done.pieces]
        assert times == sorted(times)
        assert 0 < done.first_token_s <= times[-1] <= done.seconds
        values = [value for piece in done.pieces for value in piece.logprobs]
        if prompt.logprobs:
            assert len(values) == done.completion_tokens
            assert max(values) < 0
        else:
            assert values == []
            # Tokens that came in bursts are one piece.
            assert len(done.pieces) <= done.completion_tokens == done.tokens


@pytest.mark.parametrize("name", OPTIONS)
def test_a_pipeline_runs_and_is_the_same_with_and_without_lookahead(
    name: str, side: Side, served: Served, model: Path, tmp_path: Path
) -> None:
    retriever, watched = side.retriever(landing=True)
    with Speaker(served.url, model, side.mode) as speaker:
        live = run_pipeline(name, QUESTION, retriever, speaker, OPTIONS[name])
        assert short(live.events) == STEPS[name]
        check_generations(speaker, events_of(live, Generated))
    searches = events_of(live, Retrieved)
    assert all(len(ids) == len(set(ids)) > 0 for search in searches for ids in search.ids)
    assert live.text
    assert live.passages
    (stats,) = watched.closed
    assert stats["lookaheads"] == len(events_of(live, LookedAhead))
    if side.name == "beside":
        # Inside vLLM they come while the LLM writes, or too late: nobody there says which.
        assert stats["lists_used"] > 0
        assert max(max(search.hit_rate) for search in searches) > 0
    side.wait_until_free()

    path = tmp_path / "trace.jsonl"
    with TraceWriter(path, model="tiny") as writer:
        writer.append(live)
    (run,) = read_traces(path)
    assert run.events == live.events
    for lookahead in (True, False):
        said = ReplayGenerator(run.generations, speed=math.inf)
        again = run_pipeline(name, QUESTION, retriever, said, OPTIONS[name], lookahead=lookahead)
        assert (said.left, said.other_prompts) == (0, 0)
        assert again.text == live.text
        assert again.passages == live.passages
        found = events_of(again, Retrieved)
        assert [(s.texts, s.ids) for s in found] == [(s.texts, s.ids) for s in searches]
        assert bool(events_of(again, LookedAhead)) == lookahead
        assert watched.closed[-1]["lookaheads"] == len(events_of(again, LookedAhead))
        side.wait_until_free()
    if side.name == "beside":
        assert {rate for search in found for rate in search.hit_rate} == {0.0}


def test_flare_masks_what_vllm_says_is_improbable(near: Side, served: Served, model: Path) -> None:
    retriever, _ = near.retriever()

    def tentative(threshold: float) -> tuple[list[Generated], list[Retrieved]]:
        # What goes on where a text ends is a completion, also of who chats.
        with Speaker(served.url, model, "chat") as speaker, Steps(QUESTION, retriever, speaker) as steps:
            answer = flare(steps, sentences=1, threshold=threshold, sentence_tokens=24)
        return [e for e in events_of(answer, Generated) if e.name == "tentative"], events_of(answer, Retrieved)

    (draft,), searches = tentative(1e-30)
    assert searches == []
    probabilities = sorted(math.exp(value) for piece in draft.pieces for value in piece.logprobs)
    threshold = probabilities[len(probabilities) // 2]
    (draft,), (search,) = tentative(threshold)
    sentence = re.match(r".+?\.(?=\s|$)|.*", draft.text, re.DOTALL)
    assert sentence is not None
    kept, length = "", 0
    for piece in draft.pieces:
        if length < len(sentence.group()) and min(math.exp(value) for value in piece.logprobs) >= threshold:
            kept += piece.text
        length += len(piece.text)
    assert search.texts == (kept.strip() or QUESTION,)
    assert kept.strip() != sentence.group().strip()


@pytest.mark.parametrize("mode", ["chat", "completions"])
def test_probabilities_are_those_of_the_text(mode: str, served: Served, model: Path, exact: Exact) -> None:
    """As they were generated, as vLLM echoes them, and as the weights have them."""
    asked = Prompt(name="answer", text=answer_prompt(QUESTION, ()), max_tokens=24, logprobs=True)
    with Speaker(served.url, model, mode) as speaker:
        *pieces, finished = speaker.generate(asked)
        assert isinstance(finished, Finished)
        text = "".join(piece.text for piece in pieces)
        said = [value for piece in pieces for value in piece.logprobs]
        echoed = speaker.score(speaker.seen(asked), text)
        assert len(said) == finished.completion_tokens == 24
        assert said == pytest.approx(echoed, abs=NOISE)
        assert said == pytest.approx(exact(speaker.seen(asked), text), abs=NOISE)


# PipeRAG

WINDOW, BEHIND, INTERVAL = 12, 20, 16


def tokens(text: str) -> list[int]:
    """Where the embedder's tokens start: words, and runs of what is neither word nor white space."""
    return [found.start() for found in re.finditer(r"\w+|[^\w\s]+", text)]


def last(text: str, n: int) -> str:
    starts = tokens(text)
    return text[starts[-n] :] if len(starts) >= n else text


def moved(documents: DocumentStore, passage: int, staleness: int) -> str:
    """Twelve words of its document, beginning so many after the passage does."""
    words: list[str] = []
    following: int | None = passage
    while following is not None and len(words) < staleness + 12:
        document = documents.read([following])[following].document
        words += document.text.split()
        following = document.successor
    return " ".join(words[staleness : staleness + 12])


def numbered(texts: list[str]) -> str:
    return "\n".join(f"[{number}] {text}" for number, text in enumerate(filter(None, texts), 1))


@pytest.mark.parametrize("placement", ["insert", "replace"])
def test_piperag_retrieves_while_vllm_writes(placement: str, side: Side, served: Served, model: Path) -> None:
    retriever, watched = side.retriever(k=2)
    plan = PeriodicRetrieval(
        interval=INTERVAL, window=WINDOW, max_tokens=5 * INTERVAL, min_nprobe=2, placement=placement, behind=BEHIND
    )
    with Speaker(served.url, model, side.mode) as speaker:
        with Steps(QUESTION, retriever, speaker) as steps:
            written = plan.run(steps)
        check_generations(speaker, events_of(written.answer, Generated))
        prompts = [prompt.text for prompt in speaker.asked]
    side.wait_until_free()
    assert len(watched.closed) == 1
    generations = events_of(written.answer, Generated)
    assert [chunk.tokens for chunk in written.chunks] == [INTERVAL] * 5
    before = ["".join(done.text for done in generations[:number]) for number in range(6)]
    assert before[5].strip() == written.answer.text

    if side.name == "inside" and any(chunk.missed for chunk in written.chunks):
        # On a machine that is busy a search in vLLM's process may miss its window; then the report says so.
        return
    # Windows: the question, then what was there before the chunk beside which it is searched.
    first, *beside = events_of(written.answer, Retrieved)
    stale = [last(f"{QUESTION} {before[number]}", WINDOW).strip() for number in (1, 2, 3)]
    assert [search.texts for search in (first, *beside)] == [(QUESTION,), *((text,) for text in stale)]
    head = f"Answer in one or two sentences, from these passages.\n\n%s\n\nQuestion: {QUESTION}\nAnswer:"
    original = numbered([moved(side.documents, one, 0) for one in first.ids[0]])
    assert prompts[0] == head % original

    by_chunk = dict(zip((1, 2, 3), beside, strict=True))
    ids = first.ids[0]
    for number, (chunk, done) in enumerate(zip(written.chunks[:4], generations, strict=False)):
        assert chunk.generation_s == done.seconds
        assert (chunk.window_s is None) == (number == 0)
        assert chunk.missed == ""
        if number:
            search = by_chunk[number]
            ids = search.ids[0]
            assert chunk.deadline_ms == search.deadline_ms
            assert 1.0 <= chunk.deadline_ms <= chunk.window_s * 1e3
            assert 2 <= chunk.nprobe_used == search.nprobe_used[0] <= NPROBE
            assert chunk.retrieval_s == search.seconds > 0
        # As many as were really written since: a new line is one of the LLM's tokens and none of the store's.
        assert chunk.staleness == len(tokens(done.text)) > 0
        context = numbered([moved(side.documents, one, chunk.staleness) for one in ids])
        assert context
        text = before[number + 1]
        if placement == "replace":
            assert prompts[number + 1] == head % context + text
        else:
            tail = last(text, BEHIND)
            stays = text[: len(text) - len(tail)].rstrip()
            assert prompts[number + 1] == f"{head % original}{stays}\n\n{context}\n\n{tail.lstrip()}"
    assert written.chunks[4].window_s is not None
    assert (written.chunks[4].deadline_ms, written.chunks[4].nprobe_used) == (None, None)


# Likelihoods


@pytest.fixture(scope="module")
def exact(model: Path) -> Exact:
    """``exact(prompt, continuation)``: logarithms by the weights in float32, without vLLM."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)

    def score(prompt: str, continuation: str) -> list[float]:
        encoded = tokenizer(prompt + continuation, return_offsets_mapping=True)
        ids = torch.tensor([encoded["input_ids"]])
        with torch.no_grad():
            values = network(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist()
        starts = [start for start, _ in encoded["offset_mapping"]][1:]
        return [value for value, start in zip(values, starts, strict=True) if start >= len(prompt)]

    return score


class Noted:
    """A scorer that keeps what it was asked."""

    def __init__(self, within: Speaker) -> None:
        self._within = within
        self.asked: list[tuple[str, str]] = []

    def score(self, prompt: str, continuation: str, /) -> tuple[float, ...]:
        self.asked.append((prompt, continuation))
        return self._within.score(prompt, continuation)


def test_the_likelihood_of_a_text_is_that_of_one_request_and_of_the_weights(
    near: Side, served: Served, model: Path, exact: Exact
) -> None:
    retriever, _ = near.retriever(k=2)
    found: dict[Schedule, Likelihood] = {}
    with Speaker(served.url, model) as speaker:
        n = speaker.count(REFERENCE)
        noise = NOISE * math.sqrt(n)
        for schedule in (Schedule.NONE, Schedule.SYNCHRONOUS, Schedule.PIPELINED):
            scorer = Noted(speaker)
            plan = PeriodicRetrieval(schedule=schedule, interval=5, window=5)
            with Steps(QUESTION, retriever, speaker) as steps:
                found[schedule] = periodic_likelihood(plan, steps, scorer, REFERENCE)
            assert "".join(continuation for _, continuation in scorer.asked) == REFERENCE
            assert len(scorer.asked) == 4
            values = [value for prompt, continuation in scorer.asked for value in exact(prompt, continuation)]
            assert found[schedule].tokens == len(values) == n
            assert found[schedule].log_likelihood == pytest.approx(math.fsum(values), abs=noise)
        whole = answer_likelihood(speaker, QUESTION, [], REFERENCE.strip())
    without = found[Schedule.NONE]
    assert without.tokens == whole.tokens
    assert without.log_likelihood == pytest.approx(whole.log_likelihood, abs=NOISE)
    assert without.perplexity == pytest.approx(math.exp(-without.log_likelihood / n))
    # Passages are heeded, and those of stale windows are others.
    for one, other in itertools.pairwise(found.values()):
        assert abs(one.log_likelihood - other.log_likelihood) > noise
