"""The rates that a router would come to learn of a machine
(`baton_router.routing.fleet.worker_model`).

A router learns from what workers report and knows after a few hundred requests; here it knows from
the start, so that a simulation says nothing of the learning.
"""

import numpy as np

from baton_router.routing.fleet.cost_rates import Rates
from baton_simulator.latency import Machine, StepLoad

_FAR = 16  # full steps behind which a step is asked about
_STEPS_SLOWED = 40  # as the router takes it
_NUM_DECODES, _CONTEXT = 64, 4096
_NUM_ENCODER_TOKENS = 1024


def rates_of(machine: Machine) -> Rates:
    """From what a full step takes at the beginning of a prompt and far behind it, and from what
    each of many decodes and each token of an image adds to a step."""
    size = machine.max_num_batched_tokens
    first, later = (size * behind + size * (size + 1) / 2 for behind in (0, _FAR * size))
    at_first = _seconds(machine, size, 1, first, size)
    at_later = _seconds(machine, size, 1, later, (_FAR + 1) * size)
    per_pair = max(0.0, (at_later - at_first) / (later - first))
    per_token = max(1e-9, (at_first - per_pair * first) / size)
    one = _seconds(machine, 1, 1, _CONTEXT, _CONTEXT)
    many = _seconds(
        machine, _NUM_DECODES, _NUM_DECODES, _NUM_DECODES * _CONTEXT, _NUM_DECODES * _CONTEXT
    )
    image = _seconds(machine, 1, 1, _CONTEXT, _CONTEXT, _NUM_ENCODER_TOKENS)
    return Rates(
        prefill_seconds_per_token=per_token,
        attention_seconds_per_pair=per_pair,
        max_step_tokens=size,
        handoff_seconds=machine.network.per_transfer,
        transfer_seconds_per_token=machine.network.per_token,
        interference_seconds_per_sequence=_STEPS_SLOWED * (many - one) / (_NUM_DECODES - 1),
        encoder_seconds_per_token=(image - one) / _NUM_ENCODER_TOKENS,
    )


def _seconds(
    machine: Machine,
    num_tokens: int,
    num_sequences: int,
    num_pairs: float,
    num_reads: float,
    num_encoder_tokens: int = 0,
) -> float:
    load = StepLoad(
        num_tokens,
        num_sequences,
        np.array([num_pairs]),
        np.array([num_reads]),
        num_encoder_tokens,
    )
    return float(machine.steps.seconds(load)[0])
