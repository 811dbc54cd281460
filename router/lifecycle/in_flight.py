"""The requests that a router serves at this moment. Knows nothing of how they came in."""

from baton.errors import AlreadyExistsError, CancelledError, NotFoundError
from baton.serving.tenant import Tenant
from router.admission.controller import Gate
from router.lifecycle.request_lifecycle import Saga


class Requests:
    """The requests in flight, by tenant and id. Once draining, no more are taken."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._sagas: dict[tuple[str, str], Saga] = {}
        self.is_draining = False

    def __len__(self) -> int:
        return len(self._sagas)

    @property
    def num_waiting(self) -> int:
        """Of them, those that are yet to be placed."""
        return self._gate.num_waiting

    def of(self, tenant: Tenant) -> list[Saga]:
        """Those of one tenant, the oldest first."""
        return [saga for (name, _), saga in self._sagas.items() if name == tenant.name]

    def add(self, saga: Saga) -> None:
        if _key(saga) in self._sagas:
            raise AlreadyExistsError(
                f"request {saga.request.request_id!r} is in flight; choose another id"
            )
        self._sagas[_key(saga)] = saga

    def remove(self, saga: Saga) -> None:
        del self._sagas[_key(saga)]

    def abort(self, tenant: Tenant, request_id: str) -> None:
        """Raises `NotFoundError` for one that is not in flight, or is another tenant's."""
        saga = self._sagas.get((tenant.name, request_id))
        if saga is None:
            raise NotFoundError(f"no request {request_id!r} is in flight here")
        saga.abort()
        aborted = CancelledError(f"request {request_id} was aborted")
        self._gate.abandon(saga.request, aborted)

    async def drain(self) -> None:
        self.is_draining = True


def _key(saga: Saga) -> tuple[str, str]:
    return saga.request.tenant.name, saga.request.request_id
