"""Registry of the requests in flight at a router. Knows nothing of the API they came in by."""

import time
from collections.abc import Sequence
from typing import Protocol

from baton.errors import (
    AlreadyExistsError,
    CancelledError,
    FailedPreconditionError,
    NotFoundError,
    UnavailableError,
)
from baton.serving.tenant import Tenant
from baton_router.call.request import Request
from baton_router.call.usage import Account
from baton_router.routing.admission.controller import AdmissionController
from baton_router.routing.placement.placement import Placement


class Lifecycle(Protocol):
    """Lifecycle of a request that is in flight."""

    @property
    def request(self) -> Request: ...

    @property
    def account(self) -> Account:
        """Usage and timings of the request so far."""
        ...

    @property
    def placement(self) -> Placement | None:
        """Placement of the present attempt; None while the request waits."""
        ...

    def abort(self) -> None:
        """Aborts the request and frees its workers."""
        ...


class Requests:
    """Requests in flight, by tenant and id.

    Attributes:
        is_draining: a drain has begun. New requests are still taken until `drain`, from clients and
            load balancers that do not know of it yet.
    """

    def __init__(self, admission_controllers: Sequence[AdmissionController]) -> None:
        """Takes the admission controllers of all models."""
        self._admission_controllers = admission_controllers
        self._lifecycles: dict[tuple[str, str], Lifecycle] = {}
        self._emptied_at = time.time()
        self.is_draining = False
        self._takes_none = False

    def __len__(self) -> int:
        return len(self._lifecycles)

    @property
    def idle_since(self) -> float | None:
        """Time of the last request's end, in seconds since 1970; None while one is in flight."""
        return None if self._lifecycles else self._emptied_at

    def num_of(self, model: str) -> int:
        """Returns the number of requests in flight that a model answers."""
        return sum(one.request.model == model for one in self._lifecycles.values())

    @property
    def num_waiting(self) -> int:
        """Requests in flight that are not yet placed."""
        return sum(each.num_waiting for each in self._admission_controllers)

    @property
    def is_paused(self) -> bool:
        """True if no request is admitted until `resume`."""
        return any(each.is_paused for each in self._admission_controllers)

    def of(self, tenant: Tenant) -> list[Lifecycle]:
        """Returns the requests of one tenant, oldest first."""
        return [
            lifecycle for (name, _), lifecycle in self._lifecycles.items() if name == tenant.name
        ]

    def all(self) -> list[Lifecycle]:
        """Returns the requests of all tenants, oldest first."""
        return list(self._lifecycles.values())

    def add(self, lifecycle: Lifecycle) -> None:
        if _key(lifecycle) in self._lifecycles:
            raise AlreadyExistsError(
                f"request {lifecycle.request.request_id!r} is in flight; choose another id"
            )
        self._lifecycles[_key(lifecycle)] = lifecycle

    def remove(self, lifecycle: Lifecycle) -> None:
        del self._lifecycles[_key(lifecycle)]
        self._emptied_at = time.time()

    def abort(self, tenant: Tenant, request_id: str) -> None:
        """Aborts a request. Raises `NotFoundError` if the tenant has none of this id in flight."""
        lifecycle = self._lifecycles.get((tenant.name, request_id))
        if lifecycle is None:
            raise NotFoundError(f"no request {request_id!r} is in flight here")
        lifecycle.abort()
        aborted = CancelledError(f"request {request_id} was aborted")
        for each in self._admission_controllers:
            each.abandon(lifecycle.request, aborted)

    def pause(self) -> None:
        """Admits no request until `resume`; requests wait, up to their deadlines. Idempotent.

        Raises `FailedPreconditionError` while draining, which ends once none waits.
        """
        if self.is_draining:
            raise FailedPreconditionError(
                "the router is draining and admits the requests that wait; pause another one"
            )
        for each in self._admission_controllers:
            each.pause()

    def resume(self) -> None:
        """Admits requests again. Idempotent."""
        for each in self._admission_controllers:
            each.resume()

    def check_open(self) -> None:
        """Raises `UnavailableError` if no more requests are taken."""
        if self._takes_none:
            raise UnavailableError("the router is draining; another one will serve this")

    async def begin_drain(self) -> None:
        """Admits the requests that wait, even if admission was paused."""
        self.is_draining = True
        self.resume()

    async def drain(self) -> None:
        """Takes no more requests."""
        self._takes_none = True


def _key(lifecycle: Lifecycle) -> tuple[str, str]:
    return lifecycle.request.tenant.name, lifecycle.request.request_id
