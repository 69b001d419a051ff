"""Which stages share chips (RAGO, section 6.1): neighbours up to the prefix may; decoding and retrieval do not."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from hybridindex.errors import InvalidInputError
from hybridindex.studies.schedule.stages.stage_costs import RETRIEVAL

__all__ = ["KINDS", "Placement", "is_of_kind", "placements"]

#: Groups of stages, in order. A group shares its chips; retrieval inside a group makes its chips wait.
Placement = tuple[tuple[str, ...], ...]

KINDS = ("all", "collocated", "disaggregated")


def placements(names: Sequence[str]) -> Iterator[Placement]:
    """Every way to let neighbours share chips. Retrieval has its own servers; a group around it waits for it."""
    on_chips = [name for name in names if name != RETRIEVAL]
    before_retrieval = names.index(RETRIEVAL)
    for cuts in itertools.product((False, True), repeat=len(on_chips) - 1):
        groups: list[list[str]] = [[on_chips[0]]]
        for name, cut in zip(on_chips[1:], cuts, strict=True):
            if cut:
                groups.append([])
            groups[-1].append(name)
        placed: list[tuple[str, ...]] = []
        seen = 0
        for group in groups:
            inside = before_retrieval - seen
            seen += len(group)
            if inside == 0:
                placed.append((RETRIEVAL,))
            elif 0 < inside < len(group):
                group.insert(inside, RETRIEVAL)
            placed.append(tuple(group))
        yield tuple(placed)


def is_of_kind(placement: Placement, kind: str) -> bool:
    """``collocated``: all stages up to the prefix share chips. ``disaggregated``: none do. ``all``: any placement.

    Raises:
        InvalidInputError: another kind.
    """
    if kind not in KINDS:
        raise InvalidInputError(f"placements is {kind!r}; expected one of {', '.join(KINDS)}")
    on_chips = [[stage for stage in group if stage != RETRIEVAL] for group in placement if group != (RETRIEVAL,)]
    if kind == "collocated":
        return len(on_chips) == 1
    return kind == "all" or all(len(group) == 1 for group in on_chips)
