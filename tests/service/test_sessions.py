"""Sessions end: when closed, when nobody uses them, when the daemon stops; and they are their owner's."""

from __future__ import annotations

import pytest

from hybridindex.errors import OverloadedError, UnknownSessionError
from hybridindex.service.config import Limits
from hybridindex.service.sessions import SessionTable


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def table(clock):
    return SessionTable(Limits(max_sessions=2, session_ttl_s=10), clock)


@pytest.fixture
def make(service):
    return service.router.session


def test_names_cannot_be_guessed(table, make):
    first, second = table.open(make, "me"), table.open(make, "me")
    assert first != second
    assert len(first) >= 32


def test_unused_sessions_expire_and_give_their_lists_back(table, make, clock, queries):
    name = table.open(make, "me")
    with table.use(name, "me") as session:
        session.lookahead(queries[:1]).result(300)
    clock.now = 9.9
    assert table.sweep() == 0
    clock.now = 10.0
    with pytest.raises(UnknownSessionError):
        table.close(name, "me")
    assert table.sweep() == 1
    assert len(table) == 0
    assert table.n_expired == 1
    with pytest.raises(Exception, match="session is closed"):
        session.search(queries[:1])


def test_use_puts_the_end_off(table, make, clock):
    name = table.open(make, "me")
    clock.now = 9
    with table.use(name, "me"):
        clock.now = 100
        assert table.sweep() == 0
    clock.now = 109
    assert table.sweep() == 0
    clock.now = 110
    assert table.sweep() == 1


def test_another_client_learns_nothing(table, make):
    name = table.open(make, "me")
    messages = set()
    for who, what in (("you", name), ("me", "never-opened")):
        with pytest.raises(UnknownSessionError) as unknown, table.use(what, who):
            pass
        messages.add(str(unknown.value))
        with pytest.raises(UnknownSessionError):
            table.close(what, who)
    assert len(messages) == 1
    table.close(name, "me")


def test_there_may_be_so_many_and_a_key_alone_may_have_all(table, make, clock):
    table.open(make, "me")
    table.open(make, "me")
    with pytest.raises(OverloadedError, match="2 sessions are open") as refused:
        table.open(make, "me")
    assert not refused.value.own_share, "it takes nobody's"
    clock.now = 10
    table.open(make, "me")
    assert table.n_displaced == 0


def test_a_newcomer_takes_the_session_that_the_greediest_has_not_used_for_longest(clock, make):
    table = SessionTable(Limits(max_sessions=4, session_ttl_s=10), clock)
    names = [table.open(make, "flood") for _ in range(4)]
    with table.use(names[0], "flood") as oldest:
        pass  # used again
    with table.use(names[1], "flood") as second, table.use(names[2], "flood"):
        mine = table.open(make, "modest")
        with pytest.raises(UnknownSessionError), table.use(names[3], "flood"):
            pass
        table.open(make, "modest")  # its own first one stays
        with table.use(mine, "modest"):
            pass
        assert oldest._closed
        assert not second._closed, "it is in use"
    for who in ("modest", "flood"):
        with pytest.raises(OverloadedError, match="of which you have 2"):
            table.open(make, who)
    table.open(make, "third")
    assert table.n_displaced == 3
    assert len(table) == 4


def test_one_that_cannot_be_opened_displaces_nobody(table, make):
    names = [table.open(make, "flood") for _ in range(2)]

    def broken():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        table.open(broken, "modest")
    for name in names:
        with table.use(name, "flood"):
            pass


def test_closing_the_table_ends_all_and_lets_none_in(table, make):
    name = table.open(make, "me")
    with table.use(name, "me") as session:
        pass
    table.close_all()
    assert session._closed
    with pytest.raises(OverloadedError):
        table.open(make, "me")
