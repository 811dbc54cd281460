"""`baton role`: load of the pools, and role changes of workers."""

import dataclasses
import json

from rich.console import Console

from baton.client.client import Client, RoleBalance


def print_json(balance: RoleBalance) -> None:
    """Prints one JSON object."""
    print(json.dumps(dataclasses.asdict(balance)))


def print_balance(balance: RoleBalance, console: Console) -> None:
    """Prints the pressures and the proposed change, as sentences."""
    console.print(
        f"pressure: prefill {balance.prefill_pressure:.2f}, decode {balance.decode_pressure:.2f} "
        "(above 1: overloaded)",
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
