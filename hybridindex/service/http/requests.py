"""What requests may hold: one type each. Checks, error texts and the OpenAPI document are derived from it.

The first sentence of a field's description says what is expected, in the document and in errors. Tests send what the
document allows and what it forbids. Two rules stand there in words alone: a JSON body holds its own options, and
vectors have a greatest length.
"""

from collections.abc import Mapping, Set
from typing import Annotated, Any, Literal, get_args

import numpy as np
from pydantic import BeforeValidator, ConfigDict, FailFast, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from hybridindex.config import MAX_CANDIDATES
from hybridindex.index.attributes.where import MAX_WHERE_CHARACTERS
from hybridindex.plans.replan import ALL_IN_MEMORY, SOLVE
from hybridindex.service.config import Limits
from hybridindex.service.http.wire import (
    BodyError,
    check_known,
    parse_json_object,
    parse_number,
    read_npy,
    read_raw,
    read_rows,
    short,
)
from hybridindex.service.observe.events import MAX_EVENTS
from hybridindex.service.searches import SearchRequest
from hybridindex.types import F32, HitRateChoice

__all__ = ["EVENTS", "NOTHING", "SERIES", "WHOLE", "Body", "Query", "QueryBody", "Requests", "closed"]

#: Largest number of bytes in an option: an exabyte.
_MOST_BYTES = 10**18
#: With a smaller share of the copy time, lists would move for hours, and block other changes of the plan.
_LEAST_SHARE = 0.01
#: In each of the two lists of a search.
MAX_FILTER_IDS = 1_000_000
_LONG = {"allow_ids", "deny_ids", "where"}
_RAW, _NPY = "application/octet-stream", "application/x-npy"
#: Rows and columns of the first.
_SHAPE = frozenset({"n", "d"})
_HitRates = Annotated[HitRateChoice, Field(description=f"one of {', '.join(get_args(HitRateChoice))}")]
_Headroom = Annotated[float, Field(ge=0, le=10, description="a number 0..10")]
#: Of a TypedDict: strict, and no other keys.
closed = with_config(ConfigDict(extra="forbid", strict=True, allow_inf_nan=False))


def _whole(value: Any) -> Any:
    """8.0 in JSON is the integer 8 to JSON Schema, and to languages that know one kind of number."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53 else value


#: Beside a count.
WHOLE = BeforeValidator(_whole)
_Bytes = Annotated[int, Field(ge=0, le=_MOST_BYTES, description=f"whole bytes, 0..{_MOST_BYTES}"), WHOLE]
_Part = Annotated[float, Field(ge=0, le=1)]
_Positive = Annotated[float, Field(gt=0, description="a number above 0")]
_Share = Annotated[float, Field(ge=_LEAST_SHARE, le=1, description=f"{_LEAST_SHARE}..1")]
_Flag = Annotated[bool, Field(description="true or false", json_schema_extra={"default": False})]


def _count(most: int, more: str = "") -> Any:
    return Field(ge=1, le=most, description=f"an integer 1..{most}{more}")


class Query:
    """Options in a query string."""

    def __init__(self, kind: Any) -> None:
        """``kind``: a TypedDict."""
        self._kind = TypeAdapter(kind)
        self.schema = self._kind.json_schema()
        self.options: dict[str, Any] = self.schema["properties"]
        self._kinds = {name: schema.get("type") for name, schema in self.options.items()}
        self.parameters = [{"name": name, "in": "query", "schema": schema} for name, schema in self.options.items()]
        #: Of the OpenAPI document.
        self.document: dict[str, Any] = {"parameters": self.parameters}

    def parse_query(self, texts: Mapping[str, str], beside: Set[str] = frozenset()) -> dict[str, Any]:
        """What is given. ``beside``: options that stand there, too. Raises BodyError."""
        check_known(texts, self.options.keys() | beside)
        return self._check({name: self._value(name, text) for name, text in texts.items() if name not in beside})

    def _value(self, name: str, text: str) -> int | float | str:
        """A count that is not plain digits stays a text, which is no count."""
        kind = self._kinds[name]
        if kind == "string":
            return text
        number = parse_number(name, text)
        return text if kind == "integer" and isinstance(number, float) else number

    def _check(self, given: dict[str, Any]) -> dict[str, Any]:
        try:
            checked: dict[str, Any] = self._kind.validate_python(given)
        except ValidationError as error:
            name = str(error.errors(include_url=False, include_context=False)[0]["loc"][0])
            expected = self.options[name]["description"].partition(". ")[0]
            raise BodyError(name, f"is {short(given[name])}; expected {expected}") from None
        return checked


class Body(Query):
    """A JSON object."""

    def __init__(self, kind: Any, example: Mapping[str, Any], **schema: Any) -> None:
        """``schema``: what ``kind`` cannot say."""
        super().__init__(kind)
        self.schema |= schema
        json = {"application/json": {"schema": self.schema, "example": example}}
        self.document = {"requestBody": {"content": json}}

    def parse(self, body: bytes) -> dict[str, Any]:
        """What is given. Raises BodyError."""
        return self._check(parse_json_object(body, self.options.keys()))


class QueryBody(Body):
    """Queries and options: all in JSON; or raw float32 values or a ``.npy`` file, and options in the query string."""

    def __init__(self, kind: Any, example: Mapping[str, Any], limits: Limits, dim: int) -> None:
        super().__init__(kind, {"queries": [[round(0.1 * (i % 10), 1) for i in range(dim)]], **example})
        self._limits, self._dim = limits, dim
        #: Options that a query string is too short for.
        self._long = _LONG & self.options.keys()
        row = {"type": "array", "minItems": dim, "maxItems": dim, "items": {"type": "number"}}
        queries = {
            "description": "One query, or several. Finite in float32, and no longer than 1.58e18.",
            "oneOf": [row, {"type": "array", "minItems": 1, "maxItems": limits.max_queries, "items": row}],
        }
        self.schema |= {"properties": {"queries": queries, **self.options}, "required": ["queries"]}
        words = "Rows of an octet-stream; default what the body makes."
        shape = {
            "n": {"type": "integer", "minimum": 1, "maximum": limits.max_queries, "description": words},
            "d": {"const": dim, "type": "integer", "description": "Its columns."},
        }
        beside = [{"name": name, "in": "query", "schema": schema} for name, schema in shape.items()]
        own = [each for each in self.parameters if each["name"] not in self._long]
        self.parameters = [{**each, "description": "Binary bodies only."} for each in beside + own]
        asked = self.document["requestBody"]
        asked["content"] |= {kind: {"schema": {"type": "string", "format": "binary"}} for kind in (_RAW, _NPY)}
        self.document |= {"parameters": self.parameters, "requestBody": {**asked, "required": True}}

    def read(self, body: bytes, content_type: str, options: Mapping[str, str]) -> tuple[F32, dict[str, Any]]:
        """(n, d) float32 queries, and the options that are given.

        Args:
            content_type: media type without parameters, lower case.

        Raises:
            BodyError: names the field.
        """
        if content_type == "application/json":
            given = parse_json_object(body, {"queries", *self.options})
            if "queries" not in given:
                raise BodyError("queries", "is missing; expected a list of numbers, or a list of such lists")
            for name in options:
                raise BodyError(short(name), "stands in the query string; with JSON it belongs in the body")
            return read_rows(given.pop("queries"), self._limits.max_queries, self._dim), self._check(given)
        if content_type not in (_RAW, _NPY):
            words = f"is {short(content_type)}; expected application/json, {_RAW} or {_NPY}"
            raise BodyError("Content-Type", words, 415)
        for name in self._long & options.keys():
            raise BodyError(name, "stands in the query string; expected it in a JSON body, with the queries")
        raw = content_type == _RAW
        given = self.parse_query(options, _SHAPE if raw else frozenset())
        if raw:
            return read_raw(body, options, self._limits, self._dim), given
        return read_npy(body, self._limits.max_queries, self._dim), given


@closed
class _Series(TypedDict, total=False):
    since: Annotated[float, Field(description="a number. Only what ended later: seconds since 1970.")]


@closed
class _Events(TypedDict, total=False):
    since: Annotated[
        int, Field(ge=0, lt=1 << 63, description="the id of an event, or 0. Only events with a larger id."), WHOLE
    ]
    limit: Annotated[int, _count(MAX_EVENTS, ". Default: 100."), WHOLE]


@closed
class _Nothing(TypedDict):
    pass


SERIES, EVENTS, NOTHING = Query(_Series), Query(_Events), Body(_Nothing, {})


class Requests:
    """The bodies that one daemon takes."""

    def __init__(self, limits: Limits, dim: int, nlist: int, n_devices: int) -> None:
        self._most_rows = limits.max_answer_rows
        most = min(nlist, limits.max_nprobe or nlist)
        budgets = f"whole bytes, 0..{_MOST_BYTES}, or a list of {n_devices} such numbers, one per device"
        each = Field(min_length=n_devices, max_length=n_devices, strict=False)
        cached = f"whole bytes of memory for rows on disk, 0..{_MOST_BYTES}, or {ALL_IN_MEMORY!r}: they are in memory"
        window = "a number above 0. Instead of bytes: the time that hides the copies."
        deadline = (
            "a positive number of milliseconds, a day at most. nprobe may be lowered, down to min_nprobe, to answer by "
            "then."
        )
        named = f"a list of at most {MAX_FILTER_IDS} integers. JSON bodies only. "
        allowed = f"{named}Ids that may be answered; default: all. Unknown ids change nothing."
        deleted = f"a list of at most {MAX_FILTER_IDS} integers. Unknown ids change nothing. Or where."
        denied = f"{named}Ids that may not be answered."
        condition = (
            f"a text of at most {MAX_WHERE_CHARACTERS} characters. JSON bodies only. A condition on attributes that "
            "rows must meet, such as lang = 'en' AND year >= 2020."
        )
        one_id = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63), WHOLE]
        partial = (
            "a number above 0, at most 1. In a cluster: the smallest share of each query's work that an answer may "
            "rest on if nodes are away or late. Default: all of it, else an error."
        )
        compared = ". Rows that a search by codes compares exactly, k at least. Default: the daemon's."

        @closed
        class Search(TypedDict, total=False):
            k: Annotated[int, _count(limits.max_k, ". Default: 10."), WHOLE]
            nprobe: Annotated[int, _count(most, ". Default: the plan's."), WHOLE]
            deadline_ms: Annotated[float, Field(gt=0, le=86_400_000, description=deadline)]
            min_nprobe: Annotated[int, _count(most, ". Floor of nprobe under a deadline or overload."), WHOLE]
            candidates: Annotated[int, _count(MAX_CANDIDATES, compared), WHOLE]
            allow_partial: Annotated[float, Field(gt=0, le=1, description=partial)]
            allow_ids: Annotated[list[one_id], FailFast(), Field(max_length=MAX_FILTER_IDS, description=allowed)]
            deny_ids: Annotated[list[one_id], FailFast(), Field(max_length=MAX_FILTER_IDS, description=denied)]
            where: Annotated[str, Field(max_length=MAX_WHERE_CHARACTERS, description=condition)]

        @closed
        class Delete(TypedDict, total=False):
            ids: Annotated[list[one_id], FailFast(), Field(max_length=MAX_FILTER_IDS, description=deleted)]
            where: Annotated[str, Field(max_length=MAX_WHERE_CHARACTERS, description=condition)]

        @closed
        class Lookahead(TypedDict, total=False):
            nprobe: Annotated[int, _count(most, ". Default: the plan's."), WHOLE]
            budget_bytes: _Bytes
            window_ms: Annotated[
                float, Field(gt=0, le=86_400_000, description="generation time that hides these copies")
            ]

        @closed
        class Session(TypedDict, total=False):
            lookahead_bytes: _Bytes
            window_ms: Annotated[float, Field(gt=0, description=window)]

        @closed
        class Repartition(TypedDict, total=False):
            apply: _Flag
            slo_ms: _Positive
            device_budget_bytes: Annotated[_Bytes | Annotated[tuple[_Bytes, ...], each], Field(description=budgets)]
            rate_qps: _Positive
            coverage: Annotated[_Part | Literal["solve"], Field(description=f"a number 0..1, or {SOLVE!r}")]
            hit_rate_model: _HitRates
            headroom: _Headroom
            row_cache_bytes: Annotated[_Bytes | Literal["all"], Field(description=cached)]
            bandwidth_share: _Share
            force: _Flag

        @closed
        class Apply(TypedDict, total=False):
            dry_run: _Flag
            force: _Flag
            bandwidth_share: _Share

        self.search = QueryBody(Search, {"k": 2}, limits, dim)
        self.lookahead = QueryBody(Lookahead, {"budget_bytes": 1 << 20}, limits, dim)
        self.recent = QueryBody(_Nothing, {}, limits, dim)
        both = {"required": ["lookahead_bytes", "window_ms"]}
        self.session = Body(Session, {"lookahead_bytes": 8 << 20}, **{"not": both})
        self.repartition = Body(Repartition, {"apply": False, "slo_ms": 50, "coverage": SOLVE})
        self.apply = Body(Apply, {"force": False})
        either = {"oneOf": [{"required": ["ids"]}, {"required": ["where"]}]}
        self.delete = Body(Delete, {"ids": [17, 4]}, **either)
        self.delete.document["requestBody"]["required"] = True

    def read_search(self, body: bytes, content_type: str, options: Mapping[str, str]) -> SearchRequest:
        """As :meth:`QueryBody.read`."""
        queries, given = self.search.read(body, content_type, options)
        for name in ("allow_ids", "deny_ids"):
            if name in given:
                given[name] = np.array(given[name], dtype=np.int64)
        asked = SearchRequest(queries=queries, **given)
        if len(queries) * asked.k > self._most_rows:
            words = f"is {asked.k} for {len(queries)} queries; expected at most {self._most_rows} answers in all"
            raise BodyError("k", words)
        return asked
