"""Attributes of rows that were added since a generation was written: Arrow streams, one after the other, as the log has
them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np

from hybridindex.index.attributes.columns import need
from hybridindex.types import I64

__all__ = ["AddedAttributes", "as_stream", "from_stream"]


def as_stream(table: Any) -> bytes:
    """A pyarrow table as an Arrow IPC stream."""
    pa, ipc = need("pyarrow"), need("pyarrow.ipc")
    sink = pa.BufferOutputStream()
    with ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def from_stream(stream: bytes) -> Any:
    """The inverse."""
    return need("pyarrow.ipc").open_stream(stream).read_all()


def _as_kinds(stream: bytes, kinds: Any) -> Any:
    """The table of a stream in the columns of the index. Those of rows that went since may be others, which the index
    had then: these values are missing."""
    pa = need("pyarrow")
    came = from_stream(stream)

    def column(field: Any) -> Any:
        if field.name in came.column_names:
            with suppress(pa.ArrowException):
                return came.column(field.name).cast(field.type)
        return pa.nulls(len(came), field.type)

    return pa.table([column(field) for field in kinds], schema=kinds)


class _Streams:
    """All of them; only grows."""

    def __init__(self) -> None:
        self.streams: list[bytes] = []
        #: Rows of each stream.
        self.counts: list[int] = []
        self.nbytes = 0
        #: Columns of the first so many rows, and of how many streams they are.
        self.known: tuple[int, int, Any] = (0, 0, None)


class AddedAttributes:
    """Those of the first ``n`` rows that were ever added. From any thread, but for :meth:`append`."""

    def __init__(self, streams: _Streams | None = None, n: int = 0) -> None:
        self._all = streams or _Streams()
        self._n = n

    def append(self, stream: bytes, count: int) -> None:
        """Those of ``count`` further rows; nothing: they have none."""
        self._all.counts.append(count)
        self._all.streams.append(stream)
        self._all.nbytes += len(stream)

    @property
    def nbytes(self) -> int:
        """Of all, also of rows that are gone."""
        return self._all.nbytes

    def first(self, n: int) -> AddedAttributes:
        """Of the first ``n`` rows alone, whatever comes."""
        return AddedAttributes(self._all, n)

    def of_rows(self, numbers: I64) -> bytes:
        """Those of the rows with these numbers, (m,) int64, as a stream; nothing where no row has any."""
        ends = np.cumsum(self._all.counts)
        among = np.unique(np.searchsorted(ends, numbers, side="right"))
        # All that have any have the same: columns change while no added row is there.
        said = next((stream for each in among.tolist() if (stream := self._all.streams[each])), None)
        if said is None:
            return b""
        return as_stream(self.table(from_stream(said).schema).take(numbers))

    def table(self, kinds: Any) -> Any:
        """A pyarrow table with a record for each row; missing values where rows have none.

        Args:
            kinds: a pyarrow schema, the attributes of the index.
        """
        pa = need("pyarrow")
        n_known, n_streams, known = self._all.known
        if known is None or known.schema != kinds or n_known > self._n:
            n_known, n_streams, known = 0, 0, kinds.empty_table()
        parts = [known]
        while n_known < self._n:
            stream, count = self._all.streams[n_streams], self._all.counts[n_streams]
            if stream:
                parts.append(_as_kinds(stream, kinds))
            else:
                parts.append(pa.table([pa.nulls(count, each.type) for each in kinds], schema=kinds))
            n_known, n_streams = n_known + count, n_streams + 1
        if len(parts) > 1:
            known = pa.concat_tables(parts).combine_chunks()
            self._all.known = (n_known, n_streams, known)
        return known
