"""Attributes of rows: typed columns, from whatever tables users have."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from hybridindex.errors import InvalidInputError, MissingDependencyError, how_to_install
from hybridindex.types import I64

__all__ = [
    "ATTRIBUTE_KINDS",
    "MAX_ATTRIBUTES",
    "as_attributes",
    "describe",
    "fitted",
    "gathered",
    "in_row_order",
    "need",
    "read_table",
    "schema_of",
]

MAX_ATTRIBUTES = 256
_LONGEST_NAME = 128
#: What is wrong with a column, and what to do. An array counts its bytes, and the members of its lists, by 32 bits.
_TOO_LONG = (
    "has more than 2 GiB of texts, or 2³¹ of them; expected fewer: give shorter values, several attributes, or fewer "
    "rows"
)
#: What an attribute may be -> whether a pyarrow type is that. Numbers, dates and texts of other types become these.
ATTRIBUTE_KINDS: dict[str, Callable[[Any, Any], bool]] = {
    "int": lambda pa, kind: bool(pa.types.is_int64(kind)),
    "float": lambda pa, kind: bool(pa.types.is_float64(kind)),
    "string": lambda pa, kind: bool(pa.types.is_string(kind)),
    "bool": lambda pa, kind: bool(pa.types.is_boolean(kind)),
    "timestamp": lambda pa, kind: bool(pa.types.is_timestamp(kind)),
    "list of strings": lambda pa, kind: bool(pa.types.is_list(kind)),
}


def need(module: str) -> Any:
    """Raises MissingDependencyError: conditions on attributes need a package that is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise MissingDependencyError(
            f"attributes and conditions on them need {package}: {how_to_install('filters')}"
        ) from None


def as_attributes(table: Any, kinds: Mapping[str, str] | None = None) -> Any:
    """A pyarrow table of attributes: each column a single array of one of :data:`ATTRIBUTE_KINDS`.

    Args:
        table: a pyarrow Table or RecordBatch, a pandas DataFrame, or a mapping of names to columns.
        kinds: those of the index, by name: what a column without any value is, and one of whole numbers may be.

    Raises:
        InvalidInputError: names the column, and what is wrong with it.
        MissingDependencyError: pyarrow is not installed.
    """
    pa = need("pyarrow")
    if isinstance(table, pa.RecordBatch):
        table = pa.Table.from_batches([table])
    elif type(table).__module__.partition(".")[0] == "pandas":
        try:
            table = pa.Table.from_pandas(table, preserve_index=False)
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            raise InvalidInputError(f"attributes are not a table: {error}") from None
    elif isinstance(table, Mapping):
        try:
            table = pa.table({name: _column_of(pa, name, column) for name, column in table.items()})
        except (pa.ArrowException, TypeError, UnicodeError) as error:
            raise InvalidInputError(f"attributes are not a table: {error}") from None
    elif not isinstance(table, pa.Table):
        raise InvalidInputError(
            f"attributes are a {type(table).__name__}; expected a pyarrow Table, a DataFrame or a mapping of columns"
        )
    names = table.column_names
    if not 1 <= len(names) <= MAX_ATTRIBUTES:
        raise InvalidInputError(f"attributes have {len(names)} columns; expected 1..{MAX_ATTRIBUTES}")
    if len(set(names)) < len(names):
        raise InvalidInputError(f"attributes have two columns with the same name: {', '.join(names)}")
    for name in names:
        if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME:
            raise InvalidInputError(f"an attribute is named {name!r}; expected 1..{_LONGEST_NAME} characters")
    types = {} if kinds is None else {each.name: each.type for each in schema_of(kinds)}
    return pa.table({name: _plain(pa, name, table[name], types.get(name)) for name in names})


def _column_of(pa: Any, name: str, column: Any) -> Any:
    try:
        return column if isinstance(column, pa.Array | pa.ChunkedArray) else pa.array(column)
    except (pa.ArrowException, TypeError, OverflowError, UnicodeError) as error:
        raise InvalidInputError(f"attribute {name!r} is not a column: {error}") from None


@contextmanager
def _in_one_array(pa: Any, name: str) -> Iterator[None]:
    """Raises InvalidInputError: texts that are put into one array are too many for it."""
    try:
        yield
    except pa.ArrowInvalid as error:
        raise InvalidInputError(f"attribute {name!r} {_TOO_LONG}") from error


def _plain(pa: Any, name: str, column: Any, known: Any) -> Any:
    """``known``: the type of that column of the index; None: there is none."""
    types = pa.types
    with _in_one_array(pa, name):
        column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        if types.is_dictionary(column.type):
            column = column.dictionary_decode()
    kind = column.type
    if types.is_null(kind) and known is not None:
        wanted = known
    elif types.is_null(kind):
        raise InvalidInputError(f"attribute {name!r} has no values, so its type is unknown")
    elif types.is_integer(kind):
        wanted = known if known == pa.float64() else pa.int64()
    elif types.is_floating(kind) or types.is_decimal(kind):
        wanted = pa.float64()
    elif types.is_string(kind) or types.is_large_string(kind) or str(kind) == "string_view":
        wanted = pa.string()
    elif types.is_boolean(kind):
        wanted = pa.bool_()
    elif types.is_timestamp(kind) or types.is_date(kind):
        wanted = pa.timestamp("us", "UTC")
    elif (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)) and (
        types.is_string(kind.value_type)
        or types.is_large_string(kind.value_type)
        or (types.is_null(kind.value_type) and known == pa.list_(pa.string()))
    ):
        wanted = pa.list_(pa.string())
    else:
        raise InvalidInputError(f"attribute {name!r} is {kind}; expected one of {', '.join(ATTRIBUTE_KINDS)}")
    try:
        if types.is_date(kind):
            column = column.cast(pa.timestamp("us"))
        if str(kind) == "string_view":
            # To a string at once, too many bytes become wrong offsets instead of an error.
            column = column.cast(pa.large_string())
        # Texts that do not fit are too many; of numbers and dates Arrow says what is wrong.
        with _in_one_array(pa, name) if wanted in (pa.string(), pa.list_(pa.string())) else nullcontext():
            column = column.cast(wanted)
    except pa.ArrowException as error:
        raise InvalidInputError(f"attribute {name!r} is {kind} and does not fit {wanted}: {error}") from None
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def read_table(path: Path) -> Any:
    """A pyarrow table from a Parquet, Arrow (Feather), CSV or JSON-lines file.

    Raises:
        InvalidInputError: missing, of another kind, or not readable as what its name says.
        MissingDependencyError: pyarrow is not installed.
    """
    pa = need("pyarrow")
    readers = {
        ".parquet": lambda: need("pyarrow.parquet").read_table(path),
        ".arrow": lambda: need("pyarrow.feather").read_table(path),
        ".feather": lambda: need("pyarrow.feather").read_table(path),
        ".csv": lambda: need("pyarrow.csv").read_csv(path),
        ".jsonl": lambda: need("pyarrow.json").read_json(path),
    }
    read = readers.get(path.suffix.lower())
    if read is None:
        raise InvalidInputError(f"{path} is not a table; expected a file with one of the endings {', '.join(readers)}")
    try:
        table = read()
        # Arrow takes a file's offsets as they are: wrong ones lead out of its memory.
        table.validate(full=True)
        _ = table.column_names
        return table
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise InvalidInputError(f"{path} cannot be read as {path.suffix}: {error}") from None


def schema_of(kinds: Mapping[str, str]) -> Any:
    """The pyarrow schema of columns of these :data:`ATTRIBUTE_KINDS`."""
    pa = need("pyarrow")
    types = {
        "int": pa.int64(),
        "float": pa.float64(),
        "string": pa.string(),
        "bool": pa.bool_(),
        "timestamp": pa.timestamp("us", "UTC"),
        "list of strings": pa.list_(pa.string()),
    }
    return pa.schema([(name, types[kind]) for name, kind in kinds.items()])


def fitted(table: Any, kinds: Mapping[str, str]) -> Any:
    """A table of attributes with the columns of these kinds, and no others: missing values where it has none of a name.

    Raises:
        InvalidInputError: names a column that is not among them, or is of another kind.
    """
    pa = need("pyarrow")
    given = describe(table)
    for name, kind in given.items():
        if name not in kinds:
            raise InvalidInputError(f"the index has no attribute {name!r}; it has {', '.join(kinds)}")
        if kind != kinds[name]:
            raise InvalidInputError(f"attribute {name!r} holds {kind}; the index has {kinds[name]} there")
    schema = schema_of(kinds)
    columns = [table[each.name] if each.name in given else pa.nulls(len(table), each.type) for each in schema]
    return pa.table(columns, schema=schema)


def describe(table: Any) -> dict[str, str]:
    """Name -> one of :data:`ATTRIBUTE_KINDS`."""
    pa = need("pyarrow")
    return {
        field.name: next(kind for kind, is_kind in ATTRIBUTE_KINDS.items() if is_kind(pa, field.type))
        for field in table.schema
    }


def in_row_order(table: Any, at: I64) -> Any:
    """The table whose row r is row ``at[r]`` of ``table``, or nothing but missing values where that is -1."""
    pa = need("pyarrow")
    indices = pa.array(at, mask=np.asarray(at < 0))
    taken = {}
    for name in table.column_names:
        with _in_one_array(pa, name):
            column = table[name].combine_chunks().take(indices)
            taken[name] = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return pa.table(taken)


def gathered(tables: Sequence[Any], at: I64) -> Any:
    """The table whose row r is row ``at[r]`` of the tables, one after the other, which have the same schema. Only the
    rows that are in it have to fit into one array a column.

    Raises:
        InvalidInputError: they do not; names the column.
    """
    pa = need("pyarrow")
    order = np.argsort(at, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    taken = {}
    for name in tables[0].column_names:
        chunks = [chunk for table in tables for chunk in table[name].chunks]
        ends = np.cumsum([len(chunk) for chunk in chunks], dtype=np.int64)
        bounds = np.searchsorted(at[order], np.concatenate([[0], ends]))
        with _in_one_array(pa, name):
            parts = [
                chunk.take(pa.array(at[order[low:high]] - (end - len(chunk))))
                for chunk, end, low, high in zip(chunks, ends, bounds[:-1], bounds[1:], strict=True)
            ]
            whole = pa.concat_arrays(parts) if parts else pa.nulls(0, tables[0].schema.field(name).type)
            taken[name] = whole.take(pa.array(place))
    return pa.table(taken, schema=tables[0].schema)
