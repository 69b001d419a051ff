"""A RAG pipeline: RAGSchema (RAGO, Table 1), its lengths (section 4), and the four published cases as YAML files.

Does not cover hardware.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

from hybridindex.errors import InvalidInputError, MissingDependencyError, how_to_install
from hybridindex.studies.hardware import Model, model, read_small_file

__all__ = ["RAGSchema", "case", "case_names", "read_schema", "schema_from"]

#: Largest number in a schema.
_MOST = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class RAGSchema:
    """One pipeline: the eight fields of Table 1, then the lengths of section 4 and its defaults. Raises
    InvalidInputError, which names the field."""

    #: Turns uploaded documents into vectors; None where the database exists.
    document_encoder: Model | None = None
    vector_dimensionality: int = 768
    database_vectors: int = 64_000_000_000
    #: Retrievals per sequence, the one before decoding included.
    retrieval_frequency: int = 1
    queries_per_retrieval: int = 1
    query_rewriter: Model | None = None
    query_reranker: Model | None = None
    generative_llm: Model

    #: Bytes of one quantized vector; without quantization 2 per dimension (brute force).
    bytes_per_vector: int = 96
    #: Part of the database that is scanned for one query vector.
    scanned_fraction: float = 0.001
    #: Brute-force kNN instead of the tree, for databases that were just made.
    brute_force: bool = False
    question_tokens: int = 32
    #: Question and retrieved passages.
    prompt_tokens: int = 512
    output_tokens: int = 256
    rewritten_tokens: int = 32
    reranked_passages: int = 16
    passage_tokens: int = 100
    #: Uploaded text, and its chunks; used with a document encoder.
    context_tokens: int = 0
    chunk_tokens: int = 128
    #: Tokens that neighbouring chunks share; "small" in the paper.
    chunk_overlap_tokens: int = 16

    def __post_init__(self) -> None:
        if not self.generative_llm.generates:
            raise InvalidInputError(f"generative_llm is {self.generative_llm.name}, an encoder; expected an LLM")
        for name in ("document_encoder", "query_reranker"):
            encoder = getattr(self, name)
            if encoder is not None and encoder.generates:
                raise InvalidInputError(f"{name} is {encoder.name}, an LLM; expected an encoder such as encoder-120m")
        if self.query_rewriter is not None and not self.query_rewriter.generates:
            raise InvalidInputError(f"query_rewriter is {self.query_rewriter.name}, an encoder; expected an LLM")
        optional = {"context_tokens", "chunk_overlap_tokens"}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in ("int", int):
                least = 0 if field.name in optional else 1
                if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
                    raise InvalidInputError(
                        f"{field.name} is {reprlib.repr(value)}; expected a whole number, at least {least}"
                    )
        share = self.scanned_fraction
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0.0 < share <= 1.0:
            raise InvalidInputError(f"scanned_fraction is {reprlib.repr(share)}; expected above 0, at most 1")
        if not isinstance(self.brute_force, bool):
            raise InvalidInputError(f"brute_force is {reprlib.repr(self.brute_force)}; expected true or false")
        if self.retrieval_frequency > self.output_tokens:
            raise InvalidInputError(
                f"retrieval_frequency is {self.retrieval_frequency}; expected at most output_tokens, "
                f"{self.output_tokens}"
            )
        if self.document_encoder is not None and self.context_tokens < 1:
            raise InvalidInputError("context_tokens is 0; a pipeline with a document_encoder needs the text's length")
        if self.chunk_overlap_tokens >= self.chunk_tokens:
            raise InvalidInputError(
                f"chunk_overlap_tokens is {self.chunk_overlap_tokens}; expected less than chunk_tokens, "
                f"{self.chunk_tokens}"
            )

    @property
    def chunks(self) -> int:
        """Passages that the encoder encodes for one request."""
        return math.ceil(self.context_tokens / (self.chunk_tokens - self.chunk_overlap_tokens))

    @property
    def database_bytes(self) -> float:
        """Bytes that the retrieval servers hold."""
        return float(self.database_vectors) * self.vector_bytes

    @property
    def vector_bytes(self) -> int:
        """Bytes of one stored vector."""
        return 2 * self.vector_dimensionality if self.brute_force else self.bytes_per_vector


_MODELS = ("document_encoder", "query_rewriter", "query_reranker", "generative_llm")


def schema_from(data: Mapping[str, Any]) -> RAGSchema:
    """A schema from the content of its file; a model is given by its name or the path of its file.

    Raises:
        InvalidInputError: a field is missing, unknown or wrong; it is named.
    """
    known = {field.name for field in fields(RAGSchema)}
    if unknown := sorted(str(name) for name in data if name not in known):
        raise InvalidInputError(
            f"{unknown[0][:80]} is not a field of a schema; expected some of {', '.join(sorted(known))}"
        )
    values = dict(data)
    if values.get("generative_llm") is None:
        raise InvalidInputError("generative_llm is missing; expected the name of a model, for example llama3-8b")
    for name in _MODELS:
        given = values.get(name)
        if given is not None and not isinstance(given, str):
            raise InvalidInputError(f"{name} is {reprlib.repr(given)}; expected the name of a model or its file")
        if given is not None:
            try:
                values[name] = model(given)
            except InvalidInputError as error:
                raise InvalidInputError(f"{name}: {error}") from error
    return RAGSchema(**values)


def read_schema(path: Path) -> RAGSchema:
    """A schema from a YAML file.

    Raises:
        InvalidInputError: the file cannot be read, is too large, or is wrong.
        MissingDependencyError: PyYAML is not installed.
    """
    return _parse(read_small_file(path, "a schema"), str(path))


def case_names() -> list[str]:
    """The published cases (RAGO, Table 3), by file name."""
    return sorted(f.name.removesuffix(".yaml") for f in _cases().iterdir() if f.name.endswith(".yaml"))


def case(name: str) -> RAGSchema:
    """A published case, for example ``case2``."""
    if name not in case_names():
        raise InvalidInputError(f"case is {name[:80]!r}; expected one of {', '.join(case_names())}")
    return _parse(_cases().joinpath(f"{name}.yaml").read_bytes(), name)


def _cases() -> Any:
    return resources.files("hybridindex.studies.schedule").joinpath("cases")


def _parse(text: bytes, where: str) -> RAGSchema:
    try:
        import yaml
    except ImportError as error:
        raise MissingDependencyError(f"schemas need PyYAML: {how_to_install('schedule')}") from error
    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise InvalidInputError(f"{where} is not YAML: {error}") from error
    if not isinstance(data, dict):
        raise InvalidInputError(f"{where} holds no fields; expected at least generative_llm: NAME")
    try:
        return schema_from(data)
    except InvalidInputError as error:
        raise InvalidInputError(f"{where}: {error}") from error
