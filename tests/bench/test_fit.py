"""A machine is fitted to what it was measured as, and read back from a benchmark's rows."""

import json

import pytest

from baton_simulator.fit import decodes, fit_machine, fit_steps, machine_from, prompt, prompt_steps
from baton_simulator.latency import Linear, Network, transfer_end
from bench.report import Row, show

STEPS = Linear(2e-3, 5e-5, 3e-4, 2e-8, 1e-7)
SERVED = Linear(5e-3, 5e-5, 9e-4, 2e-8, 1e-7)
NETWORK = Network(4e-3, 2e-3, 1e-6)


def milliseconds(steps: Linear, load: object) -> float:
    return float(steps.seconds(load)[0]) * 1e3  # type: ignore[arg-type]


@pytest.fixture
def measured() -> dict[str, float]:
    """Returns measurements of a machine that takes exactly as long as these costs say."""
    found = {"pool: tokens": 4096.0}
    for behind in (0, 256, 896):
        for number in (16, 64, 128):
            load = prompt(number, behind)
            found[f"step: {number} prompt tokens behind {behind}"] = milliseconds(STEPS, load)
    for number in (1, 8, 16):
        for behind in (64, 512):
            load = decodes(number, behind)
            found[f"step: {number} decodes behind {behind}"] = milliseconds(STEPS, load)
        load = decodes(number, 64)
        found[f"served step: {number} decodes behind 64"] = milliseconds(SERVED, load)
    for number in (64, 400, 1000):
        steps = sum(milliseconds(SERVED, load) for load in prompt_steps(number))
        found[f"first token: {number} prompt tokens"] = steps + NETWORK.per_request * 1e3
        moved = NETWORK.per_transfer + number * NETWORK.per_token
        second = milliseconds(SERVED, decodes(1, number)) + moved * 1e3
        found[f"handoff: {number} tokens"] = second
    return found


def test_fit_recovers_the_costs_behind_measured_times(measured):
    steps, machine = fit_steps(measured), fit_machine(measured)
    assert _near(steps, STEPS)
    assert _near(machine.steps, SERVED)
    network = machine.network
    assert network.per_request == pytest.approx(NETWORK.per_request, rel=1e-3)
    assert network.per_transfer == pytest.approx(NETWORK.per_transfer, rel=1e-3)
    assert network.per_token == pytest.approx(NETWORK.per_token, rel=1e-3)
    assert machine.num_kv_tokens == 4096


def test_machine_from_reads_rows_that_the_benchmark_printed(measured, tmp_path, capsys):
    show([Row(c, v, "ms", "the fit", v, 1.0, None) for c, v in measured.items()], as_json=True)
    path = tmp_path / "steps.json"
    path.write_text(capsys.readouterr().out)
    assert machine_from(path) == fit_machine({k: float(json.dumps(v)) for k, v in measured.items()})


def test_fit_never_yields_negative_costs(measured):
    falling = {c: v / (1 + i) for i, (c, v) in enumerate(measured.items())}
    steps = fit_machine(falling).steps
    assert isinstance(steps, Linear)
    assert steps.per_step > 0
    assert min(steps.per_token, steps.per_sequence, steps.per_pair, steps.per_read) >= 0


def test_transfer_end_overlaps_transfer_with_later_chunks():
    network = Network(0.0, 0.5, 0.01)
    chunks = [(1.0, 100), (2.0, 150), (9.0, 200)]
    # The first two have gone by the end of the third, whose 50 tokens take half a second.
    assert transfer_end(chunks, 0.0, 0, network) == pytest.approx(9.0 + 0.5 + 0.5)
    # Claimed late, all goes at once; what is there already does not go.
    assert transfer_end(chunks, 20.0, 160, network) == pytest.approx(20.0 + 0.4 + 0.5)
    assert transfer_end(chunks, 3.0, 200, network) == pytest.approx(9.0 + 0.5)


def _near(one: object, other: Linear) -> bool:
    names = Linear.__slots__
    return all(getattr(one, n) == pytest.approx(getattr(other, n), rel=1e-3) for n in names)
