"""Fits a machine to what was measured, and reads it back from what `python -m bench steps` prints.

The rows are benchmark rows, whose case says what was measured:

    step: 16 decodes behind 256            milliseconds of an engine's step
    step: 128 prompt tokens behind 512
    served step: 8 decodes behind 64       the same, between the client's tokens
    first token: 400 prompt tokens         milliseconds, of an idle cluster
    handoff: 400 tokens                    milliseconds from the first token to the second
    pool: tokens                           tokens of KV that a worker has room for
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from baton.errors import InvalidArgumentError
from baton_simulator.latency import FloatArray, Linear, Machine, Network, StepLoad

MAX_NUM_SEQS = 64  # the defaults of a worker on a CPU
MAX_NUM_BATCHED_TOKENS = 128

_STEP = re.compile(r"(served )?step: (\d+) (decodes|prompt tokens) behind (\d+)")
_FIRST_TOKEN = re.compile(r"first token: (\d+) prompt tokens")
_HANDOFF = re.compile(r"handoff: (\d+) tokens")
_POOL = "pool: tokens"

Measured = Mapping[str, float]
"""What each case took."""


def decodes(number: int, behind: int) -> StepLoad:
    """A step of so many decodes, each of a token behind so many."""
    reads = np.array([float(number * (behind + 1))])
    return StepLoad(number, number, reads, reads)


def prompt(number: int, behind: int) -> StepLoad:
    """A step of so many tokens of one prompt, behind so many."""
    pairs = number * behind + number * (number + 1) / 2
    return StepLoad(number, 1, np.array([pairs]), np.array([float(number + behind)]))


def prompt_steps(num_tokens: int) -> list[StepLoad]:
    """The steps in which a prompt is computed where nothing else is."""
    size = MAX_NUM_BATCHED_TOKENS
    return [prompt(min(size, num_tokens - start), start) for start in range(0, num_tokens, size)]


def load_of(case: str) -> StepLoad | None:
    """The step that a case is about, if it is about one of an engine alone."""
    match = _STEP.fullmatch(case)
    if match is None or match[1]:
        return None
    make = decodes if match[3] == "decodes" else prompt
    return make(int(match[2]), int(match[4]))


def fit_steps(measured: Measured) -> Linear:
    """The least relative error over all steps of an engine, with no part below 0."""
    loads = {case: load for case in measured if (load := load_of(case)) is not None}
    columns = np.array([_features(load) for load in loads.values()])
    seconds = np.array([measured[case] / 1e3 for case in loads])
    return Linear(*_least_squares(columns / seconds[:, None], np.ones(len(seconds))))


def fit_machine(measured: Measured) -> Machine:
    """A worker of a cluster, where serving takes time beside the engine's steps.

    What a step and each of its sequences take is what a served step takes beyond its tokens; what
    is left of an idle cluster's first token is the request's way, and of the second, the handoff's.
    """
    steps = replace(fit_steps(measured), per_step=0.0, per_sequence=0.0)
    served = [
        (
            int(match[2]),
            measured[case] / 1e3 - _seconds(steps, decodes(int(match[2]), int(match[4]))),
        )
        for case in measured
        if (match := _STEP.fullmatch(case)) and match[1]
    ]
    sizes = np.array([[1.0, number] for number, _ in served])
    extra = _least_squares(sizes, np.array([excess for _, excess in served]))
    steps = replace(steps, per_step=max(extra[0], 1e-6), per_sequence=extra[1])
    ways = [
        measured[case] / 1e3 - sum(_seconds(steps, load) for load in prompt_steps(int(match[1])))
        for case in measured
        if (match := _FIRST_TOKEN.fullmatch(case))
    ]
    handoffs = [
        (int(match[1]), measured[case] / 1e3 - _seconds(steps, decodes(1, int(match[1]))))
        for case in measured
        if (match := _HANDOFF.fullmatch(case))
    ]
    moved = _least_squares(
        np.array([[1.0, number] for number, _ in handoffs]),
        np.array([max(0.0, excess) for _, excess in handoffs]),
    )
    network = Network(max(0.0, float(np.median(ways))), *moved)
    return Machine(steps, network, int(measured[_POOL]), MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS)


def machine_from(path: Path) -> Machine:
    """The machine that a file of benchmark rows, one JSON object a line, was measured on.

    Raises `InvalidArgumentError` with the line that is wrong, or with what is missing.
    """
    measured = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            measured[str(row["case"])] = float(row["value"])
        except (ValueError, KeyError, TypeError) as error:
            raise _wrong(f"{path}, line {number}: no row of a benchmark: {error!r}") from error
    kinds = {
        "step": any(load_of(case) for case in measured),
        "served step": any(case.startswith("served step: ") for case in measured),
        "first token": any(map(_FIRST_TOKEN.fullmatch, measured)),
        "handoff": any(map(_HANDOFF.fullmatch, measured)),
        _POOL: _POOL in measured,
    }
    missing = [kind for kind, is_there in kinds.items() if not is_there]
    if missing:
        raise _wrong(f"{path}: has no case of {', '.join(missing)}; see python -m bench steps")
    return fit_machine(measured)


def _wrong(problem: str) -> InvalidArgumentError:
    return InvalidArgumentError("--latency-model", problem)


def _seconds(steps: Linear, load: StepLoad) -> float:
    return float(steps.seconds(load)[0])


def _features(load: StepLoad) -> tuple[float, float, float, float, float]:
    """Returns the factors of the terms of `Linear`."""
    return 1.0, load.num_tokens, load.num_sequences, load.num_pairs[0], load.num_reads[0]


def _least_squares(columns: FloatArray, values: FloatArray) -> Sequence[float]:
    """The best combination of columns, none of them below 0: while some are, the lowest of them is
    left out."""
    scale = np.abs(columns).max(axis=0)
    used = list(range(columns.shape[1]))
    found = np.zeros(columns.shape[1])
    while used:
        solution = np.linalg.lstsq(columns[:, used] / scale[used], values, rcond=None)[0]
        if (solution >= 0).all():
            found[used] = solution / scale[used]
            break
        del used[int(np.argmin(solution))]
    return found.tolist()
