"""`baton workers`: the workers of a cluster, and the use of their KV memory."""

import dataclasses
import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from baton.cli.top.tables import in_bytes
from baton.client.client import Worker, WorkerMemory

_STYLES = {"ready": "green", "starting": "yellow", "draining": "yellow", "unreachable": "red"}


def print_json(workers: Sequence[Worker] | Sequence[WorkerMemory]) -> None:
    """Prints one JSON object a line."""
    for worker in workers:
        print(json.dumps(dataclasses.asdict(worker)))


def print_table(workers: list[Worker], console: Console) -> None:
    """Prints a row for each worker, with its present role, and its model where there are several;
    a sentence if there is none."""
    if not workers:
        console.print("no worker is registered yet")
        return
    has_models = len({worker.model for worker in workers}) > 1
    models = ("model",) if has_models else ()
    table = Table("worker", *models, "role", "version", "endpoint", "state", box=None)
    table.add_column("requests", justify="right")
    table.add_column("indexed hashes", justify="right")
    for worker in workers:
        style = _STYLES.get(worker.state, "")
        table.add_row(
            worker.id,
            *((worker.model,) if has_models else ()),
            worker.role,
            worker.version or "not said",
            worker.endpoint,
            f"[{style}]{worker.state}[/]" if style else worker.state,
            str(worker.num_requests),
            str(worker.num_indexed_hashes),
        )
    console.print(table)


def print_memory(used: list[WorkerMemory], console: Console) -> None:
    """Prints a row for each worker that serves; a sentence if there is none."""
    if not used:
        console.print("no worker serves yet")
        return
    table = Table("worker", box=None)
    for name in (
        "KV pool", "held", "cached", "free", "saved", "unused tokens", "reserved tokens",
        "host pool", "held", "swapped out", "in",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for worker in used:
        table.add_row(
            worker.worker,
            in_bytes(worker.pool_bytes),
            str(worker.num_held_blocks),
            str(worker.num_cached_blocks),
            str(worker.num_free_blocks),
            str(worker.num_saved_blocks),
            str(worker.num_unused_tokens),
            str(worker.num_reserved_tokens),
            in_bytes(worker.host_pool_bytes),
            str(worker.num_held_host_blocks),
            str(worker.num_swapped_out_blocks),
            str(worker.num_swapped_in_blocks),
        )
    console.print(table)
