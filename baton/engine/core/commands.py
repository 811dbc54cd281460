"""Commands to an engine core, each run between two steps. Plain data.

A query is a command that is answered, under the number that it carries.
"""

from dataclasses import dataclass

from baton.cluster.prefix import BlockHash
from baton.engine.messages import EngineRequest
from baton.engine.scheduler.scheduling.encode_jobs import EncodeJob
from baton.engine.scheduler.sequences.sequence import FinishReason


@dataclass(frozen=True, slots=True)
class Add:
    """Adds a request.

    Attributes:
        number: tells it from others of the same id.
        grammar: number of the query that has compiled its grammar, if it has one.
    """

    number: int
    request: EngineRequest
    grammar: int | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """Ends a request, in any state, and frees its blocks."""

    request_id: str


@dataclass(frozen=True, slots=True)
class CommitExternal:
    """Commits the KV of a request, which has arrived; `token_id` follows its tokens. None: the
    first token of each sequence is chosen by the engine."""

    request_id: str
    token_id: int | None
    logprob: float | None = None


@dataclass(frozen=True, slots=True)
class FailExternal:
    """Computes a request whose external KV will not arrive."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Suspend:
    """Suspends the only sequence of a request after its next token."""

    request_id: str


@dataclass(frozen=True, slots=True)
class EndSequence:
    """Ends one of the sequences of a request."""

    request_id: str
    index: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Pause:
    """Starts no new request from the next step on."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Starts waiting requests again."""


@dataclass(frozen=True, slots=True)
class Unpin:
    """Releases the blocks pinned under a name."""

    name: str


@dataclass(frozen=True, slots=True)
class Encode:
    """Holds an encoder output, under a new number, until `ReleaseOutput`. The step after which it
    is there answers; a `QueryFailed` of the number says that none will."""

    number: int
    job: EncodeJob
    only_cached: bool


@dataclass(frozen=True, slots=True)
class ExpectOutput:
    """Expects another worker's encoder output, under a new number, until `CommitOutput` or
    `ReleaseOutput`. Answered as `Encode`."""

    number: int
    job: EncodeJob


@dataclass(frozen=True, slots=True)
class CommitOutput:
    """Caches an expected output, which has arrived."""

    number: int


@dataclass(frozen=True, slots=True)
class ReleaseOutput:
    """Releases an encoder output that is held or expected."""

    number: int


@dataclass(frozen=True, slots=True)
class FlushCache:
    """Query: drops cached blocks, None all of them. The answer is how many were cached."""

    query: int
    hashes: tuple[BlockHash, ...] | None


@dataclass(frozen=True, slots=True)
class Pin:
    """Query: pins the longest cached run of blocks. The answer is a table per cache group."""

    query: int
    name: str
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class ReportMemory:
    """Query: the usage of the KV blocks. The answer is a `MemoryReport`."""

    query: int


@dataclass(frozen=True, slots=True)
class CompileGrammar:
    """Query: compiles the grammar of a request that will follow, and checks the output that the
    request has, beside the steps. The answer is None; `Add.grammar` names the query."""

    query: int
    request: EngineRequest


Query = FlushCache | Pin | ReportMemory | CompileGrammar
Command = (
    Add
    | Abort
    | CommitExternal
    | FailExternal
    | Suspend
    | EndSequence
    | Pause
    | Resume
    | Unpin
    | Encode
    | ExpectOutput
    | CommitOutput
    | ReleaseOutput
    | Query
)
