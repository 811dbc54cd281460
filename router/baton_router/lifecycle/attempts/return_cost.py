"""Cost of placing a preempted request again. Pure.

To free KV capacity, a worker may keep a sequence's request and recompute it later, or give it back;
it compares by these figures, which are as of the moment when the request was placed.
"""

from dataclasses import dataclass

from baton_router.routing.fleet.candidate import Candidate
from baton_router.routing.fleet.cost_rates import PRIOR


@dataclass(frozen=True, slots=True)
class ReturnCost:
    """Cost of a return in seconds.

    Attributes:
        fixed: to place the request with the tokens that it is placed with.
        per_token: for each token that is generated after.
        recompute_token: to compute one of its tokens again on its decode worker instead.
    """

    fixed: float
    per_token: float
    recompute_token: float


def return_cost(
    prefill: Candidate, decode: Candidate, num_tokens: int, num_encoder_tokens: int = 0
) -> ReturnCost:
    """Returns the cost for a request of `num_tokens` tokens that these two workers run, of which
    `num_encoder_tokens` are those of encoder inputs.

    Assumes that the prefill worker has the tokens cached, as it has just computed them, and stays
    as busy as now, and that the decode worker which resumes has none of them.
    """
    computing, taking = prefill.rates or PRIOR, decode.rates or PRIOR
    step = computing.prefill_seconds_per_step
    token = computing.prefill_seconds(1, num_tokens) - step
    moving = num_tokens * taking.transfer_seconds_per_token
    again = taking.prefill_seconds(num_tokens, 0)
    again += num_encoder_tokens * taking.encoder_seconds_per_token
    return ReturnCost(
        fixed=prefill.queue_seconds() + step + taking.handoff_seconds + moving,
        per_token=token + taking.transfer_seconds_per_token,
        recompute_token=again / num_tokens,
    )
