"""Load of all pools, from the work that they were given."""

import pytest

from baton_router.routing.fleet.candidate import Candidate
from baton_router.routing.fleet.cost_rates import Rates
from baton_router.routing.roles.pool_load import (
    Backlog,
    Objectives,
    PoolDemand,
    decode_pressure,
    demand_of,
    encode_pressure,
    prefill_pressure,
)

RATES = Rates(
    prefill_seconds_per_token=1e-3,
    prefill_seconds_per_step=0.01,
    interference_seconds_per_sequence=0.04,  # 1 ms in each step
    encoder_seconds_per_token=2e-3,
)
OBJECTIVES = Objectives(ttft_ms=2000.0, itl_ms=50.0)


def encode(name: str = "e0", **fields: object) -> Candidate:
    return Candidate(name, "encode", b"", rates=RATES, **fields)  # type: ignore[arg-type]


def prefill(name: str = "p0", **fields: object) -> Candidate:
    return Candidate(name, "prefill", b"", rates=RATES, **fields)  # type: ignore[arg-type]


def decode(name: str = "d0", **fields: object) -> Candidate:
    return Candidate(name, "decode", b"", rates=RATES, **{"max_held_tokens": 1000, **fields})  # type: ignore[arg-type]


def test_prefill_pressure_follows_queue_of_ready_workers():
    workers = [prefill(num_queued_tokens=3000), prefill("p1", num_queued_tokens=1000), decode()]
    demand = demand_of(workers, Backlog())
    assert demand.prefill_seconds == pytest.approx(4.0)
    assert prefill_pressure(workers, demand, OBJECTIVES) == pytest.approx(1.0)
    gone = prefill("p2", num_queued_tokens=9000, excluded="draining")
    assert prefill_pressure([*workers, gone], demand, OBJECTIVES) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("queued", "held", "seconds", "tokens"),
    [
        pytest.param(400, 100, 5.4, 100, id="for a prefill worker"),
        pytest.param(400, 800, 0.4, 800 + 10 * 200, id="for room among the decodes"),
        pytest.param(100, 100, 0.1, 100, id="for its tenant's allowance"),
    ],
)
def test_pool_demand_counts_queued_requests_by_missing_resource(queued, held, seconds, tokens):
    workers = [prefill(num_queued_tokens=queued), decode(num_sequences=4)]
    demand = demand_of(workers, Backlog(10, 5000, 4, held))
    assert demand == PoolDemand(pytest.approx(seconds), pytest.approx(tokens), 4)


def test_decode_pressure_follows_held_tokens_or_running_count():
    workers = [prefill(num_sequences=2), decode(num_sequences=9), decode("d1", num_sequences=3)]
    demand = demand_of(workers, Backlog(num_in_flight=12, num_tokens_in_flight=600))
    assert demand == PoolDemand(0.0, 500, 10)  # two of them wait for their prompts
    between = 0.01 + 5 * 0.001
    assert decode_pressure(workers, demand, OBJECTIVES) == pytest.approx(between / 0.05)
    full = demand_of(workers, Backlog(num_in_flight=12, num_tokens_in_flight=2160))
    assert decode_pressure(workers, full, OBJECTIVES) == pytest.approx(0.9)


def test_encode_pressure_follows_images_of_encode_workers():
    workers = [
        encode(num_queued_encoder_tokens=1500),
        encode("e1", num_queued_encoder_tokens=500),
        encode("e2", num_queued_encoder_tokens=9000, excluded="draining"),
        prefill(num_queued_encoder_tokens=250),
    ]
    demand = demand_of(workers, Backlog())
    assert demand.encoder_seconds == pytest.approx(4.0)
    assert encode_pressure(workers, demand, OBJECTIVES) == pytest.approx(1.0)
    assert demand.prefill_seconds == pytest.approx(0.5)  # its images delay its prompts


def test_encode_pressure_without_encode_workers_is_that_of_one():
    workers = [prefill(num_queued_encoder_tokens=500), prefill("p1", num_queued_encoder_tokens=300)]
    demand = demand_of(workers, Backlog())
    assert encode_pressure(workers, demand, OBJECTIVES) == pytest.approx(0.8)
    assert prefill_pressure(workers, demand, OBJECTIVES) == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("workers", "prefill_seconds", "encoder_seconds"),
    [
        pytest.param([encode()], 0.3 + 0.1, 0.8, id="for the encode pool"),
        pytest.param([], 0.3 + 0.1 + 0.8, 0.8, id="for prefill workers"),
    ],
)
def test_pool_demand_counts_images_of_queued_requests(workers, prefill_seconds, encoder_seconds):
    busy, backlog = prefill(num_queued_tokens=300), Backlog(1, 100, num_waiting_encoder_tokens=400)
    demand = demand_of([*workers, busy, decode()], backlog)
    assert demand.prefill_seconds == pytest.approx(prefill_seconds)
    assert demand.encoder_seconds == pytest.approx(encoder_seconds)
    idle = demand_of([*workers, prefill(), decode()], backlog)  # they wait for their quotas
    assert idle.encoder_seconds == 0.0


def test_pressure_is_zero_without_workers_or_work():
    demand = PoolDemand(4.0, 500, 3)
    assert prefill_pressure([decode()], demand, OBJECTIVES) == 0.0
    assert decode_pressure([prefill()], demand, OBJECTIVES) == 0.0
    assert decode_pressure([decode()], demand_of([decode()], Backlog()), OBJECTIVES) == 0.0


def test_pool_demands_of_routers_add_up():
    assert PoolDemand(1.0, 10, 2, 0.5) + PoolDemand(0.5, 5, 1) == PoolDemand(1.5, 15, 3, 0.5)
