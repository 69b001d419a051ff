"""A proposal, or what was applied, as a table: the same rows for both, with and without a daemon."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.table import Table

from hybridindex.cli.console import readable_bytes

__all__ = ["proposal_table", "proposal_words"]


def proposal_table(answer: dict[str, Any]) -> Table:
    """``answer``: of ``POST /v1/repartition`` or ``/v1/plans/{plan}/apply``."""
    plan, placed, planned = answer["plan"], answer["placed"], answer["planned"]
    name = "" if answer["plan_id"] is None else f" plan {answer['plan_id']}"
    title = f"applied{name}" if answer["applied"] else f"dry run{name}: nothing was moved"
    columns = ("before", "planned", "placed") if answer["applied"] else ("now", "planned", "would be placed")
    table = Table("", *columns, title=title)

    def row(what: str, show: Callable[[Any], str], *values: Any) -> None:
        table.add_row(what, *("-" if value is None else show(value) for value in values))

    row(f"with an SLO of {_ms(plan['slo_ms'])}", str, answer["verdict_before"], planned["verdict"], placed["verdict"])
    row("lists on devices", "{:,}".format, answer["resident"]["lists"], planned["lists"], placed["lists"])
    held = (answer["resident"], planned, placed)
    if any(rows := [one.get("rows", 0) for one in held]):
        row("of these with rows beside codes", "{:,}".format, *rows)
    row("their bytes", readable_bytes, answer["resident"]["bytes"], planned["bytes"], placed["bytes"])
    row("predicted hit rate", "{:.1%}".format, answer["hit_rate_before"], planned["hit_rate"], placed["hit_rate"])
    latency = f"predicted latency, batch of {answer['gain']['batch']}"
    row(latency, _ms, answer["latency_ms_before"], planned["latency_ms"], placed["latency_ms"])
    row(
        "most requests/s within the SLO",
        lambda rate: f"{rate:,.0f}" if rate >= 1e3 else f"{rate:.4g}",
        answer["max_qps_before"],
        plan["max_sustainable_qps"],
        answer["max_qps_after"],
    )
    return table


def proposal_words(answer: dict[str, Any]) -> list[str]:
    """What stands below the table, a sentence a line."""
    planned, placed, gain = answer["planned"], answer["placed"], answer["gain"]
    said = [f"Planned: {answer['plan']['reason']}."]
    if placed["lists"] < planned["lists"]:
        said.append(
            f"Only {placed['lists']:,} of {planned['lists']:,} lists fit on the open devices; the host scans the "
            "others. Verdict, hit rate and latency are those of the lists that fit."
        )
    elif placed.get("rows", 0) < planned.get("rows", 0):
        said.append(
            f"The rows of only {placed['rows']:,} of {planned['rows']:,} lists fit beside the codes; the host "
            "compares the other candidates. Verdict and latency are those of the rows that fit."
        )
    nearest = answer["plan"]["nearest_slo_ms"]
    if placed["verdict"] == "infeasible" and not answer["applied"]:
        which = "" if nearest is None else f" The nearest SLO that can be met is {_ms(nearest)}."
        said.append(f"The SLO cannot be met; to apply this plan, use --force.{which}")
    said.append(_moves(answer))
    changed = _faster(answer["latency_ms_before"], placed["latency_ms"])
    said.append(f"Gain: {changed}, hit rate {gain['hit_rate']:+.1%}.")
    if answer["n_queries"] is not None:
        said.append(f"Planned from {answer['n_queries']:,} recent queries.")
    if answer["objection"]:
        said.append(f"Refresh would decline it: {answer['objection']}.")
    if (update := answer["update"]) is not None:
        state = update["outcome"] or update["stage"]
        said.append(f"Refresh update {update['number']}: {state}{': ' if update['why'] else ''}{update['why']}.")
    return said


def _moves(answer: dict[str, Any]) -> str:
    applied, offline = answer["applied"], answer["unplaced_lists"] is None
    words = "The next daemon moves" if applied and offline else "Moved" if applied else "To move"
    lists, nbytes, seconds = answer["lists_to_move"], answer["bytes_to_move"], answer["move_s"]
    took = f", about {seconds:.2g} s of copying" if seconds else ""
    return (
        f"{words}: {lists:,} lists, {readable_bytes(nbytes)}{took}; removed from devices: {answer['lists_to_drop']:,}."
    )


def _ms(value: float) -> str:
    return f"{value:.4g} ms"


def _faster(before_ms: float | None, after_ms: float | None) -> str:
    if before_ms is None or after_ms is None:
        return "latency unknown"
    if _ms(before_ms) == _ms(after_ms):  # as the table shows them
        return "latency unchanged"
    return f"{abs(before_ms - after_ms):.3g} ms {'faster' if after_ms < before_ms else 'slower'}"
