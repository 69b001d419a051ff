"""What of an index a plan is of: its rows, or its codes. Profiles and plans of one are none of the other.

Both have a fingerprint. Who asks for ``auto`` gets, in this order: what the plan that is named is of; what was applied
last; what was planned last; codes where a profile of them on this machine is stored; rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybridindex.config import PrecisionName, check_one_of
from hybridindex.errors import ProfileError, ProfileMismatchError
from hybridindex.plans.current import applied_plans, newest_current, newest_plan_at
from hybridindex.plans.stored import MOST_DIGITS
from hybridindex.profiler.hardware import hardware_info

if TYPE_CHECKING:
    from hybridindex.index.ivf import IVFIndex
    from hybridindex.store.control import ControlStore
    from hybridindex.store.records import ProfileSummary
    from hybridindex.types import Profile

__all__ = [
    "choose_view",
    "precision_of",
    "stored_history",
    "view_of",
    "view_of_profile",
    "view_to_plan",
    "view_to_profile",
    "views_of",
]


def views_of(ivf: IVFIndex, precision: PrecisionName = "auto") -> tuple[IVFIndex, ...]:
    """What plans may be of.

    Raises:
        InvalidInputError: no such precision.
        UnsupportedIndexError: codes are asked for, and the index has none.
    """
    check_one_of("precision", precision, ("auto", "codes", "rows"))
    if precision == "codes":
        return (ivf.rows.by_codes(),)
    if precision == "rows" or ivf.rabitq is None:
        return (ivf.rows,)
    return (ivf.rows, ivf.rows.by_codes())


def view_of(ivf: IVFIndex, fingerprint: str) -> IVFIndex | None:
    """What of an index has that fingerprint; None: nothing."""
    return next((view for view in views_of(ivf) if view.fingerprint == fingerprint), None)


def view_of_profile(ivf: IVFIndex, profile: Profile, precision: PrecisionName) -> IVFIndex:
    """What the next plan is of, where a profile is named. One of another index is for its reader to refuse.

    Raises:
        InvalidInputError, UnsupportedIndexError: as :func:`views_of`.
        ProfileMismatchError: the profile is of the other precision.
    """
    views, view = views_of(ivf, precision), view_of(ivf, profile.index_fingerprint)
    if view is None:
        return views[0]
    if view.fingerprint not in {each.fingerprint for each in views}:
        raise ProfileMismatchError(
            f"precision is {precision!r}, and the profile was measured with {precision_of(view)}; give one of that "
            "precision, or precision 'auto'"
        )
    return view


def precision_of(view: IVFIndex) -> PrecisionName:
    """What searches scan of what a plan is of."""
    return "rows" if view.rows is view else "codes"


def view_to_profile(
    ivf: IVFIndex, precision: PrecisionName, host_scanner: str = "auto", *, mapped: bool = False
) -> IVFIndex:
    """What searches of ``precision`` will scan: for ``auto`` codes, where there are some and they pay.

    Args:
        mapped: rows stay on disk, where codes pay whatever there is to compare.

    Raises:
        InvalidInputError, UnsupportedIndexError: as :func:`views_of`.
    """
    from hybridindex.tiers.host.rabitq_scanner import HostRabitqScanner

    if precision != "rows":
        ivf.load_codes()
    *_, view = views_of(ivf, precision)
    slow = host_scanner == "faiss" or not HostRabitqScanner.is_fast()
    slow = slow or (not mapped and ivf.rabitq is not None and bool(ivf.rabitq.spec.hardly_pays(ivf.nprobe)))
    return ivf.rows if precision == "auto" and slow else view


def view_to_plan(
    ivf: IVFIndex, store: ControlStore, precision: PrecisionName = "auto", *, any_hardware: bool = False
) -> IVFIndex:
    """What the next plan is of, where no plan is in force and no profile is named.

    Args:
        any_hardware: profiles of other machines count, too.

    Raises:
        InvalidInputError, UnsupportedIndexError: as :func:`views_of`.
        StoreError.
    """
    *others, view = views_of(ivf, precision)
    made = store.list_profiles(index_fingerprint=view.fingerprint) if others else []
    usable = any(any_hardware or profile.hardware_fingerprint == hardware_info().fingerprint for profile in made)
    return others[0] if others and not usable else view


def choose_view(
    ivf: IVFIndex, store: ControlStore, choice: str = "current", precision: PrecisionName = "auto"
) -> IVFIndex:
    """What the plan is of that ``choice`` names: an id, "current" or "latest".

    Raises:
        InvalidInputError, UnsupportedIndexError: as :func:`views_of`.
        ProfileMismatchError: the plan is of the other precision, or of codes that are gone.
        StoreError.
    """
    views = views_of(ivf, precision)
    if choice.isdecimal() and len(choice) <= MOST_DIGITS:
        return _view_of_plan(ivf, store, int(choice), precision)
    if len(views) == 1:
        return views[0]
    if choice == "current":
        events = [(newest_current(store, view.fingerprint), view) for view in views]
        applied = [(event.id, view) for event, view in events if event is not None]
        if applied:
            return max(applied, key=lambda pair: pair[0])[1]
    times = [(newest_plan_at(store, view.fingerprint), view) for view in views]
    planned = [(at, view) for at, view in times if at is not None]
    return max(planned, key=lambda pair: pair[0])[1] if planned else view_to_plan(ivf, store, precision)


def _view_of_plan(ivf: IVFIndex, store: ControlStore, plan_id: int, precision: PrecisionName) -> IVFIndex:
    views = views_of(ivf, precision)
    try:
        plan = store.load_plan(plan_id)
    except ProfileError:
        return views[0]  # who loads it says that it is not there
    named = view_of(ivf, plan.index_fingerprint)
    if named is None:
        profiles = store.list_profiles(index_fingerprint=plan.index_fingerprint)
        if any(is_of_codes(made) for made in profiles):
            problem = f"; {ivf.rows.rabitq_problem}" if ivf.rows.rabitq_problem else ""
            raise ProfileMismatchError(
                f"plan {plan_id} is of codes that this index does not have: they were removed or replaced, are "
                f"damaged, or belong to another index{problem}; run profile and plan again, or name another plan"
            )
        return views[0]  # of another index: as above
    if named.fingerprint not in {view.fingerprint for view in views}:
        raise ProfileMismatchError(
            f"precision is {precision!r}, but plan {plan_id} is of {precision_of(named)}; name a plan of that "
            "precision, or give precision 'auto'"
        )
    return named


def is_of_codes(made: ProfileSummary) -> bool:
    """Whether a stored profile is of searches by codes."""
    return made.codec.startswith("rabitq")


def stored_history(ivf: IVFIndex, store: ControlStore, current: int | None) -> dict[str, Any]:
    """Stored profiles and plans of an index, of rows and of codes, and when each was applied, in the order of saving.
    Those of codes that it no longer has, too; ``gone`` are their fingerprints.

    ``current``: the plan that serves, or was applied last.
    """
    names = [view.fingerprint for view in views_of(ivf)]
    had = {made.index_fingerprint for made in store.list_profiles(codes_of=ivf.rows.fingerprint)}
    gone = sorted(had.difference(names))
    names += gone
    profiles = [row for name in names for row in store.list_profiles(index_fingerprint=name)]
    plans = [row for name in names for row in store.list_plans(index_fingerprint=name)]
    applied = [row for name in names for row in applied_plans(store, name)]
    return {
        "current": current,
        "profiles": sorted(profiles, key=lambda row: row.id),
        "plans": sorted(plans, key=lambda row: row.id),
        "applied": sorted(applied, key=lambda row: row["at"]),
        "gone": gone,
    }
