"""Events say which index they are about in a column of its own, so that a shared store can be asked for those of one.

Revision: 0004, after 0003.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply; inside the transaction of the whole upgrade."""
    op.add_column("events", sa.Column("index_fingerprint", sa.Text(), nullable=True))
    _fill()
    op.create_index(op.f("ix_events_index_fingerprint"), "events", ["index_fingerprint", "id"], unique=False)


def _fill() -> None:
    events = sa.table(
        "events", sa.column("id", sa.Integer), sa.column("data", sa.JSON), sa.column("index_fingerprint", sa.Text)
    )
    connection = op.get_bind()
    found = []
    for number, data in connection.execute(sa.select(events.c.id, events.c.data)):
        named = data.get("index", data.get("index_fingerprint"))
        if isinstance(named, str):
            found.append({"number": number, "named": named})
    if found:
        change = sa.update(events).where(events.c.id == sa.bindparam("number"))
        connection.execute(change.values(index_fingerprint=sa.bindparam("named")), found)
