"""Real queries beside the demo's log, and pairs of a draft and the query that follows it.

They are read from inside the Anserini jar in the pyserini wheel (:mod:`hybridindex.demo.queries`), from the FanOutQA
wheel and from the TSV files of the convrewriting wheel (its pickles are never opened). None of them is part of this
project: they are fetched when a program asks for them, and the terms of each collection apply.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hybridindex.demo.chunk import tidy
from hybridindex.demo.queries import clean, colon_lines, topic_file
from hybridindex.rag.wheels import WheelSpec
from hybridindex.types import I64

__all__ = [
    "CONVREWRITING_WHEEL",
    "FANOUTQA_WHEEL",
    "QUERY_SOURCES",
    "Pair",
    "QuerySource",
    "read_conversations",
    "read_pairs",
    "read_queries",
    "session_numbers",
]

FANOUTQA_WHEEL = WheelSpec(
    name="fanoutqa",
    version="1.1.1",
    sha256="1d97c901e62e90507ac0c039a357895308bed1c6a5b49207ae81d81eac6fd795",
    size_mb=0.4,
)
CONVREWRITING_WHEEL = WheelSpec(
    name="convrewriting",
    version="0.0.1",
    sha256="32fab77f58fa0d3a332ef5fa7bf2590822502956b6862a5389f0c89fe6fa62d8",
    size_mb=5.5,
)

_FANOUT_DATA = "fanoutqa/data/fanout-final-dev.json"
_CAST_TURNS = ("convrewriting/data/datasets/training_set.tsv", "convrewriting/data/datasets/test_set.tsv")
_TREC_PAIRS = (
    *("robust04", "robust05", "core17", "core18", "adhoc.51-100", "adhoc.101-150", "adhoc.151-200"),
    *("adhoc.401-450", "adhoc.451-550", "terabyte04.701-750", "terabyte05.751-800", "terabyte06.801-850"),
)
_WEB_PAIRS = ("1-50", "51-100", "101-150", "151-200", "201-250", "251-300")

Pair = tuple[str, str, str]  # (draft, final, kind)


def tab_second(text: str) -> Iterator[str]:
    """Queries of lines like ``id<TAB>words``. (``splitlines`` would also cut at characters inside questions.)"""
    for line in text.split("\n"):
        yield line.partition("\t")[2]


def tab_first(text: str) -> Iterator[str]:
    """Queries of lines like ``words<TAB>answers``."""
    for line in text.split("\n"):
        yield line.partition("\t")[0]


def question_json_lines(text: str) -> Iterator[str]:
    """Queries of lines like ``{"question": "words", "answer": [...]}``."""
    for line in text.split("\n"):
        if line.strip():
            yield json.loads(line)["question"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuerySource:
    """A collection of queries: its topic files (in order) and how to read them."""

    name: str
    title: str
    files: tuple[str, ...]
    parse: Callable[[str], Iterator[str]]


QUERY_SOURCES: tuple[QuerySource, ...] = (
    QuerySource(
        name="million-query",
        title="TREC Million Query 2007 to 2009",
        files=("mq.1-10000", "mq.10001-20000", "mq.20001-60000"),
        parse=colon_lines,
    ),
    QuerySource(
        name="msmarco",
        title="MS MARCO development and test queries",
        files=("msmarco-passage.dev-subset", "msmarco-passage.test-subset", "msmarco-doc.dev", "msmarco-doc.test"),
        parse=tab_second,
    ),
    QuerySource(name="nq", title="Natural Questions (open)", files=("dpr.nq.dev", "dpr.nq.test"), parse=tab_first),
    QuerySource(name="triviaqa", title="TriviaQA", files=("dpr.trivia.dev", "dpr.trivia.test"), parse=tab_first),
    QuerySource(name="squad", title="SQuAD (open)", files=("dpr.squad.test",), parse=question_json_lines),
)


def read_queries(topics: zipfile.ZipFile, source: QuerySource) -> list[str]:
    """The queries of a source in their order; empty ones left out, repeats kept."""
    return [query for file in source.files for query in clean(source.parse(topic_file(topics, file)))]


def read_pairs(topics: zipfile.ZipFile, fanoutqa_wheel: Path, convrewriting_wheel: Path) -> list[Pair]:
    """(draft, final, kind): what is known early, and the query that follows. Distinct, in a fixed order.

    Kinds: ``trec`` title → description, ``web`` query → description or facet, ``fanout`` question → sub-question,
    ``cast`` turn alone → turn with the conversation before it.
    """
    pairs: list[Pair] = []
    for name in _TREC_PAIRS:
        pairs += [(title, description, "trec") for title, description in trec_topics(topic_file(topics, name))]
    for years in _WEB_PAIRS:
        pairs += [(query, final, "web") for query, final in web_topics(topic_file(topics, f"web.{years}"))]
    with zipfile.ZipFile(fanoutqa_wheel) as wheel:
        for question in json.loads(wheel.read(_FANOUT_DATA)):
            pairs += [(draft, final, "fanout") for draft, final in fanout_steps(question)]
    for turns in read_conversations(convrewriting_wheel):
        pairs += [(turns[i], " ".join(turns[: i + 1]), "cast") for i in range(1, len(turns))]
    clean = ((tidy(draft), tidy(final), kind) for draft, final, kind in pairs)
    return list(dict.fromkeys(pair for pair in clean if pair[0] and pair[1] and pair[0] != pair[1]))


def session_numbers(pairs: Sequence[Pair]) -> I64:
    """(n,) int64, ascending from 0: which of the pairs, in the order of :func:`read_pairs`, one user's session has.

    A pair continues the session of the pair before it where its draft is known from that session already (the same
    question or query, or a sub-question of it), or where it is the next turn of the same conversation.
    """
    numbers = np.zeros(len(pairs), dtype=np.int64)
    known: set[str] = set()
    before: Pair = ("", "", "")
    number = -1
    for i, (draft, final, kind) in enumerate(pairs):
        follows = final.startswith(f"{before[1]} ") if kind == "cast" else draft in known
        if kind != before[2] or not follows:
            number += 1
            known = set()
        known |= {draft, final}
        before = draft, final, kind
        numbers[i] = number
    return numbers


def read_conversations(convrewriting_wheel: Path) -> list[list[str]]:
    """Conversations (TREC CAsT) as lists of turns, those of two turns and more."""
    turns: dict[str, list[str]] = {}
    with zipfile.ZipFile(convrewriting_wheel) as wheel:
        for file in _CAST_TURNS:
            for row in _rows(wheel, file):
                turns.setdefault(row[0].rpartition("_")[0], []).append(tidy(row[1]))
    return [conversation for conversation in turns.values() if len(conversation) > 1]


def _rows(wheel: zipfile.ZipFile, member: str) -> Iterator[list[str]]:
    for line in wheel.read(member).decode("utf-8", errors="replace").split("\n"):
        if (row := line.split("\t")) and len(row) >= 3:
            yield row


def trec_topics(text: str) -> Iterator[tuple[str, str]]:
    """(title, description) of classic TREC topics, whose tags are mostly not closed."""
    for topic in re.split(r"<top>", text)[1:]:
        fields: dict[str, str] = dict(re.findall(r"<(title|desc)>([^<]*)", topic))
        title = re.sub(r"^\s*Topic:", "", fields.get("title", ""))
        description = re.sub(r"^\s*Description:?", "", fields.get("desc", ""))
        if title.strip() and description.strip():
            yield title, description


def web_topics(text: str) -> Iterator[tuple[str, str]]:
    """(query, description) and (query, facet) pairs of TREC Web topics."""
    for topic in re.findall(r"<topic\b.*?</topic>", text, re.DOTALL):
        query = re.search(r"<query>(.*?)</query>", topic, re.DOTALL)
        if query is None:
            continue
        for final in re.findall(r"<(?:description|subtopic)\b[^>]*>(.*?)</(?:description|subtopic)>", topic, re.DOTALL):
            yield query[1], final


def fanout_steps(question: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(question, sub-question) of a FanOutQA question, at every level of its decomposition."""
    for step in question["decomposition"]:
        yield question["question"], step["question"]
        yield from fanout_steps(step)
