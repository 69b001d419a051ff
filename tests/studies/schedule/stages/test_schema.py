"""Pipelines as files: what is shipped, what is refused."""

from __future__ import annotations

import sys

import pytest

from hybridindex.errors import InvalidInputError, MissingDependencyError
from hybridindex.studies.schedule import case, case_names, read_schema, schema_from
from hybridindex.studies.schedule.stages.stage_costs import stage_names


def test_the_four_cases_are_those_of_table_3():
    assert case_names() == ["case1", "case2", "case3", "case4"]
    one, two, three, four = (case(name) for name in case_names())
    assert one.database_vectors == three.database_vectors == four.database_vectors == 64 * 10**9
    assert two.document_encoder is not None
    assert two.document_encoder.parameters == 120e6
    assert two.brute_force
    assert two.chunks == two.database_vectors == 8929  # 1e6 / (128 - 16), upwards
    assert three.retrieval_frequency == 4
    assert four.query_rewriter is not None
    assert four.query_reranker is not None
    assert (one.prompt_tokens, one.output_tokens, one.question_tokens) == (512, 256, 32)
    assert one.database_bytes == pytest.approx(6.144e12)


def test_stages_follow_figure_3():
    assert stage_names(case("case1")) == ["retrieval", "prefix"]
    assert stage_names(case("case2")) == ["encode", "retrieval", "prefix"]
    assert stage_names(case("case4")) == ["rewrite prefix", "rewrite decode", "retrieval", "rerank", "prefix"]


def test_a_schema_is_read_from_a_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("generative_llm: llama3-70b\ndatabase_vectors: 1000\nqueries_per_retrieval: 2\n")
    schema = read_schema(file)
    assert (schema.generative_llm.name, schema.database_vectors, schema.queries_per_retrieval) == (
        "llama3-70b",
        1000,
        2,
    )


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({}, "generative_llm is missing"),
        ({"generative_llm": None}, "generative_llm is missing"),
        ({"generative_llm": "gpt-9"}, "generative_llm: model is 'gpt-9'; expected one of encoder-120m"),
        ({"generative_llm": "encoder-120m"}, "generative_llm is encoder-120m, an encoder; expected an LLM"),
        ({"generative_llm": 8}, "generative_llm is 8; expected the name"),
        ({"database_vektors": 5}, "database_vektors is not a field of a schema"),
        ({"database_vectors": -5}, "database_vectors is -5; expected a whole number, at least 1"),
        ({"database_vectors": 10**400}, "database_vectors is 1000"),
        ({"database_vectors": True}, "database_vectors is True"),
        ({"retrieval_frequency": 0}, "retrieval_frequency is 0"),
        ({"retrieval_frequency": 300}, "retrieval_frequency is 300; expected at most output_tokens, 256"),
        ({"queries_per_retrieval": 1.5}, r"queries_per_retrieval is 1\.5"),
        ({"output_tokens": -1}, "output_tokens is -1"),
        ({"scanned_fraction": 1.2}, r"scanned_fraction is 1\.2; expected above 0, at most 1"),
        ({"scanned_fraction": -0.1}, r"scanned_fraction is -0\.1"),
        ({"brute_force": "yes"}, "brute_force is 'yes'"),
        ({"query_rewriter": "encoder-120m"}, "query_rewriter is encoder-120m, an encoder"),
        ({"query_reranker": "llama3-8b"}, "query_reranker is llama3-8b, an LLM"),
        ({"document_encoder": "encoder-120m"}, "context_tokens is 0; a pipeline with a document_encoder"),
        ({"chunk_overlap_tokens": 128}, "chunk_overlap_tokens is 128; expected less than chunk_tokens, 128"),
    ],
)
def test_what_is_wrong_is_named(data, says):
    given = data if "generative_llm" in data or not data else {"generative_llm": "llama3-8b", **data}
    with pytest.raises(InvalidInputError, match=says):
        schema_from(given)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no fields; expected at least generative_llm"),
        ("- 1\n- 2\n", "holds no fields"),
        ("a: [", "is not YAML"),
        ("1: 2\ngenerative_llm: llama3-8b\n", "1 is not a field"),
        ("generative_llm: !!python/object/apply:os.system [true]\n", "is not YAML"),
        ("database_vectors: 5\n", "generative_llm is missing"),
        ("[" * 60_000, "is not YAML"),
        ("x" * 70_000, "is larger than 65536 bytes"),
    ],
)
def test_a_bad_file_is_named(tmp_path, text, says):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(InvalidInputError, match=says) as raised:
        read_schema(file)
    assert "bad.yaml" in str(raised.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InvalidInputError, match=r"none\.yaml cannot be read: No such file"):
        read_schema(tmp_path / "none.yaml")


def test_an_unknown_case_is_named():
    with pytest.raises(InvalidInputError, match="case is 'case9'; expected one of case1, case2, case3, case4"):
        case("case9")


def test_without_pyyaml_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(MissingDependencyError, match="pip install 'pyyaml"):
        case("case1")
