"""Rows of the schedule say when they were written, and an interval that never ran counts from then.

Rows that are there already count from this upgrade.

Revision: 0003, after 0002.
"""

from __future__ import annotations

from datetime import UTC, datetime

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply; inside the transaction of the whole upgrade."""
    op.add_column("refresh_schedule", sa.Column("created_at", sa.Text(), nullable=True))
    rows = sa.table("refresh_schedule", sa.column("created_at", sa.Text()))
    op.execute(rows.update().values(created_at=datetime.now(UTC).isoformat(timespec="microseconds")))
