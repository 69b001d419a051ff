"""Something that is done again and again, on a thread of its own: what a file system keeps is that thread alone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from hybridindex.errors import HybridIndexError

__all__ = ["Looking"]

_log = logging.getLogger(__name__)

#: For the thread to end.
_ENDS_S = 5.0


class Looking:
    """Owner of the thread."""

    def __init__(
        self, look: Callable[[], object], *, name: str, words: str, every_s: float, again_s: float | None = None
    ) -> None:
        """
        Args:
            name: of the thread.
            words: what it means where ``look`` raises a HybridIndexError; for the log.
            every_s: between two looks; the first one is so late, too.
            again_s: after one that raised; None: as after any.
        """
        self._look, self._words = look, words
        self._every_s, self._again_s = every_s, every_s if again_s is None else again_s
        #: Why the last look raised; empty: it did not.
        self.problem = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        wait_s = self._every_s
        while not self._stop.wait(wait_s):
            try:
                self._look()
            except HybridIndexError as error:
                if str(error) != self.problem:
                    _log.warning("%s: %s", self._words, error)
                self.problem, wait_s = str(error), self._again_s
            except Exception as error:  # noqa: BLE001 - the next look must come
                _log.exception("%s", self._words)
                self.problem, wait_s = repr(error), self._again_s
            else:
                self.problem, wait_s = "", self._every_s

    def close(self) -> None:
        """Ends the thread; what it does now is ended by who knows how."""
        self._stop.set()
        self._thread.join(_ENDS_S)
