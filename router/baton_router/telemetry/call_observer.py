"""Observer of every call of a client, over any API: refusals are counted for its tenant."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from baton.errors import BatonError
from baton.serving.tenant import Caller, Tenants
from baton_router.telemetry.tenant_meter import TenantMeter, refusal_reason


@dataclass(slots=True)
class _Call:
    """Call that is being served. `error`: what it ended with after its answer had begun."""

    error: BaseException | None = None


_current: "ContextVar[_Call | None]" = ContextVar("baton_call", default=None)


class CallObserver:
    """Observer of the calls of one router's clients."""

    def __init__(self, tenants: Tenants, meter: TenantMeter) -> None:
        self._tenants = tenants
        self._meter = meter

    @contextmanager
    def observing(self, caller: Caller) -> Iterator[None]:
        """Observes a call, which is served in the block."""
        call = _Call()
        _current.set(call)
        try:
            yield
        except BaseException as error:
            call.error = error
            raise
        finally:
            if call.error is not None:
                self._failed(caller, call.error)

    def _failed(self, caller: Caller, error: BaseException) -> None:
        reason = refusal_reason(error)
        if reason is not None:
            self._meter.refused(self._tenant_of(caller), reason, error)

    def _tenant_of(self, caller: Caller) -> str:
        """Returns the name of the caller's tenant; empty if it is unknown."""
        try:
            return self._tenants.of(caller).name
        except BatonError:
            return ""


def failed(error: BaseException) -> None:
    """Records the error of a call whose answer had begun, and that therefore does not raise it."""
    call = _current.get()
    if call is not None:
        call.error = error
