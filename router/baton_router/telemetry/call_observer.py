"""Observer of every call of a client, over any API: refusals are counted for its tenant, and the
access log, if there is one, has a line of it."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

from baton.errors import BatonError
from baton.serving.grpc.errors import code_of
from baton.serving.tenant import Caller, Tenants
from baton_router.call.request import RequestOutcome
from baton_router.telemetry.access_log import AccessLog
from baton_router.telemetry.tenant_meter import TenantMeter, refusal_reason

Api = Literal["grpc", "http"]


@dataclass(slots=True)
class ObservedCall:
    """Call that is being served.

    Attributes:
        method: of the API, such as "Generate" or "POST /v1/completions".
        status: of the answer, as its API has it; None: as the error says.
        error: what it ended with; None: nothing.
        outcomes: those of its requests that have ended; kept for the access log alone.
    """

    api: Api
    method: str
    is_logged: bool
    status: int | str | None = None
    error: BaseException | None = None
    outcomes: list[RequestOutcome] = field(default_factory=list)
    began_at: float = field(default_factory=time.time)
    began: float = field(default_factory=time.monotonic)

    def line(self, tenant: str) -> dict[str, object]:
        """Returns the fields of its line in the access log."""
        accounts = [outcome.account for outcome in self.outcomes]
        firsts = [a.timings.first_token for a in accounts if a.timings.first_token is not None]
        first = self.outcomes[0].request if self.outcomes else None
        return {
            "time": datetime.fromtimestamp(self.began_at, UTC).isoformat(timespec="milliseconds"),
            "api": self.api,
            "method": self.method,
            "status": self.status,
            "reason": self.reason,
            "tenant": tenant,
            "model": "" if first is None else first.model,
            "request_id": "" if first is None else first.request_id,
            "num_prompt_tokens": sum(account.num_prompt_tokens for account in accounts),
            "num_output_tokens": sum(account.num_new_tokens for account in accounts),
            "first_token_seconds": round(min(firsts) - self.began, 6) if firsts else None,
            "seconds": round(time.monotonic() - self.began, 6),
        }

    @property
    def reason(self) -> str:
        """Reason of a refusal, or the code of another error in lower case; empty for none, and for
        what the status alone tells."""
        if not isinstance(self.error, BatonError | BaseExceptionGroup | asyncio.CancelledError):
            return ""
        return refusal_reason(self.error) or code_of(self.error).lower()


_current: "ContextVar[ObservedCall | None]" = ContextVar("baton_call", default=None)


class CallObserver:
    """Observer of the calls of one router's clients. `access_log` None: there is none."""

    def __init__(
        self, tenants: Tenants, meter: TenantMeter, access_log: AccessLog | None = None
    ) -> None:
        self._tenants = tenants
        self._meter = meter
        self._access_log = access_log

    @contextmanager
    def observing(self, caller: Caller, api: Api, method: str = "") -> Iterator[ObservedCall]:
        """Observes a call, which is served in the block."""
        call = ObservedCall(api, method, self._access_log is not None)
        _current.set(call)
        try:
            yield call
        except BaseException as error:
            call.error = error
            raise
        finally:
            self._ended(caller, call)
            # Timers of the connection keep the call, and an error's frames the whole request.
            call.error = None
            call.outcomes.clear()

    def _ended(self, caller: Caller, call: ObservedCall) -> None:
        reason = None if call.error is None else refusal_reason(call.error)
        if call.error is not None and reason is not None:
            self._meter.refused(self._tenant_of(caller), reason, call.error)
        if self._access_log is not None and call.method:
            self._access_log.write(call.line(self._tenant_of(caller)))

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


def ended(outcome: RequestOutcome) -> None:
    """Records the end of a request of the present call."""
    call = _current.get()
    if call is not None and call.is_logged:
        call.outcomes.append(outcome)
