"""The names of all that Redis holds.

All begin with one hash tag, so that on Redis Cluster all lie on one node and one transaction may
touch any of them (ADR 0021). Access lists allow `~{baton}:*`.
"""

KEY_TAG = "{baton}"

WORKERS_KEY = f"{KEY_TAG}:workers"

NOTICES_KEY = f"{KEY_TAG}:notices"
"""The key of what routers tell each other."""

ROLE_TURN_KEY = f"{KEY_TAG}:role-turn"
"""The key that names the router which may change a worker's role."""


def record_key(worker: str) -> str:
    """The key of a worker's record."""
    return f"{KEY_TAG}:worker:{worker}"


def stream_key(worker: str, epoch: int) -> str:
    """The key of the stream of a worker's epoch."""
    return f"{KEY_TAG}:kv:{worker}:{epoch}"


def snapshot_key(worker: str, epoch: int) -> str:
    """The key of the snapshot of a worker's epoch."""
    return f"{stream_key(worker, epoch)}:snapshot"
