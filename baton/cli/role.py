"""`baton role`: load of the pools, and role changes of workers."""

import dataclasses
import json
from collections.abc import Sequence

from rich.console import Console

from baton.client.client import Client, RoleBalance


def balances(client: Client) -> list[RoleBalance]:
    """Returns the balance of the first model, and of each other model that has workers."""
    first = client.role_balance()
    names = {worker.model for worker in client.list_workers()} - {first.model, ""}
    return [first, *(client.role_balance(name) for name in sorted(names))]


def print_json(found: Sequence[RoleBalance]) -> None:
    """Prints one JSON object a line, for each model."""
    for balance in found:
        print(json.dumps(dataclasses.asdict(balance)))


def print_balances(found: Sequence[RoleBalance], console: Console) -> None:
    """Prints the pressures and the proposed change of each model, as sentences."""
    for balance in found:
        if len(found) > 1:
            console.print(balance.model, style="bold", markup=False, highlight=False)
        _print_balance(balance, console)


def _print_balance(balance: RoleBalance, console: Console) -> None:
    console.print(
        f"pressure: encode {balance.encode_pressure:.2f}, prefill {balance.prefill_pressure:.2f}, "
        f"decode {balance.decode_pressure:.2f} (above 1: overloaded)",
        highlight=False,
    )
    console.print(_proposal(balance), highlight=False)


def change(client: Client, worker: str, role: str) -> str:
    """Changes a worker's role; returns a sentence about the change."""
    epoch = client.set_role(worker, role)
    return f"{worker} is ready as a {role} worker, in epoch {epoch}"


def _proposal(balance: RoleBalance) -> str:
    flip = balance.proposal
    if flip is None:
        return f"no role change is proposed: {balance.reason}"
    by_whom = (
        "the router will change it"
        if balance.is_elastic
        else f"change it with `baton role {flip.worker} {flip.role}`, or run routers with --elastic"
    )
    return f"{flip.worker} should be a {flip.role} worker: {balance.reason}; {by_whom}"
