"""The pipelines on a real router: what they search, where lookahead stands, what they leave behind."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hybridindex.errors import GenerationError, InvalidInputError, TraceError
from hybridindex.rag.embed import center
from hybridindex.rag.pipelines import PIPELINES, run_pipeline
from hybridindex.rag.pipelines.flare import sure_part
from hybridindex.rag.prompts import lines_of_list, says_no, says_yes
from hybridindex.rag.records import Generated, LookedAhead, Retrieved
from hybridindex.rag.retriever import Retriever
from hybridindex.rag.steps import Steps
from tests.rag.world import LandingSession, embedder, names, query_embedder, replay, spoken

QUESTION = "what is a planet"
#: What an LLM says in one run of each pipeline.
SAID = {
    "hyde": [spoken("hypothesis", "a planet of dust orbit moon"), spoken("answer", "dust and light")],
    "sub_question": [
        spoken("sub_questions", "1. what is a comet\n2. what is a reef\n2. what is a reef"),
        spoken("answer", "both of them"),
    ],
    "iterative": [
        spoken("narrow", "what is a moon"), spoken("answer", "a moon orbit"), spoken("judge", "no"),
        spoken("narrow", "what is a tide"), spoken("answer", "a tide wave"), spoken("judge", "Yes."),
        spoken("final", "moon and tide"),
    ],
    "iter_retgen": [
        spoken("answer", "a comet"), spoken("answer", "a nova"), spoken("answer", "a planet is dust"),
    ],
    "flare": [
        spoken("tentative", "It is dust.", finish="length"), spoken("tentative", " The ?yeast orbit.", finish="length"),
        spoken("sentence", " The moon orbit.", finish="length"), spoken("tentative", " The end."),
    ],
    "self_rag": [
        spoken("decide", "Yes"),
        spoken("answer", "first", probability=0.5), spoken("critique", "no"),
        spoken("answer", "second", probability=0.4), spoken("critique", "yes"),
        spoken("answer", "third", probability=0.3), spoken("critique", "yes"),
    ],
    "plain": [spoken("answer", "a planet has an orbit")],
}  # fmt: skip
#: Kinds and names in order: lookahead before the generation that hides it, the search after it.
STEPS = {
    "hyde": ["L question", "G hypothesis", "R hypothesis", "G answer"],
    "sub_question": ["L question", "G sub_questions", "R sub_questions", "G answer"],
    "iterative": [
        "L question", "G narrow", "R narrow", "G answer", "L round", "G judge", "G narrow", "R narrow", "G answer",
        "L round", "G judge", "G final",
    ],
    "iter_retgen": ["R round", "L round", "G answer", "R round", "L round", "G answer", "R round", "G answer"],
    "flare": [
        "L sentence", "G tentative", "L sentence", "G tentative", "R sentence", "G sentence", "L sentence",
        "G tentative",
    ],
    "self_rag": ["L question", "G decide", "R question", *["G answer", "G critique"] * 3],
    "plain": ["R question", "G answer"],
}  # fmt: skip
#: What hides each of their lookaheads.
HIDDEN = {
    "hyde": [("hypothesis",)],
    "sub_question": [("sub_questions",)],
    "iterative": [("narrow",), ("judge", "narrow"), ("judge", "narrow")],
    "iter_retgen": [("answer",), ("answer",)],
    "flare": [("tentative",)] * 3,
    "self_rag": [("decide",)],
    "plain": [],
}
ANSWERS = {
    "hyde": "dust and light",
    "sub_question": "both of them",
    "iterative": "moon and tide",
    "iter_retgen": "a planet is dust",
    "flare": "It is dust. The moon orbit. The end.",
    "self_rag": "second",
    "plain": "a planet has an orbit",
}
#: With a generation before a search.
LOOKING_AHEAD = [name for name in PIPELINES if name != "plain"]
SHORT = {"LookedAhead": "L", "Generated": "G", "Retrieved": "R"}


def short(events):
    return [" ".join([SHORT[kind], name]) for kind, name in (entry.split() for entry in names(events))]


@pytest.mark.parametrize("name", LOOKING_AHEAD)
def test_lookahead_stands_before_the_generation_that_hides_it(name, retriever, router):
    generator = replay(*SAID[name])
    said = []
    answer = run_pipeline(name, QUESTION, retriever, generator, on_text=said.append)
    assert short(answer.events) == STEPS[name]
    assert answer.text == ANSWERS[name]
    assert "".join(said).strip() == answer.text
    assert generator.left == 0
    assert router.stats().lookahead_used_lists > 0
    searches = [e for e in answer.events if isinstance(e, Retrieved)]
    assert max(max(search.hit_rate) for search in searches) > 0
    assert router.residency.n_resident == 0, "the session is closed and its pages are free"


@pytest.mark.parametrize("name", PIPELINES)
def test_without_lookahead_everything_else_is_the_same(name, retriever, router):
    with_it = run_pipeline(name, QUESTION, retriever, replay(*SAID[name]))
    without = run_pipeline(name, QUESTION, retriever, replay(*SAID[name]), lookahead=False)
    assert short(without.events) == [step for step in STEPS[name] if not step.startswith("L ")]
    assert [p.id for p in without.passages] == [p.id for p in with_it.passages]
    assert without.text == with_it.text
    assert all(set(e.hit_rate) == {0.0} for e in without.events if isinstance(e, Retrieved))


def test_plain_searches_the_question_once_and_answers_from_what_it_found(retriever, router):
    asked = []

    class Listening:
        def generate(self, prompt, /):
            asked.append(prompt)
            return replay(*SAID["plain"]).generate(prompt)

        def close(self):
            pass

    answer = run_pipeline("plain", QUESTION, retriever, Listening())
    assert (answer.pipeline, answer.text) == ("plain", ANSWERS["plain"])
    assert short(answer.events) == STEPS["plain"]
    (search,) = [e for e in answer.events if isinstance(e, Retrieved)]
    assert search.texts == (QUESTION,)
    assert [p.source for p in answer.passages] == ["stars"] * 3
    assert all(passage.text in asked[0].text for passage in answer.passages)
    assert router.stats().lookahead_used_lists == 0


def test_hyde_searches_what_was_made_up(retriever, documents):
    answer = run_pipeline("hyde", QUESTION, retriever, replay(*SAID["hyde"]))
    (search,) = [e for e in answer.events if isinstance(e, Retrieved)]
    assert search.texts == ("a planet of dust orbit moon",)
    assert [p.source for p in answer.passages] == ["stars"] * 3
    assert answer.passages[0].text == documents.read([answer.passages[0].id])[answer.passages[0].id].document.text
    assert answer.passages[0].nprobe_used == 4


def test_sub_questions_are_one_search_and_take_turns(retriever):
    answer = run_pipeline("sub_question", QUESTION, retriever, replay(*SAID["sub_question"]))
    (search,) = [e for e in answer.events if isinstance(e, Retrieved)]
    assert search.texts == ("what is a comet", "what is a reef")
    assert [p.source for p in answer.passages] == ["stars", "seas"] * 3


def test_iter_retgen_drafts_the_query_before(retriever):
    answer = run_pipeline("iter_retgen", QUESTION, retriever, replay(*SAID["iter_retgen"]))
    drafts = [e.texts for e in answer.events if isinstance(e, LookedAhead)]
    searched = [e.texts for e in answer.events if isinstance(e, Retrieved)]
    assert drafts == searched[:2] == [(QUESTION,), (f"{QUESTION} a comet",)]


def test_flare_searches_without_the_improbable_words(retriever):
    answer = run_pipeline("flare", QUESTION, retriever, replay(*SAID["flare"]))
    (search,) = [e for e in answer.events if isinstance(e, Retrieved)]
    assert search.texts == ("The orbit.",)
    assert sure_part([("a", 0.1)], 0.4) == ""


def test_flare_without_probabilities_is_an_error(retriever, router):
    """Of a sentence; without text there is nothing to be sure of."""
    said = SAID["flare"][0]
    silent = dataclasses.replace(said, pieces=tuple(dataclasses.replace(p, logprobs=()) for p in said.pieces))
    with pytest.raises(GenerationError, match=r"needs probabilities .* sent none with step 'tentative'"):
        run_pipeline("flare", QUESTION, retriever, replay(silent))
    assert router.residency.n_resident == 0
    nothing = dataclasses.replace(said, pieces=(), finish="stop")
    assert run_pipeline("flare", QUESTION, retriever, replay(nothing)).text == ""


def test_self_rag_drafts_what_it_searches(retriever):
    answer = run_pipeline("self_rag", QUESTION, retriever, replay(*SAID["self_rag"]))
    draft, search = (next(e for e in answer.events if isinstance(e, kind)) for kind in (LookedAhead, Retrieved))
    assert draft.texts == search.texts == (QUESTION,)
    chosen = answer.passages[0]
    assert chosen.id == search.ids[0][1]
    assert len(answer.passages) == 3


def test_self_rag_may_decide_not_to_search(retriever):
    answer = run_pipeline("self_rag", QUESTION, retriever, replay(spoken("decide", "no"), spoken("answer", "dust")))
    assert (answer.text, answer.passages) == ("dust", ())
    assert not [e for e in answer.events if isinstance(e, Retrieved)]


@pytest.mark.parametrize(
    "decision",
    [spoken("decide", "no", probability=0.7), spoken("decide", "Question: The"), spoken("decide", "")],
    ids=["not sure", "neither", "nothing"],
)
def test_self_rag_searches_unless_it_is_sure_not_to(decision, retriever):
    answer = run_pipeline("self_rag", QUESTION, retriever, replay(decision, *SAID["self_rag"][1:]))
    assert len(answer.passages) == 3


def test_self_rag_takes_a_no_without_probabilities_as_certain(retriever):
    said = spoken("decide", "\n no", probability=0.1)
    silent = dataclasses.replace(said, pieces=tuple(dataclasses.replace(p, logprobs=()) for p in said.pieces))
    answer = run_pipeline("self_rag", QUESTION, retriever, replay(silent, spoken("answer", "dust")))
    assert answer.passages == ()


@pytest.mark.parametrize("name", PIPELINES)
def test_a_generation_that_ends_early_closes_the_session(name, retriever, router):
    for count in range(len(SAID[name])):
        with pytest.raises(TraceError, match="was not recorded"):
            run_pipeline(name, QUESTION, retriever, replay(*SAID[name][:count]))
        assert router.residency.n_resident == 0


def test_a_caller_who_stops_in_the_middle_gets_his_own_error(retriever, router):
    class EnoughError(Exception):
        pass

    def stop(_text):
        raise EnoughError

    with pytest.raises(EnoughError):
        run_pipeline("hyde", QUESTION, retriever, replay(*SAID["hyde"]), on_text=stop)
    assert router.residency.n_resident == 0


def test_a_generation_that_nobody_reads_any_more_is_closed(retriever):
    class Kept:
        """Keeps its streams, so that nothing but a call can close them."""

        def __init__(self):
            self.streams = []

        def generate(self, prompt, /):
            self.streams.append(replay(*SAID["hyde"]).generate(prompt))
            return self.streams[-1]

        def close(self):
            pass

    generator = Kept()
    with Steps(QUESTION, retriever, generator, on_text=lambda _: 1 / 0) as steps, pytest.raises(ZeroDivisionError):
        steps.generate("hypothesis", "x", max_tokens=9, show=True)
    assert list(generator.streams[0]) == []


def test_a_run_that_ends_while_lists_travel_gives_their_pages_back(router, documents):
    retriever = Retriever(router, query_embedder(documents), documents)
    for _ in range(5):
        with pytest.raises(TraceError):
            run_pipeline("hyde", QUESTION, retriever, replay())
    # A lookahead after theirs: copies of one device are made in order.
    with router.session() as session:
        session.lookahead(retriever.embed([QUESTION])).result(300)
    assert router.residency.n_resident == 0
    assert router.devices[0].used_bytes == 0


def test_models_that_say_nothing_leave_the_question(retriever):
    answer = run_pipeline("hyde", QUESTION, retriever, replay(spoken("hypothesis", " "), spoken("answer", "")))
    (search,) = [e for e in answer.events if isinstance(e, Retrieved)]
    assert search.texts == (QUESTION,)
    assert answer.text == ""
    answer = run_pipeline(
        "sub_question", QUESTION, retriever, replay(spoken("sub_questions", "\n\n"), spoken("answer", "x"))
    )
    (search,) = [e for e in answer.events if isinstance(e, Retrieved)]
    assert search.texts == (QUESTION,)


@pytest.mark.parametrize("question", ["", "  \n", "x" * 70_000])
def test_questions_that_are_none(question, retriever):
    with pytest.raises(InvalidInputError, match="question has"):
        run_pipeline("hyde", question, retriever, replay())


def test_an_unknown_pipeline_names_the_known(retriever):
    with pytest.raises(InvalidInputError, match="expected one of hyde, sub_question"):
        run_pipeline("none", QUESTION, retriever, replay())


def test_tokens_are_what_the_server_counted():
    said = spoken("answer", "two words")
    assert said.tokens == 2
    assert dataclasses.replace(said, completion_tokens=5).tokens == 5


def test_queries_are_centred_as_the_passages_were(documents):
    texts = ["a planet", "what is of"]
    expected = center(embedder().embed(texts), documents.info.mean)
    np.testing.assert_allclose(query_embedder(documents).embed(texts), expected, atol=1e-6)
    assert not np.allclose(expected, embedder().embed(texts), atol=1e-3)


def test_seconds_are_shared_out(retriever):
    answer = run_pipeline("hyde", QUESTION, retriever, replay(*SAID["hyde"]))
    assert 0 < answer.retrieval_s + answer.generation_s <= answer.seconds
    assert [e.tokens for e in answer.events if isinstance(e, Generated)] == [6, 3]


def test_short_answers_are_read():
    assert lines_of_list("1. a\n- b\n\n(3) c\n* a\n10: d", 9) == ["a", "b", "c", "d"]
    assert lines_of_list("1. a\n2. b", 1) == ["a"]
    assert [says_yes(text) for text in ("Yes", " **yes**, it", "no", "", "yesterday", "No, yes")] == [
        True, True, False, False, False, False,
    ]  # fmt: skip
    assert [says_no(text) for text in ("No", " **no**, it", "yes", "", "nothing", "Yes, no")] == [
        True, True, False, False, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize("name", PIPELINES)
def test_a_lookahead_has_the_time_of_the_generations_that_hide_it(name, retriever, monkeypatch):
    """Those that stand between it and the search, or the lookahead after it; nothing where one was not measured."""
    windows = []
    looked = LandingSession.lookahead
    monkeypatch.setattr(
        LandingSession,
        "lookahead",
        lambda self, drafts, /, *, nprobe=None, window_ms=None: (
            windows.append(window_ms),
            looked(self, drafts, nprobe=nprobe),
        ),
    )
    spoke = [step.name for step in SAID[name]]
    seconds = {step: 2.0**number for number, step in enumerate(dict.fromkeys(spoke))}
    for known, expected in ((seconds, HIDDEN[name]), ({}, [()] * len(HIDDEN[name]))):
        windows.clear()
        with Steps(QUESTION, retriever, replay(*SAID[name]), step_s=known) as steps:
            PIPELINES[name](steps)
        assert windows == [sum(seconds[step] for step in behind) * 1e3 or None for behind in expected]
    named = Retriever(retriever.source, embedder(), retriever.documents, lookahead_bytes=1 << 20)
    windows.clear()
    with Steps(QUESTION, named, replay(*SAID[name]), step_s=seconds) as steps:
        PIPELINES[name](steps)
    assert set(windows) <= {None}, "the retriever says what to move"
