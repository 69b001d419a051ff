"""PipeRAG: windows, staleness, shifts and deadlines, on a real router; nothing waits for real time."""

from __future__ import annotations

import math
import threading
from dataclasses import replace

import pytest

from benchmarks.rag.answer_quality import Likelihood, answer_likelihood, periodic_likelihood
from hybridindex.errors import (
    DeadlineExceededError,
    GenerationError,
    InvalidInputError,
    UnreachableError,
)
from hybridindex.rag.chunk_time import ChunkTimeModel
from hybridindex.rag.generator import Finished
from hybridindex.rag.periodic import PeriodicRetrieval, Schedule, round_trip_ms
from hybridindex.rag.records import Generated, Retrieved
from hybridindex.rag.retriever import Retriever
from hybridindex.rag.shift import shift_passage
from hybridindex.rag.steps import Steps
from hybridindex.types import LLMLevel, LLMMeasurement, LLMProfile
from tests.rag.world import LandingSource, embedder, query_embedder, replay, spoken

QUESTION = "what is a planet"
CHUNKS = ["oak beech birch pine", " wave tide reef salt", " flour yeast oven crust", " comet orbit"]


def said(*texts):
    return [
        spoken("chunk", text, finish="stop" if number == len(texts) - 1 else "length")
        for number, text in enumerate(texts)
    ]


def plan(schedule=Schedule.PIPELINED, **options):
    options = {"interval": 4, "window": 4, "max_tokens": 100, **options}
    return PeriodicRetrieval(schedule=schedule, token_starts=embedder().token_starts, **options)


class Listening:
    """Keeps the prompts that a replay was asked."""

    def __init__(self, *generations):
        self._replay = replay(*generations)
        self.prompts = []

    def generate(self, prompt, /):
        self.prompts.append(prompt.text)
        return self._replay.generate(prompt)

    def close(self):
        pass


def write(retriever, piperag, *texts, model=None):
    generator = Listening(*said(*texts))
    with Steps(QUESTION, retriever, generator) as steps:
        written = piperag.run(steps, model)
    return written, generator.prompts


def retrieved(written):
    return [event for event in written.answer.events if isinstance(event, Retrieved)]


def searched(written):
    return [event.texts[0] for event in written.answer.events if isinstance(event, Retrieved)]


def test_windows_are_stale_by_one_chunk(retriever):
    written, _ = write(retriever, plan(), *CHUNKS)
    assert written.answer.text == "".join(CHUNKS)
    # The question once, for the first two chunks; then what stood before the chunk beside which the search ran.
    assert searched(written) == [QUESTION, CHUNKS[0], CHUNKS[1].strip(), CHUNKS[2].strip()]
    assert [chunk.staleness for chunk in written.chunks] == [4, 4, 4, 2]


def test_synchronous_windows_are_the_newest(retriever):
    written, _ = write(retriever, plan(Schedule.SYNCHRONOUS), *CHUNKS)
    assert searched(written) == [QUESTION, CHUNKS[0], CHUNKS[1].strip(), CHUNKS[2].strip()]
    kinds = [type(event) for event in written.answer.events]
    assert kinds == [Retrieved, Generated] * 4
    assert [chunk.staleness for chunk in written.chunks] == [0] * 4


def test_once_and_never(retriever):
    assert searched(write(retriever, plan(Schedule.ONCE), *CHUNKS)[0]) == [QUESTION]
    written, prompts = write(retriever, plan(Schedule.NONE), *CHUNKS)
    assert searched(written) == []
    assert written.answer.passages == ()
    assert "[1]" not in prompts[0]


def test_chunks_are_prompted_with_shifted_passages(retriever, documents):
    written, prompts = write(retriever, plan(), *CHUNKS)
    searches = [event for event in written.answer.events if isinstance(event, Retrieved)]
    first, second = (search.ids[0] for search in searches[:2])
    for number, (ids, staleness) in enumerate([(first, 0), (first, 4), (second, 4)]):
        for one in ids:
            shifted = shift_passage(documents, one, staleness)
            assert not shifted or shifted in prompts[number]
        assert prompts[number].endswith("".join(CHUNKS[:number]))
    plain, prompts = write(retriever, plan(shift=False), *CHUNKS)
    assert documents.read([first[0]])[first[0]].document.text in prompts[1]
    assert plain.answer.text == written.answer.text


def test_inserted_passages_stand_before_the_end_of_the_text(retriever, documents):
    written, prompts = write(retriever, plan(placement="insert", behind=3), *CHUNKS)
    first, second = ([documents.read([one])[one].document.text for one in e.ids[0]] for e in retrieved(written)[:2])
    head = prompts[0]
    assert all(text in head for text in first)
    assert all(prompt.startswith(head) for prompt in prompts), "the first passages stay in front"
    # The text once, in two parts, the newest passages between them.
    before, between, tail = prompts[2].removeprefix(head).partition("[1]")
    assert before.strip() == "oak beech birch pine wave"
    assert between
    assert tail.endswith("\n\ntide reef salt")
    assert shift_passage(documents, retrieved(written)[1].ids[0][0], 4) in prompts[2]
    assert second != first
    _, prompts = write(retriever, plan(Schedule.ONCE, placement="insert"), *CHUNKS)
    assert prompts[1] == prompts[0] + CHUNKS[0], "passages that stand in front are not inserted as well"


def test_an_answer_ends_where_its_tokens_do(retriever):
    generator = Listening(*[spoken("chunk", text, finish="length") for text in CHUNKS])
    with Steps(QUESTION, retriever, generator) as steps:
        written = plan(max_tokens=10).run(steps)
    assert len(written.chunks) == 3
    # Nobody would read what is found beside the last chunk.
    assert searched(written) == [QUESTION, CHUNKS[0]]


def slow_model():
    """A server that takes 100 ms and 10 ms a token, whatever the length."""
    model = ChunkTimeModel()
    for length in (10, 20, 30):
        model.observe(length, 5, 0.1, 0.14)
    return model


def test_searches_beside_a_chunk_have_its_time(retriever):
    written, _ = write(retriever, plan(margin=0.5, network_ms=5.0), *CHUNKS, model=slow_model())
    first, *rest = [event for event in written.answer.events if isinstance(event, Retrieved)]
    assert first.deadline_ms is None
    for chunk, search in zip(written.chunks[1:], rest, strict=True):
        assert chunk.deadline_ms == search.deadline_ms
        # Half of what was predicted, less the network; embedding took some of it.
        assert 1.0 <= chunk.deadline_ms < chunk.window_s * 500 - 5
        assert chunk.nprobe_used == search.nprobe_used[0]


class Stated(ChunkTimeModel):
    """Learns nothing."""

    def predict_s(self, length, tokens, *, unseen=None):
        return 100.0

    def predict_least_s(self, length, tokens, *, unseen=None):
        return 60.0


def test_deadlines_are_of_the_shortest_time_and_reports_of_the_expected(retriever):
    written, _ = write(retriever, plan(margin=0.5), *CHUNKS, model=Stated())
    for chunk in written.chunks[1:]:
        assert chunk.window_s == 100.0
        assert 20_000 < chunk.deadline_ms <= 30_000


def test_round_trips_are_measured_where_nothing_is_said(retriever, monkeypatch):
    asked = []
    monkeypatch.setattr("hybridindex.rag.periodic.round_trip_ms", lambda session: asked.append(session) or 59_999.0)
    measured, _ = write(retriever, plan(), *CHUNKS, model=Stated())
    assert [chunk.deadline_ms for chunk in measured.chunks[1:]] == [1.0] * 3
    assert asked == [retriever.source.sessions[-1]]
    given, _ = write(retriever, plan(network_ms=0.0), *CHUNKS, model=Stated())
    assert min(chunk.deadline_ms for chunk in given.chunks[1:]) > 50_000
    assert len(asked) == 1


class NoTime(LandingSource):
    """Every search with a deadline fails."""

    def __init__(self, router, error):
        super().__init__(router)
        self._error = error

    def session(self, **options):
        opened = super().session(**options)
        search = opened.search

        def late(*args, deadline_ms=None, **more):
            if deadline_ms is not None:
                raise self._error
            return search(*args, **more)

        opened.search = late
        return opened


@pytest.mark.parametrize("error", [DeadlineExceededError("too late"), UnreachableError("too late")])
def test_a_search_that_comes_too_late_leaves_the_passages_before_it(router, documents, error):
    retriever = Retriever(NoTime(router, error), query_embedder(documents), documents, k=3)
    written, prompts = write(retriever, plan(), *CHUNKS, model=slow_model())
    assert [chunk.missed for chunk in written.chunks] == ["", "too late", "too late", "too late"]
    assert written.chunks[1].nprobe_used is None
    context = [prompt.split("Question:")[0] for prompt in prompts]
    assert context[1] == context[2] == context[3] != context[0]


def test_other_errors_of_a_search_end_the_answer(router, documents):
    retriever = Retriever(NoTime(router, InvalidInputError("bad")), query_embedder(documents), documents)
    with pytest.raises(InvalidInputError, match="bad"):
        write(retriever, plan(), *CHUNKS, model=slow_model())
    assert router.residency.n_resident == 0


def test_a_floor_and_a_window_without_time(router, documents):
    """The router's own choice under a deadline that is over: the floor, reported."""
    retriever = Retriever(LandingSource(router), query_embedder(documents), documents, nprobe=12)
    with Steps(QUESTION, retriever, replay()) as steps:
        steps.retrieve("warm", [QUESTION])
        steps.retrieve("late", [QUESTION], deadline_ms=lambda _: 1e-6, min_nprobe=3)
    warm, late = steps.events
    assert warm.nprobe_used == (12,)
    assert late.nprobe_used == (3,)


def test_generation_that_breaks_in_the_middle_of_a_search_ends_it(retriever, router):
    class Breaking(Listening):
        def generate(self, prompt, /):
            if len(self.prompts) == 2:
                raise GenerationError("gone")
            return super().generate(prompt)

    with pytest.raises(GenerationError, match="gone"), Steps(QUESTION, retriever, Breaking(*said(*CHUNKS))) as steps:
        plan().run(steps)
    assert router.residency.n_resident == 0


def test_a_generation_that_breaks_does_not_wait_for_the_search_beside_it(router, documents):
    """The session is closed first: the search, which goes on, is not over by then."""
    searching, let_go, ended = threading.Event(), threading.Event(), threading.Event()
    closed_first = []

    class Held(LandingSource):
        def session(self, **options):
            opened = super().session(**options)
            search, close = opened.search, opened.close

            def held(*args, deadline_ms=None, **more):
                if deadline_ms is None:
                    return search(*args, **more)
                searching.set()
                let_go.wait(300)
                try:
                    return search(*args, **more)
                finally:
                    ended.set()

            def closed():
                closed_first.append(not ended.is_set())
                close()

            opened.search, opened.close = held, closed
            return opened

    class Breaking(Listening):
        def generate(self, prompt, /):
            if len(self.prompts) == 1:
                assert searching.wait(300)
                raise GenerationError("gone")
            return super().generate(prompt)

    retriever = Retriever(Held(router), query_embedder(documents), documents, k=3)
    with pytest.raises(GenerationError, match="gone"), Steps(QUESTION, retriever, Breaking(*said(*CHUNKS))) as steps:
        plan().run(steps, slow_model())
    assert closed_first == [True]
    let_go.set()
    assert ended.wait(300)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("interval", 0), ("window", True), ("max_tokens", 1.5), ("min_nprobe", -1), ("margin", 0), ("margin", math.nan),
        ("network_ms", -1), ("placement", "other"), ("behind", 0),
    ],
)  # fmt: skip
def test_wrong_fields_are_named(field, value):
    with pytest.raises(InvalidInputError, match=field):
        PeriodicRetrieval(**{field: value})


def test_round_trips(router):
    with router.session() as session:
        assert round_trip_ms(session) == 0.0


# The model of generation times


def test_chunk_times_grow_with_the_sequence():
    """0.2 s + 1 ms a prompt token to the first, 10 ms + 0.02 ms per token before it for each other."""
    model = ChunkTimeModel(1.0)
    assert model.predict_s(10, 64) is None
    for length in range(100, 1000, 100):
        per_token = 0.01 + 0.00002 * (length + 32)
        first = 0.2 + 0.001 * length
        model.observe(length, 64, first, first + 63 * per_token)
    predicted = model.predict_s(2000, 64)
    assert predicted == pytest.approx(2.2 + 63 * (0.01 + 0.00002 * 2032), rel=0.02)
    assert model.predict_s(2000, 1) == pytest.approx(2.2, rel=0.03)


def test_what_the_server_has_seen_costs_no_time_to_the_first_token():
    """1 ms a token that is new, 10 ms a token that is written."""
    model = ChunkTimeModel()
    for length, unseen in ((300, 300), (430, 120), (560, 80), (690, 130), (820, 90)):
        model.observe(length, 11, 0.001 * unseen, 0.001 * unseen + 0.1, unseen=unseen)
    assert model.predict_s(950, 11, unseen=100) == pytest.approx(0.2, rel=0.01)
    assert model.predict_least_s(950, 11, unseen=100) == pytest.approx(0.2, abs=0.03)
    assert model.predict_s(950, 11) == pytest.approx(1.05, rel=0.02), "all of it, where nothing is said"


@pytest.mark.parametrize("placement", ["insert", "replace"])
def test_prompts_are_known_as_far_as_they_begin_like_the_last(retriever, placement):
    class Noting(ChunkTimeModel):
        def observe(self, length, tokens, first_token_s, seconds, *, unseen=None):
            noted.append(unseen)
            super().observe(length, tokens, first_token_s, seconds, unseen=unseen)

    noted: list[int] = []
    _, prompts = write(retriever, plan(placement=placement), *CHUNKS, model=Noting())
    sizes = [plan().count_tokens(prompt) for prompt in prompts]
    head = plan().count_tokens(prompts[0])
    assert noted[0] == head
    for new, size in zip(noted[1:], sizes[1:], strict=True):
        # With new passages in front only the instruction before them is known.
        assert new <= size - head if placement == "insert" else new > size / 2


def test_a_retrieval_counts_on_the_shortest_chunks():
    """A server whose tokens take 10 ms, and every fourth time 8 ms."""
    model = ChunkTimeModel()
    assert model.predict_least_s(100, 11) is None
    for number in range(80):
        model.observe(100, 11, 0.0, 0.08 if number % 4 == 3 else 0.1)
    assert model.predict_s(100, 11) == pytest.approx(0.095, abs=0.004)
    assert 0.07 < model.predict_least_s(100, 11) < 0.085
    steady = ChunkTimeModel()
    for _ in range(30):
        steady.observe(100, 11, 0.0, 0.1)
    assert steady.predict_least_s(100, 11) == pytest.approx(steady.predict_s(100, 11))


def measured(**changes):
    alone = LLMLevel(
        concurrency=1, n_requests=4, input_tokens=100, output_tokens=100, throughput_rps=1,
        ttft_p50_s=0.3, tpot_p50_s=0.02,
    )  # fmt: skip
    crowd = replace(alone, concurrency=8, ttft_p50_s=9.0, tpot_p50_s=9.0)
    made = LLMMeasurement(
        created_at="2030-01-31T12:00:00+00:00", hardware_fingerprint="hw", model="m", method="server",
        profile=LLMProfile(kv_cache_bytes=1, throughput_rps=1), levels=(crowd, alone),
        prefill=((200, 0.4), (400, 0.6)),
    )  # fmt: skip
    return replace(made, **changes)


def test_a_measured_llm_is_known_before_its_first_chunk():
    model = ChunkTimeModel.of_measurement(measured())
    assert model.predict_s(600, 51) == pytest.approx(0.8 + 50 * 0.02, rel=0.02)
    for _ in range(30):
        model.observe(600, 51, 1.0, 1.0 + 50 * 0.04)
    assert model.predict_s(600, 51) == pytest.approx(3.0, rel=0.05)


def test_a_measurement_without_single_requests_teaches_nothing():
    offline = measured(method="offline", prefill=(), levels=(LLMLevel(
        concurrency=9, n_requests=9, input_tokens=9, output_tokens=9, throughput_rps=1),))  # fmt: skip
    assert ChunkTimeModel.of_measurement(offline).predict_s(100, 10) is None


# Quality


class Overlap:
    """A scorer that finds words the more probable the nearer they stand in its prompt."""

    def __init__(self):
        self.scored = []

    def score(self, prompt, continuation, /):
        self.scored.append((prompt, continuation))
        return tuple(-0.5 if word in prompt else -3.0 for word in continuation.split())


def likelihood(retriever, schedule, reference):
    scorer = Overlap()
    with Steps(QUESTION, retriever, replay()) as steps:
        return periodic_likelihood(plan(schedule), steps, scorer, reference), scorer.scored, steps.events


REFERENCE = "comet orbit moon dust galaxy nova planet light wave tide reef salt"


@pytest.mark.parametrize("schedule", Schedule)
def test_a_reference_is_scored_chunk_by_chunk(retriever, schedule):
    found, scored, events = likelihood(retriever, schedule, REFERENCE)
    assert "".join(text for _, text in scored) == REFERENCE
    assert found.tokens == 12
    assert len(events) == {"none": 0, "once": 1, "synchronous": 3, "pipelined": 2}[schedule]
    assert found.perplexity == pytest.approx(math.exp(-found.log_likelihood / 12))


def test_passages_lower_perplexity(retriever):
    none, once, synchronous = (
        likelihood(retriever, schedule, REFERENCE)[0].perplexity
        for schedule in (Schedule.NONE, Schedule.ONCE, Schedule.SYNCHRONOUS)
    )
    assert synchronous <= once < none


def test_stale_windows_of_a_reference_are_those_of_a_run(retriever):
    _, _, events = likelihood(retriever, Schedule.PIPELINED, "".join(CHUNKS))
    assert [event.texts[0] for event in events] == [QUESTION, CHUNKS[0], CHUNKS[1].strip()]


def test_passages_of_a_reference_are_shifted_as_those_of_a_run(retriever, documents):
    _, scored, events = likelihood(retriever, Schedule.PIPELINED, "".join(CHUNKS))
    (first, *_), prompts = events[0].ids, [prompt for prompt, _ in scored]
    for number, staleness in ((0, 0), (1, 4)):
        for one in first:
            assert shift_passage(documents, one, staleness) in prompts[number]
    for one in first:
        assert documents.read([one])[one].document.text not in prompts[1]


def test_inserted_passages_of_a_reference_are_those_of_a_run(retriever):
    inserting = plan(placement="insert", behind=3)
    scorer = Overlap()
    with Steps(QUESTION, retriever, replay()) as steps:
        periodic_likelihood(inserting, steps, scorer, "".join(CHUNKS))
    _, prompts = write(retriever, inserting, *CHUNKS)
    assert [prompt for prompt, _ in scorer.scored] == prompts


def test_chunks_of_a_reference_begin_with_their_white_space(retriever):
    """As an LLM's tokens do: the border would else fall into the middle of one."""
    _, scored, _ = likelihood(retriever, Schedule.NONE, REFERENCE)
    assert [text[0] == " " for _, text in scored] == [False, True, True]
    assert not any(text.endswith(" ") for _, text in scored)


def test_likelihood_of_an_answer():
    found = answer_likelihood(Overlap(), "planet", [], "planet moon")
    assert found == Likelihood(tokens=2, log_likelihood=-3.5)
    assert Likelihood(tokens=1, log_likelihood=-1e6).perplexity == math.inf
    with pytest.raises(InvalidInputError, match="no tokens"):
        answer_likelihood(Overlap(), "planet", [], "")


def test_generations_without_an_end_are_errors(retriever):
    class Endless:
        def generate(self, prompt, /):
            yield from (part for part in replay(*said("a")).generate(prompt) if not isinstance(part, Finished))

        def close(self):
            pass

    with pytest.raises(GenerationError, match="ended step 'chunk'"), Steps(QUESTION, retriever, Endless()) as steps:
        plan().run(steps)
