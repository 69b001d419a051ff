"""Texts whose rows change: an index and its document store, kept in step; and filters of other frameworks."""

from hybridindex.rag.collection.collection import Collection, RowTarget, Searching
from hybridindex.rag.collection.conditions import Compare, Condition, Operator, Together, from_dict, where_of
from hybridindex.rag.collection.items import Hit, Item
from hybridindex.rag.collection.store import LiveDocuments, Noted, SourceFacts

__all__ = [
    "Collection",
    "Compare",
    "Condition",
    "Hit",
    "Item",
    "LiveDocuments",
    "Noted",
    "Operator",
    "RowTarget",
    "Searching",
    "SourceFacts",
    "Together",
    "from_dict",
    "where_of",
]
