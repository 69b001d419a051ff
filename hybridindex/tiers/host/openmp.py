"""faiss's OpenMP threads: how many, which OpenMP keeps per calling thread, and when one is better."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from hybridindex.index.faiss_model import require_faiss
from hybridindex.types import F32, I64

if TYPE_CHECKING:
    from hybridindex.index.ivf import IVFIndex

__all__ = ["OpenMpThreads", "adopt_openmp_threads", "openmp_threads"]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

#: A call is late when it took so much longer than its work, in seconds and as a part of the work.
_LEAST_LATE_S = 200e-6
_LATE_PART = 0.25
#: Calls on one thread after a late one; twice as many each time in a row, up to the second number.
_FEWEST_ALONE, _MOST_ALONE = 16, 256


def openmp_threads() -> int:
    """Threads that faiss calls on this thread use."""
    return int(require_faiss().omp_get_max_threads())


def adopt_openmp_threads(threads: int) -> int:
    """Sets it, and returns what it was."""
    before = openmp_threads()
    if before != threads:
        require_faiss().omp_set_num_threads(threads)
    return before


class OpenMpThreads:
    """Lends a scanner's thread count to faiss on the threads that call it: for quantization, too.

    The threads of a faiss call wait for each other at its end. While other processes compute, one of them may have lost
    its core. A call that took longer than all its work is late: one thread would have been faster. The calls after it
    have one thread.
    """

    #: Threads of one scan, the calling one included.
    threads: int
    #: The extension's threads that help, a ``native.ThreadPool``; None: faiss scans.
    pool: Any = None
    #: Calls to come on one thread, and how many it were after the last late call. Threads may overwrite each other's
    #: counts: only time depends on them.
    _alone = 0
    _alone_when_late = _FEWEST_ALONE

    def adopt_thread(self) -> int:
        """Gives the calling thread this scanner's thread count in faiss; returns what it was."""
        return adopt_openmp_threads(self.threads)

    def give_back_thread(self, before: int) -> None:
        """Undoes :meth:`adopt_thread`."""
        adopt_openmp_threads(before)

    def quantize(self, index: IVFIndex, queries: F32, nprobe: int) -> tuple[I64, F32]:
        """:meth:`hybridindex.index.ivf.IVFIndex.quantize` with this scanner's threads."""
        if index.quantizes_itself:
            return index.quantize(queries, nprobe, self.pool)
        if len(queries) == 1:  # on one thread in any case
            return index.quantize(queries, nprobe)
        return self.call_faiss(index.quantize, queries, nprobe)

    def call_faiss(
        self, function: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> _Result:
        """Calls ``function`` on an adopted thread: with this scanner's thread count, or one after a late call."""
        if self.threads == 1:
            return function(*args, **kwargs)
        if self._alone > 0:
            self._alone -= 1
            before = adopt_openmp_threads(1)
            try:
                return function(*args, **kwargs)
            finally:
                adopt_openmp_threads(before)
        started_s, worked_s = time.perf_counter(), time.process_time()
        result = function(*args, **kwargs)
        self._note(time.perf_counter() - started_s, time.process_time() - worked_s)
        return result

    def _note(self, took_s: float, worked_s: float) -> None:
        """A call with several threads took ``took_s``; all threads of the process worked ``worked_s`` meanwhile."""
        if took_s - worked_s > max(_LEAST_LATE_S, _LATE_PART * worked_s):
            self._alone = self._alone_when_late
            self._alone_when_late = min(2 * self._alone_when_late, _MOST_ALONE)
        else:
            self._alone_when_late = _FEWEST_ALONE
