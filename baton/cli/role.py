"""`baton role`: how the pools compare, and workers that change their roles."""

import dataclasses
import json

from rich.console import Console

from baton.client.client import Client, RoleBalance


def print_json(balance: RoleBalance) -> None:
    """One object."""
    print(json.dumps(dataclasses.asdict(balance)))


def print_balance(balance: RoleBalance, console: Console) -> None:
    """The pressures, and what should be done, as sentences."""
    console.print(
        f"pressure: prefill {balance.prefill_pressure:.2f}, decode {balance.decode_pressure:.2f} "
        "(1 is as much as they should have to do)",
        highlight=False,
    )
    console.print(_proposal(balance), highlight=False)


def change(client: Client, worker: str, role: str) -> str:
    """Has a worker change its role; returns the sentence to be said of it."""
    epoch = client.set_role(worker, role)
    return f"{worker} takes work as a {role} worker, in epoch {epoch}"


def _proposal(balance: RoleBalance) -> str:
    flip = balance.proposal
    if flip is None:
        return f"no change of roles is proposed: {balance.reason}"
    by_whom = (
        "the router sees to it"
        if balance.is_elastic
        else f"do it with `baton role {flip.worker} {flip.role}`, or run routers with --elastic"
    )
    return f"{flip.worker} should be a {flip.role} worker: {balance.reason}; {by_whom}"
