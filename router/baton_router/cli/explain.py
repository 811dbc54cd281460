"""Command `baton explain`: each worker with the terms of its cost, and the reason of the choice."""

import dataclasses
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from baton.client.client import Candidate, Explanation
from baton.client.router_messages import explanation_of
from baton.errors import InvalidArgumentError, NotFoundError
from baton.serving.telemetry.placement_terms import TERMS
from baton_router.apis.grpc.admin_wire import explanation
from baton_router.routing.placement.record.replay import read_record, replay

_TITLES = {
    ("prefill", False): "prefill workers",
    ("decode", False): "decode workers",
    ("decode", True): "decode workers that compute the prompt themselves",
    ("encode", False): "encode workers",
}


def recorded(file: Path, request_id: str | None) -> Explanation:
    """Returns the last decision about a request in a record, decided again now.

    Raises `NotFoundError` if it is not there, `InvalidArgumentError` without `request_id`.
    """
    if request_id is None:
        raise InvalidArgumentError("--record", "is of no use without --request-id")
    found = [d for d in replay(read_record(file)) if d.recorded.inputs.request_id == request_id]
    if not found:
        raise NotFoundError(f"{file} has no request {request_id!r}")
    return explanation_of(explanation(found[-1].decision))


def print_json(explained: Explanation) -> None:
    """Prints one JSON object."""
    print(json.dumps(dataclasses.asdict(explained)))


def print_tables(explained: Explanation, console: Console) -> None:
    """Prints a table for each kind of candidate, and the reason."""
    model = f" of {explained.model}" if explained.model else ""
    console.print(
        f"request {explained.request_id}{model}: {explained.num_tokens} tokens, policy "
        f"{explained.policy}",
        highlight=False,
        markup=False,
    )
    candidates = explained.placement.candidates
    for kind, title in _TITLES.items():
        of_kind = [c for c in candidates if (c.role, c.computes_prompt) == kind]
        if of_kind:
            console.print(_table(title, of_kind, explained))
    console.print(explained.reason, highlight=False, markup=False)


def print_legend(explained: Explanation, console: Console) -> None:
    """Prints the meaning of each term of the candidates, a line each."""
    shown = {name for c in explained.placement.candidates for name in c.terms} | {"cached", "cost"}
    table = Table(title="terms", title_justify="left", box=None, show_header=False)
    for name, meaning in TERMS.items():
        if name in shown:
            table.add_row(name, meaning)
    console.print(table)


def _table(title: str, candidates: list[Candidate], explained: Explanation) -> Table:
    """Builds a row for each worker and a column for each term; `>` marks the chosen worker."""
    names = sorted({name for c in candidates for name in c.terms})
    # Only the default policy counts seconds.
    factor, unit = (1000.0, " ms") if explained.policy == "baton" else (1.0, "")
    table = Table("", "worker", title=title, title_justify="left", box=None)
    for column in ("cached", *(f"{name}{unit}" for name in names), f"cost{unit}"):
        table.add_column(column, justify="right")
    table.add_column("not chosen because")
    placement = explained.placement
    winners = {placement.prefill_worker, placement.decode_worker}
    encoders = {choice.worker for choice in placement.encoders}
    for candidate in candidates:
        takes_part = candidate.computes_prompt == (not placement.prefill_worker)
        is_chosen = candidate.worker in winners and takes_part
        if candidate.role == "encode":
            is_chosen = candidate.worker in encoders
        terms = [
            f"{candidate.terms[n] * factor:.3f}" if n in candidate.terms else "" for n in names
        ]
        table.add_row(
            ">" if is_chosen else "",
            candidate.worker,
            str(candidate.num_cached_tokens),
            *terms,
            f"{candidate.cost * factor:.3f}" if terms else "",
            candidate.excluded,
        )
    return table
