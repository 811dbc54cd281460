"""Placer: places requests on the fleet, remembers recent decisions and records them.

Independent of RPCs and of the request lifecycle.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial

from baton.cluster.prefix import BlockHash
from baton.errors import NotFoundError
from baton.serving.tenant import DEFAULT_TENANT
from baton_router.call.request import RequestOutcome, Work
from baton_router.routing.fleet.fleet import Fleet
from baton_router.routing.placement.decision import DEFAULT_RULES, Decision, PlacementInputs, Rules
from baton_router.routing.placement.exclusions import NO_EXCLUSIONS, Exclusions
from baton_router.routing.placement.placement import Placement
from baton_router.routing.placement.placement_span import placing
from baton_router.routing.placement.prefix_source import with_sources
from baton_router.routing.placement.record.recorder import Recorder

_NUM_REMEMBERED = 128

PATHS = ("handoff", "decode_alone", "prefill_alone", "none")
"""Results of a placement decision, the keys of `Placer.num_placed`."""


class Placer:
    """Placer of one router: decides by a snapshot of the fleet.

    Attributes:
        num_placed: decisions since the start, by result (`PATHS`).
    """

    def __init__(
        self,
        fleet: Fleet,
        rules: Rules = DEFAULT_RULES,
        recorder: Recorder | None = None,
        *,
        prefill_alone: bool = False,
    ) -> None:
        """`prefill_alone`: no request of the model needs a decode worker."""
        self._fleet = fleet
        self._prefill_alone = prefill_alone
        self._rules = rules
        self._recorder = recorder
        self.num_placed: Counter[str] = Counter()
        self._remembered: OrderedDict[tuple[str, str], Decision] = OrderedDict()

    @property
    def num_unrecorded(self) -> int:
        """Entries that the recorder has dropped."""
        return 0 if self._recorder is None else self._recorder.num_lost

    def place(
        self,
        work: Work,
        exclusions: Exclusions = NO_EXCLUSIONS,
        earlier: Decision | None = None,
    ) -> Decision:
        """Chooses the workers for a request, or for the rest of it. `earlier` is the last decision
        about it, reused unless the cluster has changed."""
        with placing(work.request.request_id) as span:
            decision = self._decide(work, exclusions, earlier)
            if decision.placement is None and exclusions.preempted_by:
                decision = self._decide(work, exclusions.without_preemption)
            span.decided(decision)
        self.num_placed[_path(decision)] += 1
        self._remember(work.request.tenant.name, decision)
        if self._recorder is not None:
            self._recorder.decided(decision, self._hashing(decision, work))
        return decision

    def successor(
        self, work: Work, decode: str, exclusions: Exclusions = NO_EXCLUSIONS
    ) -> str | None:
        """Returns the decode worker to continue a request that runs on `decode`, or None."""
        return self._rules.decide_again(self._placement_inputs(work, exclusions), decode)

    def content_of(self, placement: Placement) -> bytes:
        """Returns the hash of the weights of a placement's workers; empty if it is unknown."""
        return self._content_of(placement.decode or placement.prefill)

    def ended(self, outcome: RequestOutcome) -> None:
        """Records the end of a request."""
        if self._recorder is not None:
            self._recorder.ended(outcome.request.request_id, outcome.num_output_tokens)

    def explain(self, work: Work, earlier: Decision | None = None) -> Decision:
        """Returns the decision for a request if it came now, as a dry run. `earlier` is the last
        decision about it, reused unless the cluster has changed."""
        return self._decide(work, earlier=earlier)

    def why_none(self, needs_prefill: bool = False) -> str:
        """Returns the reason why no request could be placed now, as a sentence; empty if one could.
        `needs_prefill`: one that needs a prefill worker."""
        candidates = tuple(self._fleet.candidates())
        inputs = PlacementInputs(
            "", 1, candidates, needs_prefill=needs_prefill, prefill_alone=self._prefill_alone
        )
        decision = self._rules.decision(inputs)
        return decision.why_none if decision.placement is None else ""

    async def until_possible(self, needs_prefill: bool = False) -> None:
        """Waits until a request could be placed, by `why_none`."""
        while self.why_none(needs_prefill):
            await self._fleet.wait_for_change()

    def remembers(self, request_id: str, tenant: str = DEFAULT_TENANT) -> bool:
        """Returns whether `decision_of` would return a decision."""
        return (tenant, request_id) in self._remembered

    def decision_of(self, request_id: str, tenant: str = DEFAULT_TENANT) -> Decision:
        """Returns the last decision about a request. Raises `NotFoundError` if it is not among the
        last ones, or the request is another tenant's."""
        if not self.remembers(request_id, tenant):
            raise NotFoundError(
                f"request {request_id!r} is not among the last {_NUM_REMEMBERED} that this router "
                "has placed"
            )
        return self._remembered[tenant, request_id]

    def _decide(
        self,
        work: Work,
        exclusions: Exclusions = NO_EXCLUSIONS,
        earlier: Decision | None = None,
    ) -> Decision:
        return self._rules.decision(self._placement_inputs(work, exclusions), earlier)

    def _placement_inputs(self, work: Work, exclusions: Exclusions) -> PlacementInputs:
        candidates = exclusions.exclude(self._fleet.candidates(work.prompt), self._content_of)
        needs_prefill = work.params.prompt_logprobs is not None
        # Prompt log-probabilities need the whole prompt computed; pooled prompts fetch no prefix.
        if not needs_prefill and not self._prefill_alone:
            candidates = with_sources(candidates)
        return PlacementInputs(
            work.request.request_id,
            len(work.token_ids),
            tuple(exclusions.exclude_lenders(candidates)),
            frozenset(exclusions.broken),
            needs_prefill=needs_prefill,
            prefill_alone=self._prefill_alone,
            images=work.prompt.images,
            demand=work.request.demand,
        )

    def _content_of(self, worker: str) -> bytes:
        return self._fleet.member(worker).record.content

    def _hashing(self, decision: Decision, work: Work) -> Callable[[], list[BlockHash]]:
        """Returns a function for the recorder's thread that computes the prompt's chain hashes."""
        if decision.placement is None:
            return list
        member = self._fleet.member(decision.placement.decode or decision.placement.prefill)
        return partial(work.prompt.hashes, member.namespace)

    def _remember(self, tenant: str, decision: Decision) -> None:
        key = tenant, decision.inputs.request_id
        self._remembered[key] = decision
        self._remembered.move_to_end(key)
        if len(self._remembered) > _NUM_REMEMBERED:
            self._remembered.popitem(last=False)


def _path(decision: Decision) -> str:
    if decision.placement is None:
        return "none"
    if not decision.placement.decode:
        return "prefill_alone"
    return "handoff" if decision.placement.prefill else "decode_alone"
