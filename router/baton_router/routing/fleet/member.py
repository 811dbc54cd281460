"""Worker of the fleet: its record, health, load, circuit breaker and latency model.

Makes the worker's candidate of each snapshot. Awaits nothing and calls no worker.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from baton.cluster.registry.registry import WorkerRecord
from baton.v1.kv_transfer_pb2 import KvLayouts
from baton_router.routing.fleet.candidate import Candidate, WorkerLimits
from baton_router.routing.fleet.circuit_breaker import CircuitBreaker
from baton_router.routing.fleet.load import Load, Share
from baton_router.routing.fleet.worker_model import PoolModel, WorkerModel

State = Literal["ready", "draining", "unreachable", "starting"]


class Member:
    """Worker of the fleet: its record, health, load, circuit breaker and latency model.

    Attributes:
        pairing: workers exchange blocks only if their pairings are equal.
        namespace: namespace of the chain hashes of its blocks.
        bytes_per_token: bytes of KV per token, over all layers.
        limits: its limits for a single request.
        max_held_tokens: maximum tokens of all its sequences; None if every layer has a window.
    """

    def __init__(self, record: WorkerRecord, pool: PoolModel) -> None:
        self.record = record
        self.is_serving = False
        self.is_listed = True
        self.was_reached = False
        self.was_probed = asyncio.Event()
        self.load = Load()
        # Computed once per epoch, because each request reads them.
        self.pairing = record.pairing
        self.namespace = record.namespace
        self.layouts = KvLayouts.FromString(record.layout).layouts
        self.bytes_per_token = sum(one.block_bytes / one.block_size for one in self.layouts)
        has_window = any(layout.HasField("window") for layout in self.layouts[:1])
        self.limits = WorkerLimits(
            record.max_model_len,
            record.block_size,
            None if has_window else record.num_blocks,
            record.max_num_seqs or None,
        )
        self.max_held_tokens = self.limits.held_tokens()
        self.circuit = CircuitBreaker()
        self.model = WorkerModel(pool, record.max_num_batched_tokens)
        self._seen: tuple[object, ...] | None = None
        self._candidate: Candidate | None = None  # cached for `_seen`

    @property
    def admin_endpoint(self) -> str:
        """Endpoint of its admin service."""
        return self.record.admin_endpoint or self.record.endpoint

    @property
    def state(self) -> State:
        """State of the worker; only a "ready" one can take requests."""
        if self.record.draining:
            return "draining"
        if self.is_serving and self.circuit.is_closed:
            return "ready"
        return "unreachable" if self.was_reached else "starting"

    @contextmanager
    def loaded(
        self,
        *,
        num_sequences: int = 1,
        num_tokens: int = 0,
        num_held_tokens: int = 0,
        num_encoder_tokens: int = 0,
    ) -> Iterator[None]:
        """Counts sequences, prompt tokens to compute, tokens whose KV is held and tokens of encoder
        inputs to encode as load of the worker for the `with` block."""
        share = Share(num_sequences, num_tokens, num_held_tokens, num_encoder_tokens)
        self.load.take(share, time.monotonic(), time.monotonic_ns())
        try:
            yield
        finally:
            self.load.release(share)

    def candidate(
        self,
        now: float,
        num_cached_tokens: int,
        excluded: str,
        cached_inputs: tuple[int, ...] = (),
        pending_inputs: tuple[int, ...] = (),
    ) -> Candidate:
        """Returns the worker's candidate, cached because few workers change between requests."""
        num_changes, rates = self.load.num_changes, self.model.rates
        inputs = cached_inputs, pending_inputs
        seen = now, num_cached_tokens, excluded, inputs, num_changes, rates
        if self._candidate is None or seen != self._seen:
            self._seen = seen
            self._candidate = self.load.candidate(
                self.record.id,
                self.record.role,
                self.pairing,
                now,
                num_cached_tokens=num_cached_tokens,
                max_held_tokens=self.max_held_tokens,
                excluded=excluded,
                rates=rates,
                version=self.record.version,
                cached_inputs=cached_inputs,
                pending_inputs=pending_inputs,
                limits=self.limits,
                kv_dtype=self.record.kv_dtype,
            )
        return self._candidate

    def excluded(self, tokenizer_hash: bytes, pooled_output: str = "") -> str:
        """Returns the reason why the worker cannot take requests now; empty if it can. Arguments as
        of `Fleet`."""
        if self.record.draining:
            return "draining"
        if not self.is_serving:
            return "not answering" if self.was_reached else "not reached yet"
        if self.record.tokenizer_hash != tokenizer_hash:
            return "another tokenizer"
        if self.record.pooled_output != pooled_output:
            return f"its model makes {self.record.pooled_output or 'text'}"
        return "" if self.circuit.is_closed else "failed a moment ago"
