"""Looks for what others change in the index that a share is of, on a thread of its own: no search waits for a file."""

from __future__ import annotations

import logging
import threading
import time

from hybridindex.errors import HybridIndexError
from hybridindex.index.live.store import LiveStore

__all__ = ["Following"]

_log = logging.getLogger(__name__)

#: Between two looks; and for a change of which somebody told.
_LOOK_S, _SOON_S = 0.2, 0.02
#: For the thread to end.
_ENDS_S = 5.0


class Following:
    """Owner of the thread. Methods may be called from any other."""

    def __init__(self, live: LiveStore) -> None:
        self._live = live
        live.is_watched = True
        self._turn = threading.Condition()
        self._wanted = 0
        self._wanted_until_s = 0.0
        self._closed = False
        #: When the last look ended well; and why the last one did not.
        self._looked_s = time.monotonic()
        self.problem = ""
        self._thread = threading.Thread(target=self._run, name="hybridindex-follow", daemon=True)
        self._thread.start()

    @property
    def number(self) -> int:
        """Of the last change that searches see."""
        return self._live.number

    @property
    def age_s(self) -> float:
        """Seconds since all was known that had changed."""
        return time.monotonic() - self._looked_s

    def until(self, number: int, timeout_s: float) -> int:
        """Waits until searches see change ``number``; the last one that they see."""
        with self._turn:
            self._wanted = max(self._wanted, number)
            self._wanted_until_s = time.monotonic() + timeout_s
            self._turn.notify_all()
            self._turn.wait_for(lambda: self._closed or self._live.number >= number, timeout_s)
        return self._live.number

    def _run(self) -> None:
        while not self._closed:
            self._look()
            with self._turn:
                self._turn.notify_all()
                if not self._closed:
                    self._turn.wait(_SOON_S if self._is_waited_for() else _LOOK_S)

    def _is_waited_for(self) -> bool:
        return self._live.number < self._wanted and time.monotonic() < self._wanted_until_s

    def _look(self) -> None:
        try:
            self._live.read_now()
            if (lost := self._live.lost) is not None:
                raise lost
            self._looked_s, self.problem = time.monotonic(), ""
        except HybridIndexError as error:
            if str(error) != self.problem:
                self.problem = str(error)
                _log.error("changes of the index cannot be followed: %s", error)
        except Exception:  # noqa: BLE001 - the next look must come
            _log.exception("looking for changes of the index failed; it is tried again")

    def close(self) -> None:
        """Ends the thread."""
        with self._turn:
            self._closed = True
            self._turn.notify_all()
        # It may wait for a file system that hangs.
        self._thread.join(_ENDS_S)
        self._live.is_watched = False
