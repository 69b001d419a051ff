"""Bodies of documents that come or go: JSON."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Required

from pydantic import FailFast, Field, ValidationError
from typing_extensions import TypedDict

from hybridindex.rag.ingest import GivenText
from hybridindex.service.config import Limits
from hybridindex.service.http.requests import WHOLE, Body, closed
from hybridindex.service.http.wire import BodyError, parse_json_object, short

__all__ = ["DocumentsBody", "SourcesBody", "most_chunks"]

_MOST_NAME = 1024
_MOST_WORDS = 100_000
#: Of lists and objects within each other, in metadata.
_MOST_LEVELS = 32
#: Words of a chunk where nobody says how many.
_USUAL_WORDS = 200
_Source = Annotated[
    str,
    Field(
        min_length=1,
        max_length=_MOST_NAME,
        description=f"a text of 1..{_MOST_NAME} characters. Names the document: one with the same source replaces it.",
    ),
]


@closed
class _Document(TypedDict, total=False):
    source: Required[_Source]
    text: Required[Annotated[str, Field(min_length=1, description="a text of one character or more.")]]
    title: Annotated[
        str,
        Field(
            max_length=_MOST_NAME,
            description=f"a text of at most {_MOST_NAME} characters. For readers. Default: the source.",
        ),
    ]
    format: Annotated[
        Literal["text", "html"],
        Field(
            description="text or html. A Markdown heading begins a new chunk; from HTML, the visible text is taken. "
            "Default: text.",
            json_schema_extra={"default": "text"},
        ),
    ]
    metadata: Annotated[
        dict[str, Any],
        Field(
            description="an object. Metadata of each chunk. A key that names an attribute can be filtered by; "
            "its value must be of that kind."
        ),
    ]


class DocumentsBody(Body):
    """What ``POST /v1/documents`` takes."""

    def __init__(self, limits: Limits) -> None:
        most = limits.max_documents
        said = f"a list of 1..{most} objects. Documents, each with a different source."
        how = (
            f"an integer 1..{_MOST_WORDS}. Most words of a chunk. Default: as each document was read before, else as "
            f"most of the index were, else {_USUAL_WORDS}."
        )

        @closed
        class Documents(TypedDict, total=False):
            documents: Required[
                Annotated[list[_Document], FailFast(), Field(min_length=1, max_length=most, description=said)]
            ]
            words: Annotated[int, Field(ge=1, le=_MOST_WORDS, description=how), WHOLE]

        example = {"source": "handbook/leave", "text": "Leave is asked for a week before.", "metadata": {"year": 2026}}
        super().__init__(Documents, {"documents": [example]})
        self.document["requestBody"]["required"] = True
        # Within an OpenAPI document, a reference would lead elsewhere.
        one = self.schema.pop("$defs")["_Document"]
        self.options["documents"]["items"] = one
        self._expected: dict[str, Any] = one["properties"]

    def parse(self, body: bytes) -> dict[str, Any]:
        """``texts``: a :class:`hybridindex.rag.ingest.GivenText` for each document. Raises BodyError."""
        given = self._check(parse_json_object(body, self.options.keys()))
        words = given.get("words")
        texts = [
            GivenText(
                name=each["source"],
                text=each["text"],
                kind="html" if each.get("format") == "html" else "markdown",
                title=each.get("title", ""),
                metadata=_checked(f"documents[{number}].metadata", each.get("metadata", {})),
                words=words,
            )
            for number, each in enumerate(given["documents"])
        ]
        _refuse_twice([text.name for text in texts], "documents")
        return {"texts": texts}

    def _check(self, given: dict[str, Any]) -> dict[str, Any]:
        if "documents" not in given:
            raise BodyError("documents", "is missing; expected a list of objects with source and text")
        try:
            checked: dict[str, Any] = self._kind.validate_python(given)
        except ValidationError as error:
            raise self._complaint(given, error) from None
        return checked

    def _complaint(self, given: dict[str, Any], error: ValidationError) -> BodyError:
        """Names the document, and what is wrong with it."""
        first = error.errors(include_url=False, include_context=False)[0]
        name, *within = first["loc"]
        if len(within) < 2:
            value = given[str(name)]
            if within and isinstance(within[0], int):
                return BodyError(f"{name}[{within[0]}]", f"is {short(value[within[0]])}; expected an object")
            expected = self.options[str(name)]["description"].partition(". ")[0]
            found = f"has {len(value)} entries" if isinstance(value, list) else f"is {short(value)}"
            return BodyError(str(name), f"{found}; expected {expected}")
        number, key = int(within[0]), str(within[1])
        place = f"documents[{number}]"
        if key not in self._expected:
            words = f"is not known here; expected {', '.join(self._expected)}"
            return BodyError(f"{place}.{short(key)}", words)
        expected = self._expected[key]["description"].partition(". ")[0].rstrip(".")
        if first["type"] == "missing":
            return BodyError(f"{place}.{key}", f"is missing; expected {expected}")
        return BodyError(f"{place}.{key}", f"is {short(given['documents'][number][key])}; expected {expected}")


class SourcesBody(Body):
    """What ``POST /v1/documents/delete`` takes."""

    def __init__(self, limits: Limits) -> None:
        said = (
            f"a list of 1..{limits.max_documents} texts of 1..{_MOST_NAME} characters. Sources of documents. Unknown "
            "sources change nothing."
        )

        @closed
        class Sources(TypedDict):
            sources: Annotated[
                list[_Source], FailFast(), Field(min_length=1, max_length=limits.max_documents, description=said)
            ]

        super().__init__(Sources, {"sources": ["handbook/leave"]})
        self.document["requestBody"]["required"] = True

    def _check(self, given: dict[str, Any]) -> dict[str, Any]:
        if "sources" not in given:
            raise BodyError("sources", "is missing; expected a list of texts")
        return super()._check(given)


def most_chunks(texts: Sequence[GivenText]) -> int:
    """How many chunks texts make, at most, or about: two that follow each other have more words than one may have, or
    the second begins with a heading."""
    n = 0
    for each in texts:
        words = 1 + sum(map(each.text.count, " \t\n\r"))
        n += 2 + 2 * words // (each.words or _USUAL_WORDS) + each.text.count("#")
    return n


def _checked(field: str, metadata: dict[str, Any]) -> dict[str, Any]:
    """Raises BodyError: they hold what cannot be kept."""
    level: list[Any] = [metadata]
    for _ in range(_MOST_LEVELS):
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [value for values in inner for value in values]
    if level:
        raise BodyError(field, f"has more than {_MOST_LEVELS} levels; expected fewer")
    try:
        json.dumps(metadata, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeError:
        raise BodyError(field, "holds half of a surrogate pair, which is not text") from None
    except (ValueError, RecursionError) as error:
        raise BodyError(field, f"holds a value that JSON cannot represent ({short(str(error))})") from None
    return metadata


def _refuse_twice(names: Sequence[str], field: str) -> None:
    if len(set(names)) < len(names):
        twice = Counter(names).most_common(1)[0][0]
        raise BodyError(field, f"has the source {short(twice)} twice; expected each once")
