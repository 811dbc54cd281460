"""Check that no worker is much slower than its peers."""

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median

from baton.cli.checks.finding import Finding, note, ok
from baton.client.client import Worker

# Factor from which a worker counts as slow; the router places by smaller differences.
SLOW = 1.5


def slow_workers(workers: Sequence[Worker]) -> Iterator[Finding]:
    """Notes workers whose steps take longer than those of their peers: of the same model and role,
    by the costs that the router has fitted to their reports."""
    known = [worker for worker in workers if worker.step_seconds]
    slow = [worker for worker in known if worker.slowness >= SLOW]
    for worker in slow:
        peers = [
            peer.step_seconds
            for peer in known
            if (peer.model, peer.role) == (worker.model, worker.role) and peer is not worker
        ]
        beside = f", its peers {_ms(median(peers))}" if peers else ""
        yield note(
            worker.id,
            f"{_ms(worker.step_seconds)} a step{beside}: {worker.slowness:.1f} times as long for "
            "the same work",
            "look for what else runs on its machine, for a GPU that throttles (nvidia-smi) or a "
            "slower device; drain it to move its requests: `baton role` shows what is left",
        )
    groups = Counter((worker.model, worker.role) for worker in known)
    if not slow and any(size > 1 for size in groups.values()):
        yield ok("steps", "no worker is slower than its peers")


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
