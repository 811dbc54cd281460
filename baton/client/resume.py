"""Router failover: whether and where a call is made again when its router is lost. Awaits nothing
and opens no connection.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import grpc

from baton.client.progress import Progress
from baton.client.router_messages import resumed_request
from baton.rpc.backoff import Backoff
from baton.rpc.errors import error_of, is_cancelled_here, is_from_server
from baton.v1 import inference_pb2 as pb

# Consecutive calls without a new token after which a generation fails.
MAX_FAILURES = 10
_BACKOFF = Backoff(first=0.1, longest=2.0)
# A router that is back may stay unnoticed while gRPC waits between two connection attempts
# (`baton.client.connections`: a second at most).
_RECONNECT_SECONDS = 1.5
# A router that a name leads to: gRPC resolves the name again after a second at the earliest.
_RESOLVE_SECONDS = 3.0

# Codes of one router that another one, or the same a little later, may not return. ALREADY_EXISTS:
# it has not noticed yet that the previous call was lost.
_TRANSIENT = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ALREADY_EXISTS,
)


class Routers:
    """Routers of a client, by their index in its list.

    Attributes:
        first: index of the router to try first, one that answers as far as is known.
        is_closed: the client is closed, so no router is called any more.
    """

    def __init__(self, num_routers: int, *, have_names: bool = False) -> None:
        """`have_names`: an address is a name, which may lead to several routers."""
        self.num_routers = num_routers
        self.have_names = have_names
        self.first = 0
        self.is_closed = False

    def after(self, router: int) -> int:
        """Returns the next router in the list, which wraps around."""
        return (router + 1) % self.num_routers

    def record_failure(self, router: int, error: grpc.RpcError) -> None:
        """Records a failed call: a router that cannot be reached is not tried first again."""
        if is_connection_error(error) and router == self.first:
            self.first = self.after(router)


def is_connection_error(error: grpc.RpcError) -> bool:
    """Returns whether no router sent the error: it is gone, or was never there. A process that
    exits may also drop a new call, which gRPC reports as CANCELLED."""
    lost = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    return error.code() in lost and not is_from_server(error)


def _is_dropped(error: grpc.RpcError) -> bool:
    """Returns whether a server dropped the call: cancelled by neither this process nor a router.
    gRPC drops new calls of all clients where one opens too many (docs/known-issues.md)."""
    is_by_grpc = not (is_from_server(error) or is_cancelled_here(error))
    return is_by_grpc and error.code() is grpc.StatusCode.CANCELLED


class Failover:
    """Retry policy of one unary call: each router is called once, until one answers.

    Attributes:
        router: index of the router to call.
    """

    def __init__(self, routers: Routers, codes: Collection[grpc.StatusCode]) -> None:
        """Takes the error codes that are no answer, as another router may know better."""
        self.router = routers.first
        self._routers = routers
        self._codes = codes
        self._num_left = routers.num_routers - 1

    def advance(self, error: grpc.RpcError) -> None:
        """Moves on to the next router, or raises the error of the call."""
        self._routers.record_failure(self.router, error)
        if not self._num_left or not (is_connection_error(error) or error.code() in self._codes):
            raise error_of(error) from error
        self._num_left -= 1
        self.router = self._routers.after(self.router)


@dataclass(frozen=True, slots=True)
class CallAttempt:
    """Call of a generation: request, router, timeout, and pause before it, in seconds.

    Attributes:
        reconnects: it needs another connection, since the router of the present one drains.
    """

    request: pb.GenerateRequest
    router: int
    timeout: float
    pause: float = 0.0
    reconnects: bool = False


class Resumption:
    """Retry policy of the calls of one generation.

    Before acceptance, each router is tried once; several are tried again for `_RECONNECT_SECONDS`
    after a connection error, since one may be back unnoticed; with `wait_for_ready`, until one
    answers. Those of a name are tried again for `_RESOLVE_SECONDS`, also after UNAVAILABLE of a
    router that drains, since the name may lead to others by now. A call that gRPC dropped is made
    again, up to `MAX_FAILURES` times. After acceptance, it resumes on any router that answers, with
    the tokens received, unless a running router has ended it.
    """

    def __init__(
        self,
        request: pb.GenerateRequest,
        routers: Routers,
        timeout: float,
        *,
        wait_for_ready: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._request = request
        self._routers = routers
        self._wait_for_ready = wait_for_ready
        self._clock = clock
        self._expires_at = clock() + timeout
        self._router = routers.first
        self._num_failures = 0
        self._num_received = 0
        self._unavailable_since: float | None = None

    def first_attempt(self) -> CallAttempt:
        return CallAttempt(self._request, self._router, self._expires_at - self._clock())

    def next_attempt(self, error: grpc.RpcError, progress: Progress) -> CallAttempt | None:
        """Returns the next call after the latest one ended; None: the generation has failed."""
        if progress.num_received > self._num_received:
            self._num_failures, self._num_received = 0, progress.num_received
        self._num_failures += 1
        is_unreachable = is_connection_error(error)
        is_refused = error.code() is grpc.StatusCode.UNAVAILABLE and not is_unreachable
        may_recover = is_unreachable or (is_refused and self._routers.have_names)
        if self._unavailable_since is None and may_recover:
            self._unavailable_since = self._clock()
        self._routers.record_failure(self._router, error)
        if not self._may_retry(error, progress):
            return None
        self._router = self._routers.after(self._router)
        pause = self._pause(progress)
        timeout = self._expires_at - self._clock() - pause
        if timeout <= 0.0:
            return None
        progress.begin_call()
        request = resumed_request(self._request, progress.accepted, progress.received)
        reconnects = is_refused and self._routers.have_names
        return CallAttempt(request, self._router, timeout, pause, reconnects)

    def _may_retry(self, error: grpc.RpcError, progress: Progress) -> bool:
        code = error.code()
        if self._routers.is_closed:
            return False
        if progress.accepted is None:
            if not (code is grpc.StatusCode.UNAVAILABLE or is_connection_error(error)):
                return False
            if self._wait_for_ready and is_connection_error(error):
                return True
            if _is_dropped(error):
                return self._num_failures <= MAX_FAILURES
            return self._num_failures < self._routers.num_routers or self._may_be_reconnecting()
        if self._num_failures > MAX_FAILURES:
            return False
        if progress.is_accepted:
            return is_connection_error(error)
        return code in _TRANSIENT

    def _may_be_reconnecting(self) -> bool:
        """Returns whether one of several routers, lost recently, may be back unnoticed."""
        routers, since = self._routers, self._unavailable_since
        seconds = _RESOLVE_SECONDS if routers.have_names else _RECONNECT_SECONDS
        is_of_several = routers.num_routers > 1 or routers.have_names
        return is_of_several and since is not None and self._clock() - since < seconds

    def _pause(self, progress: Progress) -> float:
        """Returns the pause in seconds: 0 for the first call after progress or, before acceptance,
        to each router; else exponential backoff with jitter."""
        num_immediate = self._routers.num_routers - 1 if progress.accepted is None else 1
        if self._num_failures <= num_immediate:
            return 0.0
        return _BACKOFF.delay(self._num_failures - num_immediate)
