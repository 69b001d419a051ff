"""What a row must hold: a SHA-256 over its values, stored with it and compared whenever it is read.

SQLite notices damage of its own structure, not of values: a flipped byte can be another valid number. The digest is
over JSON with sorted keys; a blob and the samples of a profile stand in it as digests of their own. A row without a
digest was written by an older version and is taken as it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Double

from hybridindex.errors import StoreError
from hybridindex.store.models import Base

__all__ = ["check_digest", "digest_of_blobs", "digest_of_json", "digest_of_row", "digest_of_samples"]


def digest_of_json(value: object) -> str:
    """SHA-256 of ``value`` as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=repr).encode()).hexdigest()


def digest_of_row(row: Base, **parts: object) -> str:
    """Of all columns of ``row`` but its digest, and of what belongs to it and lies elsewhere."""
    columns = {c.key: _as_stored(c, getattr(row, c.key)) for c in row.__table__.c if c.key != "digest"}
    return digest_of_json({**columns, "parts": parts})


def digest_of_blobs(blobs: Mapping[str, bytes]) -> dict[str, str]:
    """Of each."""
    return {name: hashlib.sha256(blob).hexdigest() for name, blob in blobs.items()}


def digest_of_samples(table: type[Base], samples: Sequence[object]) -> str:
    """Of all of them, in their order; fields are named like the columns of ``table``."""
    columns = [c for c in table.__table__.c if c.key not in ("profile_id", "position")]
    return digest_of_json([[_as_stored(c, getattr(sample, c.key)) for c in columns] for sample in samples])


def _as_stored(column: ColumnElement[Any], value: Any) -> Any:
    """As it will be read: a column of doubles takes whole numbers, too, and SQLite no sign of zero."""
    return float(value) + 0.0 if isinstance(value, int | float) and isinstance(column.type, Double) else value


def check_digest(stored: str | None, found: str, what: str, where: str, *, otherwise: str) -> None:
    """Raises StoreError: ``what`` of the store ``where`` is not what was written; ``otherwise``: what helps without a
    copy."""
    if stored is not None and stored != found:
        raise StoreError(
            f"control store {where}: {what}: damaged, it is not what was written; restore the store from a copy, or "
            f"{otherwise}"
        )
