"""Endpoint picker: chooses the model server of a request by Baton's placement.

Independent of ext_proc: `exchange.py` has the protocol, `wire.py` its messages.
"""

import time
from collections import Counter
from collections.abc import Callable
from functools import partial

from baton.cluster.prefix import BlockHash, PrefixNamespace, hash_chain
from baton.errors import OverloadedError, UnavailableError
from baton_picker.addresses import Subset
from baton_picker.endpoints import AT_LIMIT, Endpoint, Endpoints
from baton_picker.prompt import PickedPrompt
from baton_router.routing.fleet.candidate import Candidate
from baton_router.routing.fleet.load import Share
from baton_router.routing.placement.decision import Decision, PlacementInputs, Rules
from baton_router.routing.placement.explanation import why
from baton_router.routing.placement.placement import Placement
from baton_router.routing.placement.record.recorder import Recorder

RESULTS = ("picked", "limited", "unavailable")
"""Results of a request for an endpoint, the keys of `EndpointPicker.num_results`."""

_MEAN_WEIGHT = 0.02  # of a prompt in the mean length


class Pick:
    """Model server picked for one request, whose load includes the request until `close`.

    Attributes:
        endpoints: addresses to try in order; the first is the picked one.
        why: the reason, as a sentence.
        num_cached_tokens: leading prompt tokens that it is expected to have cached.
    """

    def __init__(
        self,
        endpoints: tuple[str, ...],
        decision: Decision,
        reason: str,
        take: "Callable[[str], _Taken | None]",
        ended: Callable[[], None],
    ) -> None:
        assert decision.placement is not None
        self.endpoints = endpoints
        self.why = reason
        self.num_cached_tokens = decision.placement.num_cached_tokens
        self._take = take
        self._ended = ended
        self._taken = take(endpoints[0])

    def served_by(self, address: str, *, is_failure: bool) -> None:
        """Notes the model server that answered: after a retry it is not the picked one. One that
        the picker does not know counts for none."""
        taken = self._taken
        if taken is not None and address != taken.endpoint.address:
            taken.failed()
            taken.release()
            taken = self._taken = self._take(address)
        if taken is not None:
            (taken.failed if is_failure else taken.succeeded)()

    def failed(self) -> None:
        """Notes that no model server has answered."""
        if self._taken is not None:
            self._taken.failed()

    def answering(self) -> None:
        """Notes the first byte of an answer: the prompt is computed. Idempotent."""
        if self._taken is not None:
            self._taken.prompt_computed()

    def close(self) -> None:
        """Ends the request. Idempotent."""
        if self._taken is not None:
            self._taken.release()
            self._taken = None
        self._ended()
        self._ended = _nothing


class EndpointPicker:
    """Endpoint picker over some endpoints.

    Args:
        namespace: namespace of the chain hashes, which also depend on model and salt of a request.
        max_endpoints: maximum addresses in a pick.

    Attributes:
        num_results: requests by result (`RESULTS`).
        num_prompt_tokens, num_cached_tokens: tokens of prompts that were placed, and those of them
            that the picked model server was expected to have cached.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        rules: Rules,
        namespace: PrefixNamespace,
        max_endpoints: int,
        recorder: Recorder | None = None,
    ) -> None:
        self.endpoints = endpoints
        self.num_results: Counter[str] = Counter()
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self._rules = rules
        self._namespace = namespace
        self._max_endpoints = max_endpoints
        self._recorder = recorder
        self._mean_tokens = 0.0

    def pick(self, request_id: str, prompt: PickedPrompt, subset: Subset | None) -> Pick:
        """Returns the pick, to be closed when the request ends.

        Args:
            subset: the endpoints to pick from; None: all configured ones.

        Raises:
            UnavailableError: no model server can take the request.
            OverloadedError: all that could are at their limit.
        """
        root = self._namespace.root(prompt.salt.encode(errors="replace"), prompt.model.encode())
        hashes = hash_chain(root, prompt.token_ids, self._namespace.block_size)
        eligible = self.endpoints.eligible(subset)
        candidates = self.endpoints.candidates(eligible, hashes, self._mean_tokens)
        num_tokens = len(prompt.token_ids)
        decision = self._rules.decision(PlacementInputs(request_id, num_tokens, candidates))
        if self._recorder is not None:
            self._recorder.decided(decision, lambda: hashes)
        placement = decision.placement
        if placement is None:
            raise self._refusal(candidates)
        self.num_results["picked"] += 1
        self.num_prompt_tokens += num_tokens
        self.num_cached_tokens += min(placement.num_cached_tokens, num_tokens)
        self._mean_tokens += _MEAN_WEIGHT * (num_tokens - self._mean_tokens)
        cached = {c.worker: c.num_cached_tokens for c in candidates}
        return Pick(
            self._addresses(placement),
            decision,
            why(decision),
            partial(self._take, num_tokens, hashes, cached),
            partial(self._ended, request_id),
        )

    def _addresses(self, placement: Placement) -> tuple[str, ...]:
        ready = (one.candidate for one in placement.alone if not one.candidate.excluded)
        return tuple(one.worker for one in ready)[: self._max_endpoints]

    def _take(
        self, num_tokens: int, hashes: list[BlockHash], cached: dict[str, int], address: str
    ) -> "_Taken | None":
        endpoint = self.endpoints.get(address)
        if endpoint is None:
            return None
        self.endpoints.note_prefix(endpoint, hashes)
        num_uncached = max(0, num_tokens - cached.get(address, 0))
        return _Taken(self.endpoints, endpoint, num_uncached, num_tokens)

    def _refusal(self, candidates: tuple[Candidate, ...]) -> UnavailableError | OverloadedError:
        reasons = {c.excluded for c in candidates}
        if AT_LIMIT in reasons:
            self.num_results["limited"] += 1
            return OverloadedError(f"every model server that answers is {AT_LIMIT}; retry later")
        self.num_results["unavailable"] += 1
        if not candidates:
            return UnavailableError("no model server is among the endpoints of this request")
        return UnavailableError(f"no model server can take requests: {', '.join(sorted(reasons))}")

    def _ended(self, request_id: str) -> None:
        if self._recorder is not None:
            self._recorder.ended(request_id, 0)


class _Taken:
    """Load of one request on one endpoint: prompt tokens until its answer begins, the sequence and
    its KV until `release`."""

    def __init__(
        self, endpoints: Endpoints, endpoint: Endpoint, num_uncached: int, num_tokens: int
    ) -> None:
        self.endpoint = endpoint
        self._endpoints = endpoints
        self._sequence: Share | None = Share(1, 0, num_tokens)
        self._prompt: Share | None = Share(0, num_uncached)
        endpoint.num_unanswered += 1
        for share in (self._sequence, self._prompt):
            endpoint.load.take(share, time.monotonic(), time.monotonic_ns())

    def prompt_computed(self) -> None:
        if self._prompt is not None:
            self.endpoint.load.release(self._prompt)
            self.endpoint.num_unanswered -= 1
            self._prompt = None

    def release(self) -> None:
        self.prompt_computed()
        if self._sequence is not None:
            self.endpoint.load.release(self._sequence)
            self._sequence = None

    def failed(self) -> None:
        self._endpoints.report_failure(self.endpoint)

    def succeeded(self) -> None:
        self.endpoint.circuit.record_success()


def _nothing() -> None:
    pass
