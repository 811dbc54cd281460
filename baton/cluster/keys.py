"""Key names in Redis.

All keys have one hash tag, so that on Redis Cluster one node holds all of them and one transaction
may use any of them (ADR 0021). ACLs allow `~{baton}:*`. If several deployments share a Redis, each
one's keys have a prefix before the hash tag, which its client knows
(`baton.cluster.redis.client.prefix_of`): `NAME:{baton}:*`.
"""

KEY_TAG = "{baton}"


def workers_key(prefix: str = "") -> str:
    """Returns the key of the set of all workers' ids."""
    return f"{prefix}{KEY_TAG}:workers"


def gossip_key(prefix: str = "") -> str:
    """Returns the key of the routers' gossip hash."""
    return f"{prefix}{KEY_TAG}:notices"


def role_lock_key(prefix: str = "") -> str:
    """Returns the key of the distributed lock for role changes, held by one router."""
    return f"{prefix}{KEY_TAG}:role-turn"


def record_key(worker: str, prefix: str = "") -> str:
    """Returns the key of a worker's record."""
    return f"{prefix}{KEY_TAG}:worker:{worker}"


def rival_key(worker: str, prefix: str = "") -> str:
    """Returns the key of the hash with the endpoint of a live worker whose id another one has."""
    return f"{prefix}{KEY_TAG}:rival:{worker}"


def stream_key(worker: str, epoch: int, prefix: str = "") -> str:
    """Returns the key of the event stream of a worker's epoch."""
    return f"{prefix}{KEY_TAG}:kv:{worker}:{epoch}"


def snapshot_key(worker: str, epoch: int, prefix: str = "") -> str:
    """Returns the key of the snapshot of a worker's epoch."""
    return f"{stream_key(worker, epoch, prefix)}:snapshot"


def signatures_key(worker: str, epoch: int, prefix: str = "") -> str:
    """Returns the key of the signatures of the snapshot of a worker's epoch."""
    return f"{snapshot_key(worker, epoch, prefix)}:signatures"


def responses_key(tenant: str, prefix: str = "") -> str:
    """Returns the key of the hash of a tenant's stored responses: when each expires, by number.
    `tenant`: 32 hex digits."""
    return f"{prefix}{KEY_TAG}:responses:{tenant}"


def response_key(tenant: str, number: str, prefix: str = "") -> str:
    """Returns the key of a stored response."""
    return f"{responses_key(tenant, prefix)}:{number}"


def response_bytes_key(prefix: str = "") -> str:
    """Returns the key of the sorted set of tenants with stored responses, by their bytes."""
    return f"{prefix}{KEY_TAG}:responses"
