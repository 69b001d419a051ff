"""A device that does not answer: what calls it waits until it is let go."""

from __future__ import annotations

import threading
from unittest import mock

WAIT_S = 300


class Stuck:
    """``with Stuck(PageArena, "write") as write:``; calls do not come back before ``write.go_on`` is set or the end."""

    def __init__(self, owner, name, when=lambda *_: True):
        """``when``: which calls, by their arguments."""
        self.begun, self.go_on = threading.Event(), threading.Event()
        real = getattr(owner, name)

        def held(*args, **options):
            if when(*args) and not self.go_on.is_set():
                self.begun.set()
                assert self.go_on.wait(WAIT_S)
            return real(*args, **options)

        self._patch = mock.patch.object(owner, name, held)

    def __enter__(self):
        self._patch.start()
        return self

    def __exit__(self, *_):
        self.go_on.set()
        self._patch.stop()


def on_watchdog(*_):
    """For ``when``: what the host does in the place of a device."""
    return threading.current_thread().name == "hybridindex-watchdog"


def ended(call):
    """Runs ``call`` on a thread of its own, and sees it return."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive(), "it waits for ever"


def held_quantizer(index, monkeypatch):
    """Batches wait for the second event; the first says that one does."""
    entered, resume = threading.Event(), threading.Event()
    quantize = index.quantize

    def held(queries, nprobe, *pool):
        entered.set()
        assert resume.wait(WAIT_S)
        return quantize(queries, nprobe, *pool)

    monkeypatch.setattr(index, "quantize", held)
    return entered, resume
