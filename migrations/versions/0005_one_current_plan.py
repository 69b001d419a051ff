"""One kind of events says which plan of an index is current; plans say whether a refresh stored them to try them.

``plan_applied`` (of the daemon, its index under ``index``) and ``plan_committed`` (of a refresh, its index under
``index_fingerprint``) become ``plan_current``. Ids and times stay, so the newest of both is the current one. A plan was
a trial if it is the first one made from a renewed profile and no event names it.

Revision: 0005, after 0004.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_EVENTS = sa.table("events", sa.column("id", sa.Integer), sa.column("kind", sa.Text), sa.column("data", sa.JSON))
_PLANS = sa.table(
    "plans", sa.column("id", sa.Integer), sa.column("profile_id", sa.Integer), sa.column("trial", sa.Boolean)
)
_PROFILES = sa.table("profiles", sa.column("id", sa.Integer), sa.column("notes", sa.JSON))


def upgrade() -> None:
    """Apply; inside the transaction of the whole upgrade."""
    op.add_column("plans", sa.Column("trial", sa.Boolean(), server_default=sa.false(), nullable=False))
    connection = op.get_bind()
    profile_of = dict(connection.execute(sa.select(_PLANS.c.id, _PLANS.c.profile_id).order_by(_PLANS.c.id)).all())
    named = _one_kind(connection, profile_of)
    notes = connection.execute(sa.select(_PROFILES.c.id, _PROFILES.c.notes))
    renewed = {number for number, said in notes if isinstance(said, dict) and "renewed" in said}
    first: dict[int, int] = {}
    for plan_id, profile_id in profile_of.items():
        first.setdefault(profile_id, plan_id)
    trials = [{"number": p} for profile, p in first.items() if profile in renewed and p not in named]
    if trials:
        connection.execute(sa.update(_PLANS).where(_PLANS.c.id == sa.bindparam("number")).values(trial=True), trials)


def _one_kind(connection: sa.Connection, profile_of: dict[int, int]) -> set[Any]:
    """Rewrites the events of both kinds; the plans that they name."""
    named, changed = set(), []
    both = sa.select(_EVENTS).where(_EVENTS.c.kind.in_(("plan_applied", "plan_committed")))
    for number, kind, data in connection.execute(both):
        facts = dict(data)
        if kind == "plan_applied":
            facts["index_fingerprint"] = facts.pop("index", None)
        plan_id = facts.get("plan_id")
        if isinstance(plan_id, int):
            named.add(plan_id)
            facts.setdefault("profile_id", profile_of.get(plan_id))
        facts.setdefault("verified", False)
        facts.setdefault("why", "asked for")
        changed.append({"number": number, "data": facts})
    if changed:
        change = sa.update(_EVENTS).where(_EVENTS.c.id == sa.bindparam("number"))
        connection.execute(change.values(kind="plan_current", data=sa.bindparam("data")), changed)
    return named
