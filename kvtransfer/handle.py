"""What a claimant must know and show to fetch blocks. Plain data; `wire` makes messages of it."""

from dataclasses import dataclass

from baton.engine.kv_pool import KvLayout
from baton.errors import FailedPreconditionError

LEASE_ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class Pairing:
    """What two workers must have in common before any block moves."""

    fingerprint: bytes
    layout: KvLayout

    def check(self, other: "Pairing", other_name: str) -> None:
        """Raises `FailedPreconditionError`, naming both values, unless the two are equal."""
        if self.fingerprint != other.fingerprint:
            raise FailedPreconditionError(
                f"this worker's model fingerprint is {self.fingerprint.hex()}, that of "
                f"{other_name} is {other.fingerprint.hex()}: they serve different models or "
                "versions"
            )
        if self.layout != other.layout:
            raise FailedPreconditionError(
                f"this worker's KV layout is {_describe(self.layout)}, that of {other_name} is "
                f"{_describe(other.layout)}: start both with the same dtype and block size"
            )


@dataclass(frozen=True, slots=True)
class Handle:
    """Lets one decode worker claim one lease."""

    source_worker: str
    source_endpoint: str
    source_epoch: int
    lease_id: bytes
    pairing: Pairing
    num_tokens: int
    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What a sequence continues with after its prefill."""

    position: int
    token_id: int
    logprob: float | None


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What one fetch moved. `exposed_s`: from the prefill's end, as seen here, to the fence."""

    num_blocks: int
    num_bytes: int
    exposed_s: float


def _describe(layout: KvLayout) -> str:
    heads = {(m.num_kv_heads, m.key_head_dim, m.value_head_dim): None for m in layout.layers}
    shapes = ", ".join(f"{n} heads of {key} + {value}" for n, key, value in heads)
    return (
        f"{layout.dtype}, block size {layout.block_size}, {layout.block_bytes} bytes a block, "
        f"{len(layout.layers)} layers ({shapes})"
    )
