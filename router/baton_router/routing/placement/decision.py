"""Placement decision: its complete inputs and its result.

`Rules.decide` is a pure function of a question, so that the router, a dry run and the replay of a
record decide equally. Independent of the source of the questions.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from baton.cluster.prefix import HashedInput
from baton.errors import BatonError, UnavailableError
from baton.rpc.worker_role import Role
from baton_router.call.failure import Pair
from baton_router.call.request import Demand
from baton_router.routing.fleet.candidate import Candidate
from baton_router.routing.fleet.cost_rates import Rates
from baton_router.routing.placement.encoder_sources import EncoderSources
from baton_router.routing.placement.fit import (
    are_too_small,
    fitting,
    limit_error,
    ready_are_too_small,
)
from baton_router.routing.placement.placement import (
    Placement,
    encoder_choices,
    has_only_decode,
    has_version_gap,
    place,
    place_again,
    why_none,
)
from baton_router.routing.placement.policy import (
    Policy,
    PolicyName,
    alone_policy_named,
    encoder_sources,
    policy_named,
)


@dataclass(frozen=True, slots=True)
class PlacementInputs:
    """Request to be placed, with a snapshot of the cluster.

    Attributes:
        num_tokens: tokens of the prompt and of the output so far.
        candidates: the workers; those that are too small for the request are excluded here.
        broken: pairs of workers that have recently failed to work together.
        needs_prefill: the request needs a prefill worker, as prompt log-probabilities do, unless
            only decode workers are known.
        prefill_alone: it needs no other, as pooled outputs do not.
        images: its encoder inputs, in the order of their spans.
        demand: upper bounds of its demand; None: unknown, it fits on every worker.
    """

    request_id: str
    num_tokens: int
    candidates: tuple[Candidate, ...]
    broken: frozenset[Pair] = frozenset()
    needs_prefill: bool = False
    prefill_alone: bool = False
    images: tuple[HashedInput, ...] = ()
    demand: Demand | None = None

    def __post_init__(self) -> None:
        if self.demand is not None:
            candidates = fitting(self.candidates, self.num_tokens, self.demand)
            object.__setattr__(self, "candidates", candidates)


@dataclass(frozen=True, slots=True)
class Rules:
    """Placement rules: the router's settings that matter to a decision.

    Attributes:
        conditional_disaggregation: decode workers may compute prompts if the policy has a cost for
            that; else they do so only while no two workers are of one version.
        no_handoff: all workers compute prompts and answer alone, as the model servers of an
            endpoint picker do.
    """

    policy: PolicyName = "baton"
    conditional_disaggregation: bool = True
    no_handoff: bool = False

    def decision(self, inputs: PlacementInputs, earlier: "Decision | None" = None) -> "Decision":
        """Returns the decision about a question: `earlier` itself if question and rules match."""
        if earlier is not None and earlier.inputs == inputs and earlier.rules == self:
            return earlier
        return Decision(self, inputs, self.decide(inputs))

    def decide(self, inputs: PlacementInputs) -> Placement | None:
        """Returns the placement; None if no worker can take the request."""
        encoders = encoder_sources(inputs.images, inputs.candidates)
        placement = place(
            inputs.request_id,
            inputs.num_tokens,
            inputs.candidates,
            inputs.broken,
            policy_named(self.policy, encoders),
            self._alone(inputs, encoders),
            prefill_alone=inputs.prefill_alone and not has_only_decode(inputs.candidates),
        )
        if placement is None or encoders is None:
            return placement
        return replace(placement, encoders=encoder_choices(placement, encoders))

    def _alone(
        self, inputs: PlacementInputs, encoders: EncoderSources | None = None
    ) -> Policy | None:
        """Returns the policy for decode workers that compute the prompt themselves; None: they may
        not. While no prefill worker may pair with any decode worker, or those that can take
        requests are too small, they must, whatever the settings, so that no request is lost; with
        conditional disaggregation, whatever the policy, while only decode workers are known."""
        candidates = inputs.candidates
        needs_prefill = inputs.needs_prefill or inputs.prefill_alone
        if needs_prefill and not has_only_decode(candidates):
            return None
        alone = alone_policy_named(self.policy, _prefill_rates(candidates), encoders)
        if self.no_handoff:
            return alone or policy_named(self.policy)
        if self.conditional_disaggregation and (alone or has_only_decode(candidates)):
            return alone or policy_named(self.policy)
        has_to = has_version_gap(candidates) or ready_are_too_small(candidates, "prefill")
        return alone or policy_named(self.policy) if has_to else None

    def refusal(self, inputs: PlacementInputs) -> BatonError:
        """Returns the error of a request that no worker can take: an `EngineLimitError` if all
        workers of a role that it needs are too small, known ones that are not ready included."""
        candidates, demand, needed = inputs.candidates, inputs.demand, self._needed(inputs)
        for role in needed:
            if demand is not None and are_too_small(candidates, role):
                return limit_error(candidates, role, inputs.num_tokens, demand)
        return UnavailableError(why_none(candidates, needed))

    def _needed(self, inputs: PlacementInputs) -> tuple[Role, ...]:
        """Returns the roles without whose workers the request cannot be served."""
        if self._alone(inputs) is not None:
            return ("decode",)
        return ("prefill",) if inputs.prefill_alone else ("prefill", "decode")

    def decide_again(self, inputs: PlacementInputs, decode: str) -> str | None:
        """Returns the decode worker to continue a request that runs on `decode`, or None."""
        return place_again(
            inputs.request_id,
            inputs.num_tokens,
            inputs.candidates,
            decode,
            policy_named(self.policy),
        )


def _prefill_rates(candidates: Iterable[Candidate]) -> list[Rates]:
    """Returns the rates of prefill workers that can take requests; workers often share them."""
    ready = [c.rates for c in candidates if c.role == "prefill" and not c.excluded]
    return list({id(rates): rates for rates in ready if rates is not None}.values())


DEFAULT_RULES = Rules()


@dataclass(frozen=True, slots=True)
class Decision:
    """Placement decision. `placement` is None if no workers can take the request."""

    rules: Rules
    inputs: PlacementInputs
    placement: Placement | None

    @property
    def refusal(self) -> BatonError:
        """Error of the request where `placement` is None."""
        return self.rules.refusal(self.inputs)

    @property
    def why_none(self) -> str:
        """Reason why no worker can take the request, as a sentence, where `placement` is None."""
        return str(self.refusal)
