"""The requests that a router serves at this moment. Knows nothing of how they came in."""

from baton.errors import AlreadyExistsError, CancelledError, NotFoundError
from baton.serving.tenant import Tenant
from baton_router.admission.controller import AdmissionController
from baton_router.lifecycle.request_lifecycle import RequestLifecycle


class Requests:
    """The requests in flight, by tenant and id. Once draining, no more are taken."""

    def __init__(self, admission_controller: AdmissionController) -> None:
        self._admission = admission_controller
        self._lifecycles: dict[tuple[str, str], RequestLifecycle] = {}
        self.is_draining = False

    def __len__(self) -> int:
        return len(self._lifecycles)

    @property
    def num_waiting(self) -> int:
        """Of them, those that are yet to be placed."""
        return self._admission.num_waiting

    def of(self, tenant: Tenant) -> list[RequestLifecycle]:
        """Those of one tenant, the oldest first."""
        return [
            lifecycle for (name, _), lifecycle in self._lifecycles.items() if name == tenant.name
        ]

    def add(self, lifecycle: RequestLifecycle) -> None:
        if _key(lifecycle) in self._lifecycles:
            raise AlreadyExistsError(
                f"request {lifecycle.request.request_id!r} is in flight; choose another id"
            )
        self._lifecycles[_key(lifecycle)] = lifecycle

    def remove(self, lifecycle: RequestLifecycle) -> None:
        del self._lifecycles[_key(lifecycle)]

    def abort(self, tenant: Tenant, request_id: str) -> None:
        """Raises `NotFoundError` for one that is not in flight, or is another tenant's."""
        lifecycle = self._lifecycles.get((tenant.name, request_id))
        if lifecycle is None:
            raise NotFoundError(f"no request {request_id!r} is in flight here")
        lifecycle.abort()
        aborted = CancelledError(f"request {request_id} was aborted")
        self._admission.abandon(lifecycle.request, aborted)

    async def drain(self) -> None:
        self.is_draining = True


def _key(lifecycle: RequestLifecycle) -> tuple[str, str]:
    return lifecycle.request.tenant.name, lifecycle.request.request_id
