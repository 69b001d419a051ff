"""faiss's OpenMP thread count, which OpenMP keeps per calling thread."""

from __future__ import annotations

__all__ = ["OpenMpThreads", "adopt_openmp_threads", "openmp_threads"]


def openmp_threads() -> int:
    """Threads that faiss calls on this thread use."""
    import faiss

    return int(faiss.omp_get_max_threads())


def adopt_openmp_threads(threads: int) -> int:
    """Sets it, and returns what it was."""
    import faiss

    before = openmp_threads()
    if before != threads:
        faiss.omp_set_num_threads(threads)
    return before


class OpenMpThreads:
    """Lends a scanner's thread count to faiss on the threads that call it: for quantization, too."""

    #: Threads of one scan, the calling one included.
    threads: int

    def adopt_thread(self) -> int:
        """Gives the calling thread this scanner's thread count in faiss; returns what it was."""
        return adopt_openmp_threads(self.threads)

    def give_back_thread(self, before: int) -> None:
        """Undoes :meth:`adopt_thread`."""
        adopt_openmp_threads(before)
