"""Tables of a snapshot, as rows of text."""

from collections.abc import Callable, Mapping

from rich.text import Text

from baton.cli.checks.slow_workers import SLOW
from baton.cli.top.snapshot import Rates, Snapshot, WorkerSnapshot
from baton.client.client import Load, RequestInfo, Worker

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
        ("  admission is paused" if router.is_paused else "", "yellow"),
        f"  running {router.num_running}  waiting {router.num_waiting}",
        f"  {tokens:,.0f} tokens/s  {in_bytes(moved)}/s transferred",
        f"  pressure: encode {balance.encode_pressure:.2f}",
        f" prefill {balance.prefill_pressure:.2f} decode {balance.decode_pressure:.2f}",
        (f"  versions: {', '.join(versions)}" if len(versions) > 1 else "", "yellow"),
        ("  requests: with --token" if snapshot.hides_requests else "", "yellow"),
    )


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


def _state(shown: WorkerSnapshot) -> Text:
    worker, load = shown.worker, shown.load
    if load is not None and load.state == "starting":
        return Text(f"{load.phase} {load.progress:.0%}", "yellow")
    if load is not None and load.is_paused and worker.state == "ready":
        return Text("paused", "yellow")
    return Text(worker.state, _STYLES.get(worker.state, ""))


def _step(worker: Worker) -> Text:
    text = f"{1000 * worker.step_seconds:.1f}" if worker.step_seconds else ""
    return Text(text, "red" if worker.slowness >= SLOW else "")


def _per_token(request: RequestInfo) -> Text:
    """Returns the mean time per output token after the first, of all its sequences."""
    if request.time_to_first_token is None or request.num_output_tokens < 2:
        return Text("")
    seconds = request.age - request.time_to_first_token
    return Text(f"{1000 * seconds / (request.num_output_tokens - 1):.1f}")


def _waiting(number: int) -> Text:
    return Text(str(number), "yellow" if number else "")


_OF_WORKER: Mapping[str, Callable[[WorkerSnapshot], Text]] = {
    "worker": lambda shown: Text(shown.worker.id),
    "role": lambda shown: Text(shown.worker.role),
    "state": _state,
    "ms/step": lambda shown: _step(shown.worker),
}
_OF_LOAD: Mapping[str, Callable[[Load, Rates], Text]] = {
    "running": lambda load, _: Text(str(load.num_running)),
    "waiting": lambda load, _: _waiting(load.num_waiting),
    "KV in use": lambda load, _: bar(load.num_held_blocks, load.num_blocks),
    "cached": lambda load, _: Text(str(load.num_cached_blocks)),
    "to encode": lambda load, _: _waiting(load.num_waiting_encoder_tokens),
    "encoder use": lambda load, _: bar(
        load.num_held_encoder_blocks, load.num_encoder_blocks, width=8
    ),
    "leases": lambda load, _: Text(str(load.num_leases)),
    "tokens/s": lambda _, rates: Text(f"{rates.tokens:,.0f}"),
    "KV in/s": lambda _, rates: Text(in_bytes(rates.transferred_bytes)),
    "preempted/s": lambda _, rates: Text(
        f"{rates.preemptions:.1f}", "red" if rates.preemptions else ""
    ),
}
_OF_REQUEST: Mapping[str, Callable[[RequestInfo], Text]] = {
    "request": lambda request: Text(request.request_id),
    "tenant": lambda request: Text(request.tenant),
    "age": lambda request: Text(f"{request.age:.1f} s"),
    "phase": lambda request: Text(request.phase, _STYLES.get(request.phase, "")),
    "prompt": lambda request: Text(str(request.num_prompt_tokens)),
    "output": lambda request: Text(str(request.num_output_tokens)),
    "first token": lambda request: Text(
        "" if request.time_to_first_token is None else f"{request.time_to_first_token:.3f} s"
    ),
    "ms/token": _per_token,
    "prefill": lambda request: Text(request.prefill_worker),
    "decode": lambda request: Text(request.decode_worker),
    "migrations": lambda request: Text(str(request.num_migrations or "")),
}
WORKER_COLUMNS = (*_OF_WORKER, *_OF_LOAD)
REQUEST_COLUMNS = tuple(_OF_REQUEST)


def worker_rows(snapshot: Snapshot) -> list[list[Text]]:
    """Returns the values of `WORKER_COLUMNS` for each worker, in the order of their ids; with its
    model where there are several."""
    rows = list(map(_worker_row, snapshot.workers))
    if len({shown.worker.model for shown in snapshot.workers}) > 1:
        for row, shown in zip(rows, snapshot.workers, strict=True):
            row[0].append(f" ({shown.worker.model})", "dim")
    return rows


def request_rows(snapshot: Snapshot) -> list[list[Text]]:
    """Returns the values of `REQUEST_COLUMNS` for each request, the oldest first; with its model
    where there are several."""
    rows = [[cell(request) for cell in _OF_REQUEST.values()] for request in snapshot.requests]
    if len({shown.worker.model for shown in snapshot.workers}) > 1:
        for row, request in zip(rows, snapshot.requests, strict=True):
            row[0].append(f" ({request.model})", "dim")
    return rows


def _worker_row(shown: WorkerSnapshot) -> list[Text]:
    cells = [cell(shown) for cell in _OF_WORKER.values()]
    if shown.load is None:
        return [*cells, *(Text("-", "dim") for _ in _OF_LOAD)]
    return [*cells, *(cell(shown.load, shown.rates) for cell in _OF_LOAD.values())]
