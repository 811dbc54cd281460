"""Usage and refusals of each tenant, as counters and, at most once a minute, in the log.

Knows nothing of the limits that refuse requests, nor of how metrics are exposed.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection

from baton.cluster.throttled_log import ThrottledLog
from baton.errors import OverloadedError, PermissionDeniedError, UnauthenticatedError
from baton_router.call.request import RequestOutcome

OTHERS = "*"
"""Label of all tenants without one of their own."""

_log = ThrottledLog(logging.getLogger(__name__))


class TenantMeter:
    """Usage and refusals of one router by tenant, since its start.

    Args:
        named: returns the tenants with a label of their own, which bounds the number of labels.

    Attributes:
        num_requests: admitted requests that have ended.
        num_prompt_tokens, num_output_tokens: tokens of those requests.
        num_refused: calls that were refused, by tenant and reason.
    """

    def __init__(
        self, named: Callable[[], Collection[str]] = tuple, log: ThrottledLog = _log
    ) -> None:
        self.num_requests: Counter[str] = Counter()
        self.num_prompt_tokens: Counter[str] = Counter()
        self.num_output_tokens: Counter[str] = Counter()
        self.num_refused: Counter[tuple[str, ...]] = Counter()
        self._named = named
        self._log = log

    @property
    def labels(self) -> list[str]:
        """Labels of tenants, whether or not they have sent a request."""
        return [*sorted(self._named()), OTHERS]

    def ended(self, outcome: RequestOutcome) -> None:
        """Counts an admitted request that has ended."""
        label, account = self._label_of(outcome.request.tenant.name), outcome.account
        self.num_requests[label] += 1
        self.num_prompt_tokens[label] += account.num_prompt_tokens
        self.num_output_tokens[label] += account.num_new_tokens

    def refused(self, tenant: str, reason: str, error: BaseException) -> None:
        """Counts a refused call, and logs the first of a minute of a tenant and reason. An unknown
        caller is of no `tenant`."""
        label = self._label_of(tenant)
        self.num_refused[label, reason] += 1
        self._log.warning(
            "a call of tenant %r was refused (%s): %s",
            tenant or OTHERS,
            reason,
            error,
            kind=f"{label} {reason}",
        )

    def _label_of(self, tenant: str) -> str:
        return tenant if tenant in self._named() else OTHERS


def refusal_reason(error: BaseException) -> str | None:
    """Returns the reason of a refusal, as a label; None if the error is none."""
    if isinstance(error, BaseExceptionGroup):
        reasons = map(refusal_reason, error.exceptions)
        return next((reason for reason in reasons if reason is not None), None)
    match error:
        case OverloadedError():
            return error.reason
        case UnauthenticatedError():
            return "unauthenticated"
        case PermissionDeniedError():
            return "permission_denied"
    return None
