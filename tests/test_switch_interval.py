"""The interpreter's switch interval is short while somebody works beside searches, and then as it was."""

from __future__ import annotations

import sys
import threading

import pytest

from hybridindex.processes import short_switch_interval, usual_switch_interval


@pytest.fixture
def usual_s():
    before = sys.getswitchinterval()
    yield before
    assert sys.getswitchinterval() == before


def test_two_blocks_leave_the_interpreter_as_it_was(usual_s):
    one, other = short_switch_interval(), short_switch_interval()
    one.__enter__()
    other.__enter__()
    assert sys.getswitchinterval() < usual_s
    one.__exit__(None, None, None)
    assert sys.getswitchinterval() < usual_s
    other.__exit__(None, None, None)
    assert sys.getswitchinterval() == usual_s


def test_who_waits_gives_the_interval_back_for_that_time(usual_s):
    with short_switch_interval():
        with usual_switch_interval():
            assert sys.getswitchinterval() == usual_s
        assert sys.getswitchinterval() < usual_s


def test_who_waits_takes_nothing_from_others(usual_s):
    inside, leave = threading.Event(), threading.Event()

    def work():
        with short_switch_interval():
            inside.set()
            leave.wait(300)

    worker = threading.Thread(target=work)
    worker.start()
    assert inside.wait(300)
    with usual_switch_interval():
        assert sys.getswitchinterval() < usual_s
    with short_switch_interval(), usual_switch_interval():
        assert sys.getswitchinterval() < usual_s
    leave.set()
    worker.join(300)


def test_an_interval_that_is_shorter_already_stays(usual_s):
    sys.setswitchinterval(1e-6)
    with short_switch_interval():
        assert sys.getswitchinterval() == pytest.approx(1e-6)
    sys.setswitchinterval(usual_s)
