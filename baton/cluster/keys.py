"""The names of all that Redis holds.

All have one hash tag, so that on Redis Cluster all lie on one node and one transaction may touch
any of them (ADR 0021). Access lists allow `~{baton}:*`. Where several Batons share a Redis, each
one's names begin with a prefix of its own before that, which its client knows
(`baton.cluster.redis.prefix_of`): `NAME:{baton}:*`.
"""

KEY_TAG = "{baton}"


def workers_key(prefix: str = "") -> str:
    """The key of the set of all workers' ids."""
    return f"{prefix}{KEY_TAG}:workers"


def notices_key(prefix: str = "") -> str:
    """The key of what routers tell each other."""
    return f"{prefix}{KEY_TAG}:notices"


def role_turn_key(prefix: str = "") -> str:
    """The key that names the router which may change a worker's role."""
    return f"{prefix}{KEY_TAG}:role-turn"


def record_key(worker: str, prefix: str = "") -> str:
    """The key of a worker's record."""
    return f"{prefix}{KEY_TAG}:worker:{worker}"


def stream_key(worker: str, epoch: int, prefix: str = "") -> str:
    """The key of the stream of a worker's epoch."""
    return f"{prefix}{KEY_TAG}:kv:{worker}:{epoch}"


def snapshot_key(worker: str, epoch: int, prefix: str = "") -> str:
    """The key of the snapshot of a worker's epoch."""
    return f"{stream_key(worker, epoch, prefix)}:snapshot"
