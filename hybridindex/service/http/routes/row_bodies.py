"""Bodies of rows that come: JSON, the layout of :mod:`hybridindex.answer_codec`, or a ``.npy`` file."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import FailFast, Field
from typing_extensions import TypedDict

from hybridindex.answer_codec import ROWS_TYPE, decode_rows
from hybridindex.errors import InvalidInputError
from hybridindex.service.config import Limits
from hybridindex.service.http.requests import WHOLE, Body, closed
from hybridindex.service.http.routes.changing import KEY_PARAMETER
from hybridindex.service.http.wire import BodyError, check_shape, parse_json_object, read_npy, read_rows, short
from hybridindex.types import F32, I64

__all__ = ["COMPACT", "RowsBody", "RowsRequest"]

_NPY = "application/x-npy"
_NULLABLE = frozenset({"ids", "attributes"})

_Id = Annotated[int, Field(ge=0, lt=1 << 63), WHOLE]
_IDS = "a list of different integers of 0 or more, one for each vector. Default: numbers above all existing ids."
_ATTRIBUTES = (
    "an object of lists, each with a value for each vector. Attributes of the index; dates are ISO 8601 texts. "
    "Default: missing values."
)
_MODE = "add or upsert. add refuses existing ids; upsert replaces their rows. Default: add."


@closed
class _Rows(TypedDict, total=False):
    ids: Annotated[list[_Id], FailFast(), Field(description=_IDS)]
    attributes: Annotated[dict[str, list[Any]], Field(description=_ATTRIBUTES)]
    mode: Annotated[Literal["add", "upsert"], Field(description=_MODE, json_schema_extra={"default": "add"})]


@closed
class _Compact(TypedDict, total=False):
    wait: Annotated[
        bool,
        Field(
            description="true or false. true: answer when the compaction is done; false: when it has begun.",
            json_schema_extra={"default": False},
        ),
    ]


COMPACT = Body(_Compact, {"wait": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsRequest:
    """Rows that shall come."""

    #: (n, dim).
    vectors: F32
    #: (n,); None: to be numbered.
    ids: I64 | None
    #: Lists by name.
    attributes: dict[str, list[Any]] | None
    replace: bool


class RowsBody(Body):
    """What ``POST /v1/vectors`` takes."""

    def __init__(self, limits: Limits, dim: int) -> None:
        vector = [round(0.1 * (i % 10), 1) for i in range(dim)]
        super().__init__(_Rows, {"vectors": [vector], "ids": [17], "mode": "upsert"})
        self._most, self._dim = limits.max_rows, dim
        for name in _NULLABLE:
            given = self.options[name]
            words = {"description": given.pop("description"), "title": given.pop("title")}
            self.options[name] = {**words, "oneOf": [given, {"type": "null"}]}
        row = {"type": "array", "minItems": dim, "maxItems": dim, "items": {"type": "number"}}
        vectors = {
            "description": "One vector, or several. Finite in float32, and no longer than 1.58e18.",
            "oneOf": [row, {"type": "array", "minItems": 1, "maxItems": limits.max_rows, "items": row}],
        }
        self.schema |= {"properties": {"vectors": vectors, **self.options}, "required": ["vectors"]}
        asked = self.document["requestBody"]
        binary = {"schema": {"type": "string", "format": "binary"}}
        asked["content"] |= dict.fromkeys((ROWS_TYPE, _NPY), binary)
        mode = {"name": "mode", "in": "query", "schema": self.options["mode"], "description": "Of .npy bodies only."}
        self.document = {"parameters": [mode, *KEY_PARAMETER], "requestBody": {**asked, "required": True}}

    def json_of(self, body: bytes, content_type: str) -> bytes:
        """The part of it that is JSON; what is wrong with the body, :meth:`read` says."""
        if content_type == "application/json":
            return body
        if content_type != ROWS_TYPE:
            return b""
        with suppress(InvalidInputError):
            return bytes(decode_rows(body).more)
        return b""

    def read(self, body: bytes, content_type: str, options: Mapping[str, str]) -> RowsRequest:
        """
        Args:
            content_type: media type without parameters, lower case.

        Raises:
            BodyError: names the field.
        """
        if content_type == _NPY:
            known = {"mode": self._check(dict(options))["mode"]} if set(options) == {"mode"} else {}
            for name in options.keys() - known.keys():
                raise BodyError(short(name), "is not known here; expected mode")
            return self._request(read_npy(body, self._most, self._dim, "vectors"), None, known)
        for name in options:
            raise BodyError(short(name), "stands in the query string; with this body it belongs in there")
        if content_type == "application/json":
            given = parse_json_object(body, {"vectors", *self.options}, _NULLABLE)
            if "vectors" not in given:
                raise BodyError("vectors", "is missing; expected a list of numbers, or a list of such lists")
            vectors = read_rows(given.pop("vectors"), self._most, self._dim, "vectors")
            return self._request(vectors, None, self._check(given))
        if content_type != ROWS_TYPE:
            words = f"is {short(content_type)}; expected application/json, {ROWS_TYPE} or {_NPY}"
            raise BodyError("Content-Type", words, 415)
        try:
            rows = decode_rows(body)
        except InvalidInputError as error:
            raise BodyError("body", str(error).removeprefix("body ")) from None
        n, d = rows.vectors.shape
        check_shape(n, d, self._most, self._dim, "vectors")
        more = self._check(parse_json_object(rows.more, self.options.keys() - {"ids"}, _NULLABLE))
        return self._request(rows.vectors, rows.ids, more)

    def _request(self, vectors: F32, ids: I64 | None, given: Mapping[str, Any]) -> RowsRequest:
        if "ids" in given:
            ids = np.array(given["ids"], dtype=np.int64)
        replace = given.get("mode", "add") == "upsert"
        if replace and ids is None:
            raise BodyError("ids", "is missing; expected the id of each vector, as mode is upsert")
        if ids is not None and len(ids) != len(vectors):
            raise BodyError("ids", f"has {len(ids)} numbers, and vectors {len(vectors)} rows; expected as many")
        return RowsRequest(vectors=vectors, ids=ids, attributes=given.get("attributes"), replace=replace)
