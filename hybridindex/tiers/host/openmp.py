"""faiss's OpenMP thread count, which OpenMP keeps per calling thread."""

from __future__ import annotations

__all__ = ["adopt_openmp_threads", "openmp_threads"]


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
