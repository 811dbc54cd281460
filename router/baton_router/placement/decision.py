"""One placement decision: all that it depends on, and what came of it.

`Rules.decide` is a pure function of a question, so that the router, a dry run and the replay of a
record come to the same. Knows nothing of where questions come from.
"""

from dataclasses import dataclass

from baton_router.failure import Pair
from baton_router.fleet.candidate import Candidate
from baton_router.placement.placement import Placement, has_version_gap, place, place_again
from baton_router.placement.policy import Policy, PolicyName, alone_policy_named, policy_named


@dataclass(frozen=True, slots=True)
class Question:
    """A request to be placed, and the cluster as it was seen then.

    Attributes:
        num_tokens: the prompt's, and those of output that came before.
        broken: pairs that have just failed to work together.
        needs_prefill: it asks for what a prefill worker alone can tell.
    """

    request_id: str
    num_tokens: int
    candidates: tuple[Candidate, ...]
    broken: frozenset[Pair] = frozenset()
    needs_prefill: bool = False


@dataclass(frozen=True, slots=True)
class Rules:
    """Placement rules: the router's settings that matter to a decision.

    Attributes:
        conditional_disaggregation: decode workers may compute prompts, if the policy knows when;
            else only while no two workers of one version could.
    """

    policy: PolicyName = "baton"
    conditional_disaggregation: bool = True

    def decision(self, question: Question, earlier: "Decision | None" = None) -> "Decision":
        """The decision about a question; `earlier` itself where the question is the same."""
        if earlier is not None and earlier.question == question and earlier.rules == self:
            return earlier
        return Decision(self, question, self.decide(question))

    def decide(self, question: Question) -> Placement | None:
        """None if nobody can take the request."""
        return place(
            question.request_id,
            question.num_tokens,
            question.candidates,
            question.broken,
            policy_named(self.policy),
            self._alone(question),
        )

    def _alone(self, question: Question) -> Policy | None:
        """What a decode worker costs that computes the prompt itself; None: none is to. Where no
        prefill worker may hand over to any decode worker, one has to, whatever the settings say:
        an upgrade loses nothing."""
        if question.needs_prefill:
            return None
        alone = alone_policy_named(self.policy)
        if alone is not None and self.conditional_disaggregation:
            return alone
        has_to = has_version_gap(question.candidates)
        return alone or policy_named(self.policy) if has_to else None

    def decide_again(self, question: Question, decode: str) -> str | None:
        """Who goes on with a request that runs on `decode`; None if no other worker can."""
        return place_again(
            question.request_id,
            question.num_tokens,
            question.candidates,
            decode,
            policy_named(self.policy),
        )


DEFAULT_RULES = Rules()


@dataclass(frozen=True, slots=True)
class Decision:
    """Placement decision. `placement` None: no workers can take the request."""

    rules: Rules
    question: Question
    placement: Placement | None
