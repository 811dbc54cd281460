"""Setup of a simulation: the cluster, its settings, and the workload as jobs."""

from collections.abc import Iterable
from dataclasses import dataclass

from baton.engine.config import EngineConfig
from baton.engine.scheduler.sequences.config import SchedulerConfig
from baton.errors import InvalidArgumentError
from baton_router.routing.admission.policy import AdmissionName
from baton_router.routing.placement.policy import PolicyName
from baton_simulator.job import VOCAB_SIZE, Job
from baton_simulator.latency import Machine
from baton_simulator.traces import MOONCAKE_BLOCK_SIZE, TraceRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A cluster of equal machines.

    Attributes:
        num_prefill, num_decode, num_encode: workers of each role; where they are colocated, as many
            as all together, each of which does all.
        block_size: tokens in a block. 512, the Mooncake format's own, is 32 times as fast to
            simulate as the 16 of a real pool; of a prefix only whole blocks are found again.
        cache_tokens: tokens that each worker's pool holds; None: what the machine has room for.
        policy: who places.
        admit_factor: as the setting of a decode worker of this name.
        admission: who is let in, by name of `baton_router.routing.admission.policy`.
        ttft_deadline: seconds until a request's first token must have come, or it is refused at
            once if that is not to be expected; None: it may come whenever.
        sample_seconds: between samples of the load; None: none are taken.
        fast_forward: run alike steps in one go; the results are the same.
    """

    machine: Machine
    num_prefill: int
    num_decode: int
    num_encode: int = 0
    policy: PolicyName = "baton"
    is_colocated: bool = False
    block_size: int = MOONCAKE_BLOCK_SIZE
    cache_tokens: int | None = None
    admit_factor: float = 4.0
    fast_forward: bool = True
    admission: AdmissionName = "none"
    ttft_deadline: float | None = None
    sample_seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("num_prefill", "num_decode", "block_size"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(name, f"is {getattr(self, name)}; must be at least 1")
        if self.num_encode < 0:
            raise InvalidArgumentError("num_encode", f"is {self.num_encode}; must be at least 0")
        if self.num_blocks < 1:
            raise InvalidArgumentError(
                "block_size",
                f"is {self.block_size}; a pool of {self.num_kv_tokens} tokens has none",
            )

    @property
    def num_workers(self) -> int:
        return self.num_prefill + self.num_decode + self.num_encode

    @property
    def num_kv_tokens(self) -> int:
        return self.machine.num_kv_tokens if self.cache_tokens is None else self.cache_tokens

    @property
    def num_blocks(self) -> int:
        """In each worker's pool."""
        return self.num_kv_tokens // self.block_size

    @property
    def max_len(self) -> int:
        """Tokens of one sequence at most: all of it must fit the pool."""
        return self.num_blocks * self.block_size

    def scheduler_config(self, max_model_len: int) -> SchedulerConfig:
        machine = self.machine
        return SchedulerConfig(
            max_num_batched_tokens=machine.max_num_batched_tokens,
            max_num_seqs=machine.max_num_seqs,
            block_size=self.block_size,
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            free_block_margin=EngineConfig().free_block_margin,
            encoder_budget=machine.encoder_budget,
            encoder_cache_tokens=machine.encoder_cache_tokens,
        )


def jobs_of(rows: Iterable[TraceRow], rate: float, block_size: int) -> list[Job]:
    """A trace at so many times its own rate of arrivals.

    A block of another size than the trace's is told apart by the ids of the trace's blocks that it
    reaches into; so equal hashes mean equal prefixes, as far as the trace says.
    """
    return [
        Job(
            number=number,
            row=row,
            hashes=_hashes(row, block_size),
            root=number.to_bytes(16, "big"),
            arrival=row.arrival / rate,
        )
        for number, row in enumerate(rows)
    ]


def _hashes(row: TraceRow, block_size: int) -> tuple[bytes, ...]:
    """Returns a hash for each full block: the id of the trace's block in which it ends, and its
    index among the blocks that end there."""
    ids = row.block_ids or ()
    num_full = row.num_prompt_tokens // block_size if ids else 0
    ends = ((i + 1) * block_size - 1 for i in range(num_full))
    return tuple(
        (ids[end // MOONCAKE_BLOCK_SIZE] << 32 | end % MOONCAKE_BLOCK_SIZE).to_bytes(16, "big")
        for end in ends
    )
