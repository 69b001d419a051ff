"""Retrieval on CPU servers: scans of a tree of quantized vectors level by level, or brute force.

The ScaNN model of RAGO, section 4(b): each level takes the longer of computing and reading memory; one thread scans one
query; the database is spread evenly over the servers, and every query goes to all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridindex.errors import InvalidInputError
from hybridindex.studies.hardware import Server
from hybridindex.studies.schedule.stages.schema import RAGSchema

__all__ = [
    "MEMORY_UTILIZATION",
    "MeasuredRetrieval",
    "TreeLevel",
    "retrieval_seconds",
    "tree_levels",
    "tree_seconds",
]

#: Part of a server's memory bandwidth that scans reach (section 4(b)).
MEMORY_UTILIZATION = 0.8
#: Bytes/s at which one core computes distances of unquantized vectors, in the public sweep.
_EXACT_RATE = 10e9
#: Vectors or nodes below one node (section 4: three levels of 4,000).
_NODE_VECTORS = 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeLevel:
    """One scan of a query: bytes read, and the rate of one core."""

    nbytes: float
    bytes_per_core_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRetrieval:
    """What one server took to search an index, in place of the model: by batches of query vectors.

    A database of other bytes takes in proportion, and is spread evenly over the servers, as in the model.
    """

    #: Ascending batch sizes, and seconds of each; at least two.
    batches: tuple[int, ...]
    seconds: tuple[float, ...]
    #: Of the index.
    nbytes: float

    def __post_init__(self) -> None:
        if (
            len(self.batches) < 2
            or len(self.batches) != len(self.seconds)
            or list(self.batches) != sorted({*self.batches})
        ):
            raise InvalidInputError(
                f"batches are {self.batches}; expected two ascending sizes or more, each with its seconds"
            )
        if not (min(self.seconds) > 0 and self.nbytes > 0):
            raise InvalidInputError(f"seconds are {self.seconds} for {self.nbytes} bytes; expected numbers above 0")

    def at(self, batch: int, nbytes: float, servers: int) -> float:
        """Seconds; between two sizes in proportion, beyond the largest by its last slope."""
        sizes, seconds = self.batches, self.seconds
        after = min(max(1, sum(size < batch for size in sizes)), len(sizes) - 1)
        slope = (seconds[after] - seconds[after - 1]) / (sizes[after] - sizes[after - 1])
        found = max(seconds[0], seconds[after - 1] + slope * (batch - sizes[after - 1]))
        return found * nbytes / self.nbytes / servers


def tree_levels(schema: RAGSchema, server: Server) -> tuple[TreeLevel, ...]:
    """Levels of a schema's database: the root, then ``scanned_fraction`` of the nodes and of the vectors (section 3.3).
    The last level takes nearly all the time. Brute force reads everything once.
    """
    if schema.brute_force:
        return (TreeLevel(nbytes=schema.database_bytes, bytes_per_core_s=_EXACT_RATE),)
    vectors, share, exact = schema.database_vectors, schema.scanned_fraction, 2.0 * schema.vector_dimensionality
    nodes = max(1.0, vectors / _NODE_VECTORS)
    return (
        TreeLevel(nbytes=min(_NODE_VECTORS, nodes) * exact, bytes_per_core_s=_EXACT_RATE),
        TreeLevel(nbytes=share * nodes * exact, bytes_per_core_s=_EXACT_RATE),
        TreeLevel(nbytes=share * vectors * schema.vector_bytes, bytes_per_core_s=server.scan_bytes_per_core_s),
    )


def tree_seconds(
    levels: Sequence[TreeLevel], batch: int, *, servers: int, cores: int, memory_bytes_per_s: float
) -> float:
    """Seconds of one batch on ``servers`` that hold equal parts of the database.

    Sum over levels of max(bytes · max(1, batch / cores) / rate of a core, batch · bytes / memory bandwidth) / servers.

    Args:
        batch: query vectors.
        memory_bytes_per_s: what scans reach on one server.

    Raises:
        InvalidInputError: a number is not positive.
    """
    for name, value in (("batch", batch), ("servers", servers), ("cores", cores)):
        if value < 1:
            raise InvalidInputError(f"{name} is {value}; expected at least 1")
    if not memory_bytes_per_s > 0:
        raise InvalidInputError(f"memory_bytes_per_s is {memory_bytes_per_s}; expected a positive number")
    rounds = max(1.0, batch / cores)
    return (
        sum(
            max(level.nbytes * rounds / level.bytes_per_core_s, batch * level.nbytes / memory_bytes_per_s)
            for level in levels
        )
        / servers
    )


def retrieval_seconds(
    schema: RAGSchema, server: Server, servers: int, requests: int, measured: MeasuredRetrieval | None = None
) -> float:
    """Seconds to retrieve for ``requests`` requests, with all their query vectors in one batch."""
    if measured is not None:
        return measured.at(requests * schema.queries_per_retrieval, schema.database_bytes, servers)
    return tree_seconds(
        tree_levels(schema, server),
        requests * schema.queries_per_retrieval,
        servers=servers,
        cores=server.cores,
        memory_bytes_per_s=MEMORY_UTILIZATION * server.memory_bytes_per_s,
    )
