"""Bodies: every format reads the same queries, and every wrong body names its field."""

import io
import json
from typing import Annotated

import numpy as np
import pytest
from pydantic import Field
from typing_extensions import TypedDict

from hybridindex.answer_codec import decode_answer, encode_answer
from hybridindex.errors import InvalidInputError
from hybridindex.service.config import Limits
from hybridindex.service.http.requests import Query, Requests
from hybridindex.service.http.wire import BodyError, accepts_binary, to_json_answer
from hybridindex.types import SearchResult

DIM, NLIST = 4, 10
LIMITS = Limits(max_queries=8, max_k=20, max_nprobe=6, max_answer_rows=100)
REQUESTS = Requests(LIMITS, DIM, NLIST, n_devices=2)
QUERIES = np.arange(12, dtype=np.float32).reshape(3, DIM) / 7


def npy(array) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    return stream.getvalue()


def parse(body, kind="application/json", **options):
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
    return REQUESTS.read_search(body, kind, options)


def raw(array, **options):
    return parse(array.tobytes(), "application/octet-stream", **options)


@pytest.mark.parametrize(
    "asked",
    [
        parse({"queries": QUERIES.tolist(), "k": 5, "nprobe": 6, "deadline_ms": 1.5, "min_nprobe": 2}),
        raw(QUERIES, n="3", d="4", k="5", nprobe="6", deadline_ms="1.5", min_nprobe="2"),
        raw(QUERIES, k="5", nprobe="6", deadline_ms="1.5", min_nprobe="2"),
        parse(npy(QUERIES), "application/x-npy", k="5", nprobe="6", deadline_ms="1.5", min_nprobe="2"),
        parse(npy(QUERIES.astype(">f4")), "application/x-npy", k="5", nprobe="6", deadline_ms="1.5", min_nprobe="2"),
    ],
)
def test_all_formats_read_the_same(asked):
    assert asked.queries.dtype == np.float32
    assert asked.queries.dtype.isnative
    assert np.array_equal(asked.queries, QUERIES)
    assert (asked.k, asked.nprobe, asked.deadline_ms, asked.min_nprobe) == (5, 6, 1.5, 2)


def test_one_query_is_a_row():
    assert parse({"queries": QUERIES[0].tolist()}).queries.shape == (1, DIM)
    assert parse(npy(QUERIES[0]), "application/x-npy").queries.shape == (1, DIM)


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("queries", {}),
        ("queries", {"queries": []}),
        ("queries", {"queries": 3}),
        ("queries", {"queries": [[1, 2, 3, 4], [1, 2, 3]]}),
        ("queries", {"queries": [[1, 2, 3]]}),
        ("queries", {"queries": [["1", "2", "3", "4"]]}),
        ("queries", {"queries": [[True, False, True, True]]}),
        ("queries", {"queries": [[1, 2, None, 4]]}),
        ("queries", {"queries": [[1, 2, 10**400, 4]]}),
        ("queries", {"queries": [[[1], [2], [3], [4]]]}),
        ("queries", {"queries": [[0] * DIM] * 9}),
        ("k", {"queries": [0] * DIM, "k": 0}),
        ("k", {"queries": [0] * DIM, "k": 21}),
        ("k", {"queries": [0] * DIM, "k": "5"}),
        ("k", {"queries": [0] * DIM, "k": True}),
        ("k", {"queries": [[0] * DIM] * 6, "k": 20}),
        ("nprobe", {"queries": [0] * DIM, "nprobe": 7}),
        ("min_nprobe", {"queries": [0] * DIM, "min_nprobe": 0}),
        ("deadline_ms", {"queries": [0] * DIM, "deadline_ms": 0}),
        ("deadline_ms", {"queries": [0] * DIM, "deadline_ms": "soon"}),
        ("'colour'", {"queries": [0] * DIM, "colour": 1}),
        ("body", []),
        ("body", b"{"),
        ("body", b"\xff\xfe"),
        ("body", b"[" * 100_000),
        ("body", b'{"queries": [NaN, 0, 0, 0]}'),
        ("body", b'{"queries": [Infinity, 0, 0, 0]}'),
    ],
)
def test_wrong_json_names_its_field(field, body):
    with pytest.raises(BodyError) as wrong:
        parse(body)
    assert wrong.value.field == field
    assert wrong.value.status == 400


@pytest.mark.parametrize(
    ("field", "options", "body"),
    [
        ("body", {"n": "3"}, QUERIES.tobytes()[:-1]),
        ("body", {"n": "2"}, QUERIES.tobytes()),
        ("n", {"n": "0"}, b""),
        ("n", {"n": "-1"}, QUERIES.tobytes()),
        ("n", {"n": "x"}, QUERIES.tobytes()),
        ("n", {}, b""),
        ("queries", {"n": "9"}, QUERIES.tobytes()),
        ("queries", {"d": "5"}, QUERIES.tobytes()),
        ("d", {"d": "0"}, QUERIES.tobytes()),
        ("d", {"d": "99999999999999999999999"}, QUERIES.tobytes()),
        ("k", {"k": "1.5"}, QUERIES.tobytes()),
        ("deadline_ms", {"deadline_ms": "nan"}, QUERIES.tobytes()),
        ("'color'", {"color": "1"}, QUERIES.tobytes()),
    ],
)
def test_wrong_octets_name_their_field(field, options, body):
    with pytest.raises(BodyError) as wrong:
        parse(body, "application/octet-stream", **options)
    assert wrong.value.field == field


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x93NUMPY",
        npy(QUERIES)[:-1],
        npy(QUERIES) + b"x",
        npy(QUERIES.astype(np.float64)),
        npy(QUERIES.astype(np.int32)),
        npy(np.asfortranarray(QUERIES)),
        npy(QUERIES[None]),
        npy(np.array([{"a": 1}], dtype=object)),
        npy(np.zeros((2, 5), np.float32)),
        b"\x93NUMPY\x01\x00\x10\x00{'descr': '<f4',",
        b"\x93NUMPY\x09\x00\x10\x00{'descr': '<f4',",
        b"\x93NUMPY\x02\x00\xff\xff\xff\x7f{}",
        b"\x93NUMPY\x01\x00\x46\x00{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 4)}            \n",
        # Of one row, for who takes True for a number.
        b"\x93NUMPY\x01\x00\x47\x00{'descr': '<f4', 'fortran_order': False, 'shape': (True, 4)}          \n"
        + bytes(16),
    ],
)
def test_wrong_npy_is_refused_and_nothing_is_unpickled(body):
    with pytest.raises(BodyError) as wrong:
        parse(body, "application/x-npy")
    assert wrong.value.field in ("body", "queries")


def test_another_media_type_is_415():
    with pytest.raises(BodyError) as wrong:
        parse(b"", "text/html")
    assert wrong.value.status == 415


def test_options_of_json_belong_into_the_body():
    with pytest.raises(BodyError, match="belongs in the body"):
        parse({"queries": [0] * DIM}, k="3")


def test_lookahead_takes_its_own_options():
    read = REQUESTS.lookahead.read
    queries, options = read(QUERIES.tobytes(), "application/octet-stream", {"budget_bytes": "100"})
    assert np.array_equal(queries, QUERIES)
    assert options == {"budget_bytes": 100}
    with pytest.raises(BodyError, match="budget_bytes"):
        read(b'{"queries": [0, 0, 0, 0], "budget_bytes": -1}', "application/json", {})
    with pytest.raises(BodyError, match="'k'"):
        read(QUERIES.tobytes(), "application/octet-stream", {"k": "1"})


A_DAY = "a positive number of milliseconds, a day at most"
BUDGETS = f"whole bytes, 0..{10**18}, or a list of 2 such numbers, one per device"
CHANGES = (
    "apply, bandwidth_share, coverage, device_budget_bytes, force, headroom, hit_rate_model, rate_qps, "
    "row_cache_bytes, slo_ms"
)


def words(call, *given):
    with pytest.raises(BodyError) as wrong:
        call(*given)
    return str(wrong.value)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"k": 0}, "k is 0; expected an integer 1..20"),
        ({"k": True}, "k is True; expected an integer 1..20"),
        ({"k": 1.5}, "k is 1.5; expected an integer 1..20"),
        ({"k": None}, "k is null; expected a value, or no such key"),
        ({"nprobe": 7}, "nprobe is 7; expected an integer 1..6"),
        ({"deadline_ms": False}, f"deadline_ms is False; expected {A_DAY}"),
        ({"deadline_ms": 86_400_001}, f"deadline_ms is 86400001; expected {A_DAY}"),
        ({"deadline_ms": 10**400}, f"deadline_ms is 1{'0' * 56}...; expected {A_DAY}"),
        ({"queries": [[1, True, 0, 0]]}, "queries holds something other than numbers; expected (n, 4) of them"),
        ({"queries": [[1, 2, 3, 4], 5]}, "queries has rows of different lengths; expected 4 numbers each"),
        ({"queries": [1, 2, 3, 10**400]}, "queries holds a number that is larger than any float32"),
    ],
)
def test_a_wrong_value_is_told_what_would_be_right(body, said):
    assert words(parse, {"queries": [0] * DIM, **body}) == said


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32-le", "utf-8-sig"])
def test_json_is_utf_8(encoding):
    assert words(parse, '{"queries": [0, 0, 0, 0]}'.encode(encoding)).startswith("body is not JSON")
    assert words(parse, b'{"\xed\xa0\x80": 1}').startswith("body is not JSON")


def test_options_of_a_query_string_are_numbers_or_words():
    class Asked(TypedDict, total=False):
        step: Annotated[str, Field(max_length=5, description="a step")]
        n: Annotated[int, Field(description="a number")]

    query = Query(Asked)
    assert query.parse_query({"step": "12", "n": "12"}) == {"step": "12", "n": 12}
    assert words(query.parse_query, {"n": "12", "other": "x"}) == "'other' is not known here; expected n, step"
    assert words(query.parse_query, {"step": "longer"}) == "step is 'longer'; expected a step"
    assert words(query.parse_query, {"n": "twelve"}) == "n is 'twelve'; expected a number"


@pytest.mark.parametrize("text", ["5.0", "5e0", "1e1", "+5", "-5", " 5"])
def test_counts_in_a_query_string_are_plain_digits(text):
    for option in ("k", "nprobe", "n", "d"):
        assert words(lambda name=option: raw(QUERIES, **{name: text})).startswith(f"{option} is ")
    assert raw(QUERIES, k="8", deadline_ms="1e1").deadline_ms == 10


def test_a_key_given_twice_is_refused():
    body = b'{"queries": [0, 0, 0, 0], "k": 3, "k": 5}'
    assert words(parse, body) == "'k' is given twice; expected each key once"


def test_json_of_another_language_writes_integers_with_a_point():
    assert parse(b'{"queries": [0, 0, 0, 0], "k": 5.0}').k == 5
    assert REQUESTS.repartition.parse(b'{"device_budget_bytes": [8.0, 9]}') == {"device_budget_bytes": (8, 9)}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"apply": 1}, "apply is 1; expected true or false"),
        ({"slo_ms": "fast"}, "slo_ms is 'fast'; expected a number above 0"),
        ({"slo_ms": True}, "slo_ms is True; expected a number above 0"),
        ({"bandwidth_share": 0}, "bandwidth_share is 0; expected 0.01..1"),
        ({"coverage": True}, "coverage is True; expected a number 0..1, or 'solve'"),
        ({"coverage": 2}, "coverage is 2; expected a number 0..1, or 'solve'"),
        ({"coverage": "solved"}, "coverage is 'solved'; expected a number 0..1, or 'solve'"),
        (
            {"device_budget_bytes": [1, True]},
            f"device_budget_bytes is [1, True]; expected {BUDGETS}",
        ),
        (
            {"device_budget_bytes": [1]},
            f"device_budget_bytes is [1]; expected {BUDGETS}",
        ),
        ({"color": 1}, f"'color' is not known here; expected {CHANGES}"),
    ],
)
def test_a_wrong_change_of_the_plan_is_told_what_would_be_right(body, said):
    assert words(REQUESTS.repartition.parse, json.dumps(body).encode()) == said


def answer() -> SearchResult:
    return SearchResult(
        ids=np.array([[5, 7], [9, -1]]),
        distances=np.array([[0.5, 1.5], [2.0, np.inf]], np.float32),
        nprobe_used=np.array([3, 2], np.int32),
        hit_rate=np.array([0.25, 1], np.float32),
    )


def test_a_binary_answer_comes_back_as_it_was():
    back = decode_answer(encode_answer(answer()))
    for name in ("ids", "distances", "nprobe_used", "hit_rate"):
        assert np.array_equal(getattr(back, name), getattr(answer(), name))
        assert getattr(back, name).dtype == getattr(answer(), name).dtype


@pytest.mark.parametrize("spoil", [lambda b: b[:-1], lambda b: b + b"x", lambda b: b"X" + b[1:], lambda b: b[:7]])
def test_a_spoilt_answer_is_refused(spoil):
    with pytest.raises(InvalidInputError, match=r"^answer "):
        decode_answer(spoil(encode_answer(answer())))


def test_an_empty_place_is_null_in_json():
    plain = to_json_answer(answer())
    assert plain["distances"] == [[0.5, 1.5], [2.0, None]]
    json.dumps(plain, allow_nan=False)


def test_json_is_the_default_answer():
    assert not accepts_binary("")
    assert not accepts_binary("*/*, application/json")
    assert accepts_binary("application/vnd.hybridindex.answer")
    assert accepts_binary("text/html, application/octet-stream;q=0.5")
