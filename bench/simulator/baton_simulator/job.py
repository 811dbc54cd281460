"""One request of a workload, and what became of it."""

from array import array
from dataclasses import dataclass, field
from typing import cast

from baton.cluster.prefix import BlockHash
from baton.engine.request import EngineRequest, KvSource, Purpose
from baton.engine.scheduler.sequences.sequence import Request
from baton.models.images.encoder_input import CONTENT_HASH_BYTES, EncoderInput
from baton.sampling import SamplingParams
from baton_router.call.request import Demand
from baton_simulator.traces import TraceRow

VOCAB_SIZE = 2**15


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way. Times in seconds since the start of the simulation.

    Attributes:
        hashes: chain hashes of the prompt's leading full blocks.
        root: what the chain begins with; only equal ones can be followed by equal blocks.
        refusal: why it was turned away; empty if it was not.
        prefilled_at, last_token_at: of its tokens so far.
        num_gaps: tokens that followed the first one.
        num_cached_tokens: of its prompt, found where it was computed.
        encoder_inputs: the images of its prompt, without tensors.
    """

    number: int
    row: TraceRow
    hashes: tuple[BlockHash, ...]
    root: BlockHash
    arrival: float
    refusal: str = ""
    prefilled_at: float | None = None
    last_token_at: float = 0.0
    num_gaps: int = 0
    num_cached_tokens: int = 0
    is_finished: bool = False
    chunks: list[tuple[float, int]] = field(default_factory=list)
    encoder_inputs: tuple[EncoderInput, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.encoder_inputs = tuple(
            EncoderInput(i.content.to_bytes(CONTENT_HASH_BYTES, "big"), i.start, i.num_tokens)
            for i in self.row.images
        )

    @property
    def request_id(self) -> str:
        return str(self.number)

    @property
    def num_prompt_tokens(self) -> int:
        return max(1, self.row.num_prompt_tokens)

    @property
    def num_output_tokens(self) -> int:
        return max(1, self.row.num_output_tokens)

    @property
    def demand(self) -> Demand:
        return Demand(self.num_prompt_tokens, self.num_output_tokens)

    @property
    def token_id(self) -> int:
        """The token that its answer is made of: another one than that of most other requests, so
        that answers are not taken for each other by the prefix cache."""
        return 1 + self.number % (VOCAB_SIZE - 1)

    @property
    def ttft(self) -> float | None:
        return None if self.prefilled_at is None else self.prefilled_at - self.arrival

    @property
    def mean_gap(self) -> float:
        """The mean time between its tokens; 0 where there was one only."""
        if self.prefilled_at is None or not self.num_gaps:
            return 0.0
        return (self.last_token_at - self.prefilled_at) / self.num_gaps

    def request(self, purpose: Purpose, source: KvSource) -> Request:
        """Returns the engine's request. All prompt tokens are equal; the block hashes differ as
        in the trace."""
        spec = EngineRequest(
            request_id=self.request_id,
            # Not a tuple, of which numpy would convert each element.
            token_ids=cast("tuple[int, ...]", array("i", bytes(4 * self.num_prompt_tokens))),
            params=SamplingParams(max_tokens=self.num_output_tokens, ignore_eos=True),
            num_prompt_tokens=self.num_prompt_tokens,
            kv_source=source,
            purpose=purpose,
            block_hashes=self.hashes,
            encoder_inputs=self.encoder_inputs,
        )
        return Request(spec=spec, root=self.root)
