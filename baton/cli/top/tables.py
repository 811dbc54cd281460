"""Tables of a snapshot, as rows of text."""

from rich.text import Text

from baton.cli.top.snapshot import Snapshot, WorkerSnapshot
from baton.client.client import RequestInfo

WORKER_COLUMNS = (
    "worker",
    "role",
    "state",
    "running",
    "waiting",
    "KV in use",
    "cached",
    "leases",
    "tokens/s",
    "KV in/s",
    "preempted/s",
)
REQUEST_COLUMNS = (
    "request",
    "age",
    "phase",
    "prompt",
    "output",
    "first token",
    "prefill",
    "decode",
    "migrations",
)

_BAR_WIDTH = 16
_STYLES = {
    "ready": "green",
    "starting": "yellow",
    "draining": "yellow",
    "unreachable": "red",
    "waiting": "yellow",
}
_UNITS = ("B", "kB", "MB", "GB", "TB")


def headline(snapshot: Snapshot, address: str) -> Text:
    """Returns the cluster in a line, with the versions of its workers while they differ."""
    router, balance = snapshot.router, snapshot.balance
    tokens = sum(worker.rates.tokens for worker in snapshot.workers)
    moved = sum(worker.rates.transferred_bytes for worker in snapshot.workers)
    versions = sorted({worker.worker.version or "unknown" for worker in snapshot.workers})
    return Text.assemble(
        (address, "bold"),
        f"  running {router.num_running}  waiting {router.num_waiting}",
        f"  {tokens:,.0f} tokens/s  {in_bytes(moved)}/s transferred",
        f"  pressure: prefill {balance.prefill_pressure:.2f} decode {balance.decode_pressure:.2f}",
        (f"  versions: {', '.join(versions)}" if len(versions) > 1 else "", "yellow"),
    )


def worker_rows(snapshot: Snapshot) -> list[list[Text]]:
    """Returns the values of `WORKER_COLUMNS` for each worker, in the order of their ids."""
    return [_worker_row(worker) for worker in snapshot.workers]


def request_rows(snapshot: Snapshot) -> list[list[Text]]:
    """Returns the values of `REQUEST_COLUMNS` for each request, the oldest first."""
    return [_request_row(request) for request in snapshot.requests]


def in_bytes(number: float) -> str:
    """Returns a size with its unit, such as "12.3 MB"."""
    unit = 0
    while number >= 1000 and unit < len(_UNITS) - 1:
        number, unit = number / 1000, unit + 1
    return f"{number:.0f} B" if unit == 0 else f"{number:.1f} {_UNITS[unit]}"


def bar(part: float, whole: float, width: int = _BAR_WIDTH) -> Text:
    """Returns the used share of the whole, as a bar and a percentage."""
    share = part / whole if whole else 0.0
    full = round(min(1.0, share) * width)
    style = "red" if share > 0.95 else "yellow" if share > 0.8 else "green"
    return Text.assemble(("█" * full, style), ("░" * (width - full), "dim"), f" {share:4.0%}")


def _worker_row(shown: WorkerSnapshot) -> list[Text]:
    worker, load, rates = shown.worker, shown.load, shown.rates
    cells = [Text(worker.id), Text(worker.role), Text(worker.state, _STYLES.get(worker.state, ""))]
    if load is None:
        return [*cells, *(Text("-", "dim") for _ in WORKER_COLUMNS[len(cells) :])]
    if load.state == "starting":
        cells[2] = Text(f"{load.phase} {load.progress:.0%}", "yellow")
    return [
        *cells,
        Text(str(load.num_running)),
        Text(str(load.num_waiting), "yellow" if load.num_waiting else ""),
        bar(load.num_held_blocks, load.num_blocks),
        Text(str(load.num_cached_blocks)),
        Text(str(load.num_leases)),
        Text(f"{rates.tokens:,.0f}"),
        Text(in_bytes(rates.transferred_bytes)),
        Text(f"{rates.preemptions:.1f}", "red" if rates.preemptions else ""),
    ]


def _request_row(request: RequestInfo) -> list[Text]:
    first = request.time_to_first_token
    return [
        Text(request.request_id),
        Text(f"{request.age:.1f} s"),
        Text(request.phase, _STYLES.get(request.phase, "")),
        Text(str(request.num_prompt_tokens)),
        Text(str(request.num_output_tokens)),
        Text("" if first is None else f"{first:.3f} s"),
        Text(request.prefill_worker),
        Text(request.decode_worker),
        Text(str(request.num_migrations) if request.num_migrations else ""),
    ]
