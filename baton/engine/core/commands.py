"""Commands to an engine core, each run between two steps. Plain data, which a queue or another
process can carry.

A new operation of the engine is a command here, a method of `EngineClient` that submits it, and the
scheduler's answer.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.cluster.prefix import BlockHash
from baton.engine.core.reports import QueryAnswer, QueryFailed, Refused
from baton.engine.request import EngineRequest, FinishReason
from baton.engine.scheduler.scheduling.encode_jobs import EncodeJob
from baton.errors import BatonError

if TYPE_CHECKING:
    from baton.engine.core.engine_core import EngineCore


class Command(ABC):
    """Command to an engine core."""

    __slots__ = ()

    @abstractmethod
    def run(self, core: "EngineCore") -> QueryAnswer:
        """Does what it says, in the engine's thread, but for `CompileGrammar`."""

    def refusal(self, error: BatonError) -> Refused | QueryFailed | None:  # noqa: ARG002
        """Returns the report of an error of `run`. None: an error is a defect, and ends the
        engine."""
        return None


class Query(Command):
    """Command that is answered, under the number that it carries, with what `run` returns."""

    __slots__ = ()
    query: int

    def refusal(self, error: BatonError) -> QueryFailed:
        return QueryFailed(self.query, error)


@dataclass(frozen=True, slots=True)
class Add(Command):
    """Adds a request.

    Attributes:
        number: tells it from others of the same id.
        grammar: number of the query that has compiled its grammar, if it has one.
    """

    number: int
    request: EngineRequest
    grammar: int | None = None

    def run(self, core: "EngineCore") -> None:
        core.add(self.request, core.take_grammar(self.grammar))

    def refusal(self, error: BatonError) -> Refused:
        return Refused(self.request.request_id, error)


@dataclass(frozen=True, slots=True)
class Abort(Command):
    """Ends a request, in any state, and frees its blocks."""

    request_id: str

    def run(self, core: "EngineCore") -> None:
        core.scheduler.abort(self.request_id)


@dataclass(frozen=True, slots=True)
class CommitExternal(Command):
    """Commits the KV of a request, which has arrived; `token_id` follows its tokens. None: the
    first token of each sequence is chosen by the engine."""

    request_id: str
    token_id: int | None
    logprob: float | None = None

    def run(self, core: "EngineCore") -> None:
        core.scheduler.commit_external(self.request_id, self.token_id, self.logprob)


@dataclass(frozen=True, slots=True)
class FailExternal(Command):
    """Computes a request whose external KV will not arrive."""

    request_id: str

    def run(self, core: "EngineCore") -> None:
        core.scheduler.fail_external(self.request_id)


@dataclass(frozen=True, slots=True)
class Suspend(Command):
    """Suspends the only sequence of a request after its next token."""

    request_id: str

    def run(self, core: "EngineCore") -> None:
        core.scheduler.suspend(self.request_id)


@dataclass(frozen=True, slots=True)
class EndSequence(Command):
    """Ends one of the sequences of a request."""

    request_id: str
    index: int
    reason: FinishReason

    def run(self, core: "EngineCore") -> None:
        core.scheduler.end_sequence(self.request_id, self.index, self.reason)


@dataclass(frozen=True, slots=True)
class Pause(Command):
    """Starts no new request from the next step on."""

    def run(self, core: "EngineCore") -> None:
        core.scheduler.pause()


@dataclass(frozen=True, slots=True)
class Resume(Command):
    """Starts waiting requests again."""

    def run(self, core: "EngineCore") -> None:
        core.scheduler.resume()


@dataclass(frozen=True, slots=True)
class Unpin(Command):
    """Releases the blocks pinned under a name."""

    name: str

    def run(self, core: "EngineCore") -> None:
        core.scheduler.unpin(self.name)


class _Job(Command):
    """Command whose answer, an encoder output, comes from a later step."""

    __slots__ = ()
    number: int

    def refusal(self, error: BatonError) -> QueryFailed:
        return QueryFailed(self.number, error)


@dataclass(frozen=True, slots=True)
class Encode(_Job):
    """Holds an encoder output, under a new number, until `ReleaseOutput`. The step after which it
    is there answers; a `QueryFailed` of the number says that none will."""

    number: int
    job: EncodeJob
    only_cached: bool

    def run(self, core: "EngineCore") -> None:
        core.encode(self.number, self.job, only_cached=self.only_cached)


@dataclass(frozen=True, slots=True)
class ExpectOutput(_Job):
    """Expects another worker's encoder output, under a new number, until `CommitOutput` or
    `ReleaseOutput`. Answered as `Encode`."""

    number: int
    job: EncodeJob

    def run(self, core: "EngineCore") -> None:
        core.expect_output(self.number, self.job)


@dataclass(frozen=True, slots=True)
class CommitOutput(Command):
    """Caches an expected output, whose blocks have been filled, without a holder. Does nothing if
    it was released."""

    number: int

    def run(self, core: "EngineCore") -> None:
        core.scheduler.encode_jobs.commit(self.number)


@dataclass(frozen=True, slots=True)
class ReleaseOutput(Command):
    """Releases an encoder output that is held or expected. One that is expected is computed here
    when a sequence needs it."""

    number: int

    def run(self, core: "EngineCore") -> None:
        core.scheduler.encode_jobs.release(self.number)


@dataclass(frozen=True, slots=True)
class FlushCache(Query):
    """Query: drops cached blocks with these chain hashes, and encoder outputs with these content
    hashes; None: all of both. The answer is how many blocks were cached."""

    query: int
    hashes: tuple[BlockHash, ...] | None

    def run(self, core: "EngineCore") -> int:
        return core.scheduler.flush_cache(self.hashes)


@dataclass(frozen=True, slots=True)
class Pin(Query):
    """Query: pins the longest cached run of blocks. The answer is a table per cache group."""

    query: int
    name: str
    hashes: tuple[BlockHash, ...]

    def run(self, core: "EngineCore") -> QueryAnswer:
        return core.scheduler.pin(self.name, self.hashes)


@dataclass(frozen=True, slots=True)
class ReportMemory(Query):
    """Query: the usage of the KV blocks. The answer is a `MemoryReport`."""

    query: int

    def run(self, core: "EngineCore") -> QueryAnswer:
        return core.scheduler.memory_report()


@dataclass(frozen=True, slots=True)
class Ping(Query):
    """Query: None, as soon as the present step has ended."""

    query: int

    def run(self, core: "EngineCore") -> None:
        """Does nothing."""


@dataclass(frozen=True, slots=True)
class CompileGrammar(Query):
    """Query: compiles the grammar of a request that will follow, and checks the output that the
    request has, beside the steps. The answer is None; `Add.grammar` names the query."""

    query: int
    request: EngineRequest

    def run(self, core: "EngineCore") -> None:
        core.prepare_grammar(self.query, self.request)


COMMANDS: tuple[type[Command], ...] = (
    Add,
    Abort,
    CommitExternal,
    FailExternal,
    Suspend,
    EndSequence,
    Pause,
    Resume,
    Unpin,
    Encode,
    ExpectOutput,
    CommitOutput,
    ReleaseOutput,
    FlushCache,
    Pin,
    ReportMemory,
    CompileGrammar,
    Ping,
)
"""All commands. Their places are their numbers between two processes."""
