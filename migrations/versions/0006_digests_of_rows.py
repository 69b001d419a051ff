"""Rows have digests, so that a flipped byte is no other value. Rows that are there already have none.

Revision: 0006, after 0005.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply; inside the transaction of the whole upgrade."""
    op.add_column("profiles", sa.Column("sample_digests", sa.JSON(), nullable=True))
    for table in ("profiles", "plans", "events", "refresh_schedule"):
        op.add_column(table, sa.Column("digest", sa.Text(), nullable=True))
