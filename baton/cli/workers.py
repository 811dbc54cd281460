"""`baton workers`: the workers of a cluster."""

import dataclasses
import json

from rich.console import Console
from rich.table import Table

from baton.client.client import Worker

_STYLES = {"ready": "green", "starting": "yellow", "draining": "yellow", "unreachable": "red"}


def print_json(workers: list[Worker]) -> None:
    """Prints one JSON object a line."""
    for worker in workers:
        print(json.dumps(dataclasses.asdict(worker)))


def print_table(workers: list[Worker], console: Console) -> None:
    """Prints a row for each worker, with its present role; a sentence if there is none."""
    if not workers:
        console.print("no worker is registered yet")
        return
    table = Table("worker", "role", "version", "endpoint", "state", box=None)
    table.add_column("requests", justify="right")
    table.add_column("cached blocks", justify="right")
    for worker in workers:
        style = _STYLES.get(worker.state, "")
        table.add_row(
            worker.id,
            worker.role,
            worker.version or "not said",
            worker.endpoint,
            f"[{style}]{worker.state}[/]" if style else worker.state,
            str(worker.num_requests),
            str(worker.num_indexed_blocks),
        )
    console.print(table)
