"""A control store killed while it is made or upgraded: nothing, the old version, or the new one; content intact."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from hybridindex.store import ControlStore
from hybridindex.store.engine import locate
from hybridindex.store.migrate import SCRIPTS, _head, upgrade_store
from tests.durability.points import Point
from tests.durability.whole import restarted

SCRIPT = Path(__file__).with_name("upgrade.py")
COMMIT = "sqlalchemy.engine.default:DefaultDialect.do_commit"
MIGRATE = "hybridindex.store.migrate"
NEXT = '''"""One table and one column more."""
import sqlalchemy as sa
from alembic import op
revision, down_revision = "9999", {head!r}
branch_labels = depends_on = None
def upgrade():
    op.create_table("later", sa.Column("id", sa.Integer, primary_key=True))
    op.add_column("events", sa.Column("extra", sa.Text(), nullable=True))
'''


@pytest.fixture
def later(tmp_path):
    """The released migrations and one more."""
    scripts = shutil.copytree(SCRIPTS, tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    (scripts / "versions" / "9999_later.py").write_text(NEXT.format(head=_head(SCRIPTS)))
    return scripts


#: (point, whether the new version is there afterwards)
UPGRADE = [
    (Point(name="before the copy", target=f"{MIGRATE}:_back_up", when="before"), False),
    (Point(name="copy not in place", target="os:replace", when="before", having=".before-"), False),
    (Point(name="copy in place", target="os:replace", when="after", having=".before-"), False),
    (Point(name="between two changes", target="alembic.op:create_table", when="after", having="later"), False),
    (Point(name="changed, not committed", target="alembic.op:add_column", when="after", having="events"), False),
    (Point(name="before the commit", target=f"{MIGRATE}:_run", when="after"), False),
    (Point(name="upgraded", target=f"{MIGRATE}:_upgrade_sqlite", when="after"), True),
]


@pytest.mark.parametrize(("point", "new"), UPGRADE, ids=lambda v: v.name if isinstance(v, Point) else "")
def test_a_killed_upgrade(launcher, index_path, later, point, new):
    file = index_path / "control.sqlite"
    child = launcher.start(SCRIPT, file, later, at=point)
    assert child.wait() == -signal.SIGKILL, child.log
    if not new:  # this version goes on with its store
        with restarted(index_path) as service:
            assert service.plan_id == 1
            assert service.store.revision == _head(SCRIPTS)
    # And the upgrade can be made.
    assert upgrade_store(locate(file), busy_timeout_s=5, scripts=later) == "9999"
    again = launcher.start(SCRIPT, file, later)
    assert again.wait() == 0, again.log
    assert not list(index_path.glob("*.tmp"))
    import sqlite3
    from contextlib import closing

    with closing(sqlite3.connect(file)) as raw:
        assert raw.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert raw.execute("SELECT count(*) FROM plans").fetchone() == (1,)
        assert raw.execute("SELECT count(*) FROM later").fetchone() == (0,)
    copy = index_path / "control.sqlite.before-9999"
    with ControlStore.open(copy) as store:
        assert len(store.list_plans()) == 1


CREATE = [
    Point(name="WAL not yet on", target=f"{MIGRATE}:_use_wal", when="before"),
    Point(name="half of the tables", target="alembic.op:create_table", when="after", count=4),
    Point(name="tables made, not marked as ours", target=f"{MIGRATE}:_run", when="after"),
    Point(name="made", target=f"{MIGRATE}:_upgrade_sqlite", when="after"),
]


@pytest.mark.parametrize("point", CREATE, ids=lambda p: p.name)
def test_a_store_killed_while_it_is_made(launcher, tmp_path, point):
    file = tmp_path / "control.sqlite"
    child = launcher.start(SCRIPT, file, SCRIPTS, at=point)
    assert child.wait() == -signal.SIGKILL, child.log
    with ControlStore.open(file) as store:
        store.check_invariants()
        assert store.list_plans() == []
        store.record_event("works", {})
