"""Limits of stored responses."""

from dataclasses import dataclass

from baton.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseLimits:
    """Limits of stored responses."""

    ttl_s: float = setting(
        3600.0,
        "Seconds for which responses of /v1/responses are kept in Redis, with their conversation, "
        "for previous_response_id. 0: none are stored.",
        ge=0,
        le=30 * 86_400,
    )
    max_bytes: int = setting(
        512 * 2**10,
        "Maximum bytes of a stored response with its conversation. A larger one is answered and "
        "not stored.",
        ge=1024,
        le=16 * 2**20,
    )
    per_tenant: int = setting(
        200,
        "Maximum stored responses of a tenant. Beyond it the oldest are dropped; while Redis' "
        "memory is half full, those of the tenant with the most bytes.",
        ge=1,
        le=10_000,
    )
