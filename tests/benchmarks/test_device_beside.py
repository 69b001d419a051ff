"""The process beside ours: it may die or hang, and so may our work; none of that may pass for being undisturbed."""

from __future__ import annotations

import os
import time

import pytest

from benchmarks.device.beside import Neighbour, working


def counts(_device, _load, pipe):
    """Answers at once; its load is its rate."""
    pipe.send(0.0)
    while pipe.recv() is not None:
        pipe.send(float(_load))


def dies(_device, _load, pipe):
    pipe.send(0.0)
    pipe.recv()
    os._exit(7)


def never_starts(_device, _load, _pipe):
    os._exit(8)


def hangs(_device, _load, pipe):
    pipe.send(0.0)
    time.sleep(60)


def test_it_answers_and_is_ended():
    with Neighbour("cpu", "12", target=counts) as other:
        assert [other.rate(0.0), other.rate(0.0)] == [12.0, 12.0]
    assert not other._process.is_alive()


@pytest.mark.parametrize(("target", "status"), [(dies, 7), (never_starts, 8)])
def test_one_that_dies_is_an_error_at_once(target, status):
    with pytest.raises(RuntimeError, match=f"ended with status {status}"), Neighbour("cpu", "", target=target) as other:
        other.rate(0.0)


def test_one_that_hangs_is_an_error_and_is_ended():
    with Neighbour("cpu", "", target=hangs) as other:
        other._patience_s = 0.05
        with pytest.raises(RuntimeError, match="did not answer"):
            other.rate(0.0)
    assert not other._process.is_alive()


def test_work_that_failed_meanwhile_is_an_error():
    def work(_stop):
        raise ValueError("nothing moves")

    with pytest.raises(ValueError, match="nothing moves"), working(work):
        pass


def test_work_is_stopped_when_the_other_side_fails():
    told = []
    with pytest.raises(KeyError), working(lambda stop: told.append(stop.wait(5))):
        raise KeyError
    assert told == [True]
