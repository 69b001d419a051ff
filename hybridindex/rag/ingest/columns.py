"""Which metadata of texts become attributes of their index, and their values. Reads no file but the spool."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from hybridindex.errors import InvalidInputError
from hybridindex.index.attributes.columns import ATTRIBUTE_KINDS, as_attributes, need, schema_of
from hybridindex.rag.collection.items import column_values
from hybridindex.rag.ingest.spool import Spool
from hybridindex.types import I64

__all__ = ["ALL", "attribute_table", "find_columns", "parse_columns"]

#: Whatever fits a kind becomes an attribute.
ALL = "all"
#: What people write -> kind.
_SHORT = {"list": "list of strings", "text": "string", "date": "timestamp"}
_BATCH = 4096


def parse_columns(said: str) -> dict[str, str] | None:
    """ "year=int,lang=string" -> name and kind of each attribute; None for :data:`ALL`.

    Raises:
        InvalidInputError: names the part that is wrong.
    """
    if said.strip() == ALL:
        return None
    found: dict[str, str] = {}
    for part in said.split(","):
        name, equals, kind = (word.strip() for word in part.rpartition("="))
        kind = _SHORT.get(kind, kind)
        if not equals or not name:
            raise InvalidInputError(f"attributes hold {part.strip()!r}; expected NAME=KIND, or {ALL!r} alone")
        if kind not in ATTRIBUTE_KINDS:
            raise InvalidInputError(
                f"attribute {name!r} is {kind!r}; expected one of {', '.join((*ATTRIBUTE_KINDS, *_SHORT))}"
            )
        if name in found:
            raise InvalidInputError(f"attribute {name!r} is given twice; expected once")
        found[name] = kind
    return found


def find_columns(spool: Spool) -> tuple[dict[str, str], dict[str, str]]:
    """Name and kind of all metadata whose values are of one kind; and why others are none."""
    kinds: dict[str, str] = {}
    refused: dict[str, str] = {}
    for _, (ref, _, metadata) in spool.chunks():
        for name, value in metadata.items():
            if value is None or name in refused:
                continue
            kind = _kind_of(value)
            before = kinds.setdefault(name, kind)
            if {kind, before} == {"int", "float"}:
                kinds[name] = "float"
            elif not kind or kind != before:
                found = f"is {before} and {kind}" if kind and before else f"holds {type(value).__name__}"
                refused[name] = f"{found}, as in {ref}"
    return {name: kind for name, kind in kinds.items() if name not in refused}, refused


def _kind_of(value: Any) -> str:
    """Empty: none."""
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int" if -(1 << 63) <= value < 1 << 63 else ""
    if isinstance(value, float):
        return "float"
    if isinstance(value, str):
        return "string"
    return "list of strings" if isinstance(value, list) and all(isinstance(each, str) for each in value) else ""


def attribute_table(spool: Spool, columns: Mapping[str, str]) -> tuple[Any, I64]:
    """A pyarrow table with a record for each chunk, and their ids.

    Raises:
        InvalidInputError: a value of another kind than its column, or columns that no index can have; names the source.
        MissingDependencyError: pyarrow is not installed.
    """
    pa = need("pyarrow")
    tables, ids = [schema_of(columns).empty_table()], []
    stream = spool.chunks()
    while batch := list(itertools.islice(stream, _BATCH)):
        try:
            tables.append(column_values(columns, [metadata for _, (_, _, metadata) in batch]))
        except InvalidInputError:
            for _, (ref, _, metadata) in batch:
                try:
                    column_values(columns, [metadata])
                except InvalidInputError as error:
                    raise InvalidInputError(f"{ref}: {error}") from None
            raise
        ids += [document.id for document, _ in batch]
    return as_attributes(pa.concat_tables(tables)), np.array(ids, dtype=np.int64)
