"""Events of workers that run a request, as plain data. `kind` is the field of the message that
each is made of; tokens of a decode worker are an `OutputDelta`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from baton_router.call.ending import Ending
from baton_router.call.output_delta import OutputDelta
from baton_router.call.tokens import TopLogprobs
from baton_router.routing.fleet.worker_model import WorkDone


@dataclass(frozen=True, slots=True)
class WorkerEvent:
    """Event of a worker; by itself one that the router does not know, of a newer worker."""

    kind: ClassVar[str] = ""


@dataclass(frozen=True, slots=True)
class Admitted(WorkerEvent):
    """The worker has admitted the request."""

    kind: ClassVar[str] = "admitted"


@dataclass(frozen=True, slots=True)
class Released(WorkerEvent):
    """The claimant has what the worker kept for it."""

    kind: ClassVar[str] = "released"


@dataclass(frozen=True, slots=True)
class Report(WorkerEvent):
    """Event with the work that the worker did for it. `done`: as the speeds are learned by."""

    done: WorkDone


@dataclass(frozen=True, slots=True)
class PrefillStarted(WorkerEvent):
    """The worker computes the prompt.

    Attributes:
        queue_seconds: from the call to the first step.
        elapsed: seconds since that step.
    """

    kind: ClassVar[str] = "started"
    queue_seconds: float
    elapsed: float
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class StartedAlone(Report):
    """The decode worker computes the prompt itself."""

    kind: ClassVar[str] = "prefill_started"
    started: PrefillStarted


@dataclass(frozen=True, slots=True)
class PromptScores(WorkerEvent):
    """Log-probabilities of consecutive tokens of the prompt, in nats.

    Attributes:
        position: of the first one in the prompt.
        tops: most likely tokens at the position of each; empty unless asked for.
    """

    kind: ClassVar[str] = "prompt_logprobs"
    position: int
    logprobs: Sequence[float]
    tops: Sequence[TopLogprobs]

    def after(self, num_known: int) -> "PromptScores | None":
        """Returns those after the first `num_known` tokens of the prompt; None: there are none."""
        num_repeated = max(0, num_known - self.position)
        if num_repeated >= len(self.logprobs):
            return None
        rest = self.logprobs[num_repeated:], self.tops[num_repeated:]
        return PromptScores(self.position + num_repeated, *rest)


@dataclass(frozen=True, slots=True)
class PrefillResult(Report):
    """The prompt is computed. `first_tokens`: one, still without text."""

    kind: ClassVar[str] = "result"
    first_tokens: Sequence[OutputDelta]


@dataclass(frozen=True, slots=True)
class PoolResult(Report):
    """The pooled output is computed."""

    kind: ClassVar[str] = "result"
    values: Sequence[float]


@dataclass(frozen=True, slots=True)
class KvReady(Report):
    """The decode worker has the prompt's blocks.

    Attributes:
        exposed_seconds: it waited for after the prompt was computed.
        connector: by which they came.
    """

    kind: ClassVar[str] = "kv_ready"
    exposed_seconds: float
    num_blocks: int
    num_bytes: int
    num_reused_blocks: int
    connector: str


@dataclass(frozen=True, slots=True)
class SequenceEnded(WorkerEvent):
    """A sequence has ended."""

    kind: ClassVar[str] = "finished"
    sequence_index: int
    ending: Ending


@dataclass(frozen=True, slots=True)
class Draining(WorkerEvent):
    """The decode worker drains: another one should resume the request."""

    kind: ClassVar[str] = "draining"


@dataclass(frozen=True, slots=True)
class Suspended(WorkerEvent):
    """The decode worker has suspended the request, and keeps the KV of `num_tokens` tokens."""

    kind: ClassVar[str] = "suspended"
    lease_id: bytes
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Preempted(WorkerEvent):
    """The decode worker has given the request back."""

    kind: ClassVar[str] = "preempted"


@dataclass(frozen=True, slots=True)
class Encoded(Report):
    """The worker has the output of an encoder input. Seconds as of `PrefillStarted`."""

    kind: ClassVar[str] = "encoded"
    was_cached: bool
    queue_seconds: float
    elapsed: float


Received = OutputDelta | WorkerEvent
"""What a call to a worker brings."""
