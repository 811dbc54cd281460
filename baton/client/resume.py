"""Router failover: whether and where a generation resumes when its router is lost. Awaits nothing
and opens no connection.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from baton.backoff import Backoff
from baton.client.progress import Progress
from baton.client.wire import resumed_request
from baton.rpc_errors import is_from_server
from baton.v1 import inference_pb2 as pb

# Consecutive calls without a new token after which a generation fails.
MAX_FAILURES = 10
_PAUSES = Backoff(first=0.1, longest=2.0)
# A router that is back may stay unnoticed while gRPC waits between two connection attempts
# (`baton.client.client`: a second at most).
_NOTICED_WITHIN = 1.5

# Codes of one router that another one, or the same a little later, may not return. ALREADY_EXISTS:
# it has not noticed yet that the previous call was lost.
_PASSING = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ALREADY_EXISTS,
)


class Routers:
    """Routers of a client, by their index in its list.

    Attributes:
        number: of routers.
        first: index of the router to try first, one that answers as far as is known.
        is_closed: the client is closed, so no router is called any more.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.first = 0
        self.is_closed = False

    def after(self, router: int) -> int:
        """Returns the next router in the list, which wraps around."""
        return (router + 1) % self.number

    def note(self, router: int, error: grpc.RpcError) -> None:
        """Records a failed call: a router that does not answer is not tried first again."""
        if is_silence(error) and router == self.first:
            self.first = self.after(router)


def is_silence(error: grpc.RpcError) -> bool:
    """Returns whether no router sent the error: it is gone, or was never there. A process that
    exits may also drop a new call, which gRPC reports as CANCELLED."""
    lost = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    return error.code() in lost and not is_from_server(error)


@dataclass(frozen=True, slots=True)
class CallAttempt:
    """Call of a generation: request, router, timeout, and pause before it, in seconds."""

    request: pb.GenerateRequest
    router: int
    timeout: float
    pause: float = 0.0


class Resumption:
    """Retry policy of the calls of one generation.

    Before acceptance, each router is tried once; several are tried again for `_NOTICED_WITHIN`
    seconds after a silence, since one may be back unnoticed; with `waits`, until one answers. After
    acceptance, it resumes on any router that answers, with the tokens received, unless a running
    router has ended it.
    """

    def __init__(
        self,
        request: pb.GenerateRequest,
        routers: Routers,
        timeout: float,
        *,
        waits: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._request = request
        self._routers = routers
        self._waits = waits
        self._clock = clock
        self._expires_at = clock() + timeout
        self._router = routers.first
        self._num_failures = 0
        self._num_received = 0
        self._silent_since: float | None = None

    def first_attempt(self) -> CallAttempt:
        return CallAttempt(self._request, self._router, self._expires_at - self._clock())

    def next_attempt(self, error: grpc.RpcError, progress: Progress) -> CallAttempt | None:
        """Returns the next call after the latest one ended; None: the generation has failed."""
        if progress.num_received > self._num_received:
            self._num_failures, self._num_received = 0, progress.num_received
        self._num_failures += 1
        if self._silent_since is None and is_silence(error):
            self._silent_since = self._clock()
        self._routers.note(self._router, error)
        if not self._may_go_on(error, progress):
            return None
        self._router = self._routers.after(self._router)
        pause = self._pause(progress)
        timeout = self._expires_at - self._clock() - pause
        if timeout <= 0.0:
            return None
        progress.begin_call()
        request = resumed_request(self._request, progress.accepted, progress.received)
        return CallAttempt(request, self._router, timeout, pause)

    def _may_go_on(self, error: grpc.RpcError, progress: Progress) -> bool:
        code = error.code()
        if self._routers.is_closed:
            return False
        if progress.accepted is None:
            if not (code is grpc.StatusCode.UNAVAILABLE or is_silence(error)):
                return False
            if self._waits and is_silence(error):
                return True
            return self._num_failures < self._routers.number or self._may_one_be_back()
        if self._num_failures > MAX_FAILURES:
            return False
        if progress.is_accepted:
            return is_silence(error)
        return code in _PASSING

    def _may_one_be_back(self) -> bool:
        """Returns whether one of several routers, silent recently, may be back unnoticed."""
        since = self._silent_since
        is_of_several = self._routers.number > 1
        return is_of_several and since is not None and self._clock() - since < _NOTICED_WITHIN

    def _pause(self, progress: Progress) -> float:
        """Returns the pause in seconds: 0 for the first call after progress or, before acceptance,
        to each router; else exponential backoff with jitter."""
        num_prompt = self._routers.number - 1 if progress.accepted is None else 1
        if self._num_failures <= num_prompt:
            return 0.0
        return _PAUSES.delay(self._num_failures - num_prompt)
