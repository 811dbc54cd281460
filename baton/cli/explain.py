"""`baton explain`: every worker with every term of its cost, and why the winner won."""

import dataclasses
import json

from rich.console import Console
from rich.table import Table

from baton.client import Candidate, Explanation

_TITLES = {"prefill": "prefill workers", "decode": "decode workers"}


def print_json(explanation: Explanation) -> None:
    """One object."""
    print(json.dumps(dataclasses.asdict(explanation)))


def print_tables(explanation: Explanation, console: Console) -> None:
    """A table for each role, and the reason."""
    console.print(
        f"request {explanation.request_id}: {explanation.num_tokens} tokens, "
        f"policy {explanation.policy}",
        highlight=False,
        markup=False,
    )
    for role, title in _TITLES.items():
        of_role = [c for c in explanation.placement.candidates if c.role == role]
        if of_role:
            console.print(_table(title, of_role, explanation))
    console.print(explanation.reason, highlight=False, markup=False)


def _table(title: str, candidates: list[Candidate], explanation: Explanation) -> Table:
    """A row for each worker, a column for each term. `>` is before the chosen one."""
    names = list(dict.fromkeys(name for c in candidates for name in c.terms))
    # Only the default policy counts seconds.
    factor, unit = (1000.0, " ms") if explanation.policy == "baton" else (1.0, "")
    table = Table("", title.removesuffix("s"), title=title, title_justify="left", box=None)
    for column in ("cached", *(f"{name}{unit}" for name in names), f"cost{unit}"):
        table.add_column(column, justify="right")
    table.add_column("not chosen because")
    placement = explanation.placement
    winners = (placement.prefill_worker, placement.decode_worker)
    for candidate in candidates:
        terms = [
            f"{candidate.terms[n] * factor:.3f}" if n in candidate.terms else "" for n in names
        ]
        table.add_row(
            ">" if candidate.worker in winners else "",
            candidate.worker,
            str(candidate.num_cached_tokens),
            *terms,
            f"{candidate.cost * factor:.3f}" if terms else "",
            candidate.excluded,
        )
    return table
