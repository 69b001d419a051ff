"""faiss's refinements (``IVF…,RFlat``): lists of short codes, and every vector once more, which reranks candidates.

We have no reranking. So the caller says what an import makes of the second copy.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np

from hybridindex.errors import CorruptIndexError, InvalidInputError, UnsupportedIndexError
from hybridindex.index.faiss_model import require_faiss
from hybridindex.types import F32, I64

__all__ = ["Refine", "Refinement", "check_refine", "find_refinement"]

#: "vectors": the lists get the vectors of the refinement (codec flat), so that every row that is probed is compared
#: exactly; answers are at least as good as faiss's at that nprobe, and scans read more bytes. "drop": the lists keep
#: their codes; what the refinement repaired is lost.
Refine = Literal["vectors", "drop"]


def check_refine(given: Any) -> Refine | None:
    """Raises InvalidInputError where it is none of these."""
    if given is not None and given not in get_args(Refine):
        raise InvalidInputError(f"refine is {given!r}; expected 'vectors', 'drop' or none")
    return given  # type: ignore[no-any-return]


def find_refinement(outer: Any, name: str, refine: Refine | None) -> Refinement | None:
    """The refinement in ``outer``, which is taken apart; None where there is none.

    Raises:
        UnsupportedIndexError: there is one and ``refine`` is None, or its vectors do not fit the lists; says how.
        InvalidInputError: ``refine`` is given, and there is none.
    """
    faiss = require_faiss()
    around, current = None, faiss.downcast_index(outer)
    while isinstance(current, faiss.IndexIDMap | faiss.IndexPreTransform):
        around, current = current, faiss.downcast_index(current.index)
    if not isinstance(current, faiss.IndexRefine):
        if refine is not None:
            raise InvalidInputError(f"refine is {refine!r}, but {name} holds no refinement; leave it out")
        return None
    if refine is None:
        exact = int(current.ntotal) * int(current.d) * 4
        raise UnsupportedIndexError(
            f"{name} holds an {type(current).__name__}: lists of codes, and every vector again to rerank. Choose one: "
            f"refine='vectors' (--refine vectors) puts those vectors into the lists, {exact} bytes that are compared "
            "exactly; refine='drop' keeps only the codes, whose answers are worse"
        )
    return Refinement(outer, around, current, name, exact=refine == "vectors")


class Refinement:
    """A refinement without its base: the base is an index of its own, still owned by what was read."""

    def __init__(self, outer: Any, around: Any, refine: Any, name: str, *, exact: bool) -> None:
        faiss = require_faiss()
        base = faiss.downcast_index(refine.base_index)
        self._inner: list[Any] = []
        inside = base
        while isinstance(inside, faiss.IndexPreTransform):
            self._inner += [faiss.downcast_VectorTransform(inside.chain.at(i)) for i in range(inside.chain.size())]
            inside = faiss.downcast_index(inside.index)
        if exact and not all(map(_keeps_distances, self._inner)):
            raise UnsupportedIndexError(
                f"{name}: its lists lie behind a transform that changes distances, so the refinement's vectors do not "
                "fit them; refine='drop' (--refine drop) imports only the codes"
            )
        self._vectors = faiss.downcast_index(refine.refine_index)
        #: What is imported: as ``outer``, the refinement taken out.
        self.base = base
        if around is not None:
            # The wrapper points to the base from now on, and frees it; the rest is freed with this object.
            refine.own_fields = False
            refine.this.own(True)
            around.index = base
            self.base = outer
        self._kept = (outer, refine)

    def vectors(self, positions: I64) -> F32:
        """(n, d) float32, in the space of the lists."""
        if int(positions.min()) < 0 or int(positions.max()) >= self._vectors.ntotal:
            raise CorruptIndexError(f"a list holds a position outside the {self._vectors.ntotal} vectors to rerank by")
        x: F32 = np.ascontiguousarray(self._vectors.reconstruct_batch(positions), dtype=np.float32)
        for transform in self._inner:
            x = transform.apply(x)
        return x

    def flat_model(self, ivf: Any) -> Any:
        """An empty IVF index of plain vectors with the coarse quantizer of ``ivf``."""
        faiss = require_faiss()
        flat = faiss.IndexIVFFlat(ivf.quantizer, ivf.d, ivf.nlist, ivf.metric_type)
        flat.own_fields = False
        flat.nprobe = ivf.nprobe
        flat.is_trained = True
        flat.referenced_objects = [ivf]
        return flat


def _keeps_distances(transform: Any) -> bool:
    faiss = require_faiss()
    linear = isinstance(transform, faiss.LinearTransform)
    return linear and bool(transform.is_orthonormal) and transform.d_in == transform.d_out
