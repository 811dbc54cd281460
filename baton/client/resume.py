"""Router failover: the point where a generation resumes when its router is lost. Awaits nothing
and opens no connection.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from baton.client.progress import Progress
from baton.client.wire import resumed_request
from baton.rpc_errors import is_from_server
from baton.v1 import inference_pb2 as pb

# Calls in a row that bring no new token, after which a generation is given up.
MAX_FAILURES = 10
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 2.0
# A router that was gone and is back may not be noticed for as long as gRPC waits between two tries
# to connect (`baton.client.client`: a second at most).
_NOTICED_WITHIN = 1.5

# What a router may say that another one, or itself a little later, will not. ALREADY_EXISTS: it has
# not noticed yet that the call before was lost.
_PASSING = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ALREADY_EXISTS,
)


class Routers:
    """The routers that a client may ask, by their place in its list.

    Attributes:
        number: how many there are.
        first: the one to ask first: of those that answered, as far as is known.
        is_closed: the client is, so none is asked any more.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.first = 0
        self.is_closed = False

    def after(self, router: int) -> int:
        """The next one in the list, which begins again behind its end."""
        return (router + 1) % self.number

    def note(self, router: int, error: grpc.RpcError) -> None:
        """What a call to a router ended with: one that does not answer is not asked first again."""
        if is_silence(error) and router == self.first:
            self.first = self.after(router)


def is_silence(error: grpc.RpcError) -> bool:
    """Whether no router has said it: it is gone, or was never there. A process that ends may also
    drop a call that has just come, which reads as if somebody had cancelled it."""
    lost = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    return error.code() in lost and not is_from_server(error)


@dataclass(frozen=True, slots=True)
class CallAttempt:
    """One call of a generation: what to ask of which router, when, and in how many seconds."""

    request: pb.GenerateRequest
    router: int
    timeout: float
    pause: float = 0.0


class Resumption:
    """The calls of one generation.

    Before it is accepted, each router is asked once; of several, as long again as one that was
    silent may be back unnoticed; or, if it `waits`, until one is there. From then on it goes on, on
    whichever router answers, with the tokens it has; but not where a router that lives has given it
    up.
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
        """What to do about the end of the latest call; None: nothing, it is the end."""
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
        """Whether another router than the only one, silent before, may be there by now."""
        since = self._silent_since
        is_of_several = self._routers.number > 1
        return is_of_several and since is not None and self._clock() - since < _NOTICED_WITHIN

    def _pause(self, progress: Progress) -> float:
        """The first call after some progress is made at once, and so is the first to each router
        before; the others wait longer each time."""
        num_prompt = self._routers.number - 1 if progress.accepted is None else 1
        if self._num_failures <= num_prompt:
            return 0.0
        whole = min(
            _LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** min(self._num_failures - num_prompt - 1, 60)
        )
        return whole * (1.0 + random.random()) / 2.0  # noqa: S311 - spreads the calls, no more
