"""The control store's first schema: hardware, profiles with their samples and arrays, plans, events.

Revision: 0001, the first.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply; inside the transaction of the whole upgrade."""
    op.create_table(
        "events",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("at", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_events")),
    )
    op.create_index(op.f("ix_events_kind"), "events", ["kind", "id"], unique=False)
    op.create_table(
        "hardware",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_hardware")),
        sa.UniqueConstraint("fingerprint", "digest", name=op.f("uq_hardware_fingerprint")),
    )
    op.create_table(
        "profiles",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Text(), nullable=False),
        sa.Column("index_fingerprint", sa.Text(), nullable=False),
        sa.Column("hardware_id", sa.Integer(), nullable=False),
        sa.Column("metric", sa.Text(), nullable=False),
        sa.Column("codec", sa.Text(), nullable=False),
        sa.Column("dim", sa.BigInteger(), nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.Column("nlist", sa.BigInteger(), nullable=False),
        sa.Column("nprobe", sa.BigInteger(), nullable=False),
        sa.Column("k", sa.BigInteger(), nullable=False),
        sa.Column("scanner", sa.Text(), nullable=False),
        sa.Column("threads", sa.BigInteger(), nullable=False),
        sa.Column("omp_wait_policy", sa.Text(), nullable=False),
        sa.Column("load_average", sa.Double(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("notes", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["hardware_id"], ["hardware.id"], name=op.f("fk_profiles_hardware_id_hardware")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_profiles")),
    )
    op.create_index(op.f("ix_profiles_hardware_id"), "profiles", ["hardware_id"], unique=False)
    op.create_index(op.f("ix_profiles_index_fingerprint"), "profiles", ["index_fingerprint"], unique=False)
    op.create_table(
        "latency_samples",
        sa.Column("profile_id", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("stage", sa.Text(), nullable=False),
        sa.Column("batch", sa.BigInteger(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("probes", sa.BigInteger(), nullable=False),
        sa.Column("work_bytes", sa.BigInteger(), nullable=False),
        sa.Column("max_work_bytes", sa.BigInteger(), nullable=False),
        sa.Column("unique_bytes", sa.BigInteger(), nullable=False),
        sa.Column("coverage", sa.Double(), nullable=False),
        sa.Column("min_hit_rate", sa.Double(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["profile_id"], ["profiles.id"], name=op.f("fk_latency_samples_profile_id_profiles"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("profile_id", "position", name=op.f("pk_latency_samples")),
    )
    op.create_table(
        "plans",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("profile_id", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Text(), nullable=False),
        sa.Column("verdict", sa.Text(), nullable=False),
        sa.Column("slo_ms", sa.Double(), nullable=True),
        sa.Column("coverage", sa.Double(), nullable=True),
        sa.Column("device_bytes", sa.BigInteger(), nullable=True),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["profile_id"], ["profiles.id"], name=op.f("fk_plans_profile_id_profiles")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_plans")),
    )
    op.create_index(op.f("ix_plans_profile_id"), "plans", ["profile_id"], unique=False)
    op.create_table(
        "profile_arrays",
        sa.Column("profile_id", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["profile_id"], ["profiles.id"], name=op.f("fk_profile_arrays_profile_id_profiles"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("profile_id", "name", name=op.f("pk_profile_arrays")),
    )
    op.create_table(
        "recall_points",
        sa.Column("profile_id", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("nprobe", sa.BigInteger(), nullable=False),
        sa.Column("recall", sa.Double(), nullable=False),
        sa.Column("ndcg", sa.Double(), nullable=False),
        sa.Column("k", sa.BigInteger(), nullable=False),
        sa.Column("n_queries", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["profile_id"], ["profiles.id"], name=op.f("fk_recall_points_profile_id_profiles"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("profile_id", "position", name=op.f("pk_recall_points")),
    )
    op.create_table(
        "transfer_samples",
        sa.Column("profile_id", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("pinned", sa.Boolean(), nullable=False),
        sa.Column("nbytes", sa.BigInteger(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["profile_id"], ["profiles.id"], name=op.f("fk_transfer_samples_profile_id_profiles"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("profile_id", "position", name=op.f("pk_transfer_samples")),
    )
    op.create_table(
        "plan_arrays",
        sa.Column("plan_id", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["plan_id"], ["plans.id"], name=op.f("fk_plan_arrays_plan_id_plans"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("plan_id", "name", name=op.f("pk_plan_arrays")),
    )
