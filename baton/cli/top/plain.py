"""`baton top` without a terminal: tables once, or lines of JSON for programs."""

import asyncio
import json

from rich.console import Console
from rich.table import Table

from baton.cli.top.snapshot import Snapshot, SnapshotReader, as_json
from baton.cli.top.tables import (
    REQUEST_COLUMNS,
    WORKER_COLUMNS,
    headline,
    request_rows,
    worker_rows,
)
from baton.rpc.tls import Tls


def show_once(
    address: str, token: str, interval: float, console: Console, tls: Tls | None = None
) -> None:
    """Prints two tables, with the rates of one interval."""

    async def show() -> None:
        async with SnapshotReader(address, token, tls) as reader:
            async for snapshot in reader.every(interval):
                print_tables(snapshot, address, console)
                return

    asyncio.run(show())


def print_json(
    address: str, token: str, interval: float, tls: Tls | None = None, *, once: bool
) -> None:
    """Prints one JSON object a line, in each interval."""

    async def show() -> None:
        async with SnapshotReader(address, token, tls) as reader:
            async for snapshot in reader.every(interval):
                print(json.dumps(as_json(snapshot)), flush=True)
                if once:
                    return

    asyncio.run(show())


def print_tables(snapshot: Snapshot, address: str, console: Console) -> None:
    """Prints the headline, the workers, and the requests in flight."""
    console.print(headline(snapshot, address))
    workers = Table(*WORKER_COLUMNS, box=None)
    for row in worker_rows(snapshot):
        workers.add_row(*row)
    console.print(workers if snapshot.workers else "no worker is registered yet")
    if snapshot.requests:
        requests = Table(*REQUEST_COLUMNS, box=None)
        for row in request_rows(snapshot):
            requests.add_row(*row)
        console.print(requests)
