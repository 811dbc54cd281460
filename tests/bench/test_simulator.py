"""Small workloads through the simulator: what must hold of any, by property."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import InvalidArgumentError
from baton_router.routing.admission.policy import ADMISSION_NAMES
from baton_router.routing.placement.decision import Decision
from baton_router.routing.placement.policy import POLICY_NAMES
from baton_simulator.cluster import Cluster
from baton_simulator.colocated import Colocated
from baton_simulator.disaggregated import Disaggregated
from baton_simulator.job import Job
from baton_simulator.latency import Linear, Machine, Network
from baton_simulator.oscillation import swings
from baton_simulator.outcome import Objectives
from baton_simulator.setup import Setup, jobs_of
from baton_simulator.traces import MOONCAKE_BLOCK_SIZE, TraceImage, TraceRow
from tests.support.randomness import CHOSEN_SEED

KINDS = (Disaggregated, Colocated)
NUM_EXAMPLES = 10 if CHOSEN_SEED is None else 40
STEPS = Linear(3e-3, 1e-5, 7e-4, 1e-9, 1e-7, 2e-5)
NETWORK = Network(2e-3, 1e-3, 1e-6, 1e-6)
MACHINE = Machine(
    STEPS,
    NETWORK,
    num_kv_tokens=2048,
    max_num_seqs=4,
    max_num_batched_tokens=300,
    encoder_budget=160,
    encoder_cache_tokens=320,
)


@st.composite
def traces(draw: Any) -> list[TraceRow]:
    """Up to a dozen requests, of which some begin alike, some come at once and some show images."""
    rows, now = [], 0.0
    for number in range(draw(st.integers(1, 12))):
        now += draw(st.sampled_from([0.0, 0.003, 0.25]))
        num_tokens = draw(st.integers(1, 1400))
        num_blocks = -(-num_tokens // MOONCAKE_BLOCK_SIZE)
        num_shared = draw(st.integers(0, num_blocks))
        ids = (*range(num_shared), *(100 + 10 * number + i for i in range(num_shared, num_blocks)))
        images = draw(st.lists(st.sampled_from([1, 40, 160]), max_size=num_tokens // 200))
        rows.append(TraceRow(now, num_tokens, draw(st.integers(1, 90)), ids, placed(images)))
    return rows


def placed(lengths: list[int]) -> tuple[TraceImage, ...]:
    """Returns images 200 tokens apart; those of one length are equal."""
    return tuple(TraceImage(200 * i, length, length) for i, length in enumerate(lengths))


@st.composite
def setups(draw: Any, **given: Any) -> Setup:
    return Setup(
        machine=MACHINE,
        num_prefill=draw(st.integers(1, 3)),
        num_decode=draw(st.integers(1, 3)),
        num_encode=draw(st.integers(0, 2)),
        policy=draw(st.sampled_from(POLICY_NAMES)),
        block_size=draw(st.sampled_from([16, 64, 512])),
        cache_tokens=draw(st.sampled_from([1536, 2048, 8192])),
        admission=draw(st.sampled_from(ADMISSION_NAMES)),
        ttft_deadline=draw(st.sampled_from([None, 0.02, 1.0])),
        **given,
    )


def simulated(kind: type[Cluster], setup: Setup, rows: list[TraceRow]) -> Cluster:
    cluster = kind(setup, jobs_of(rows, 1.0, setup.block_size))
    cluster.run(lambda _done, _total, _now: None)
    return cluster


def outcome(cluster: Cluster) -> Any:
    """All that is known of what became of the requests and of the workers."""
    jobs = [
        (j.refusal, j.prefilled_at, j.last_token_at, j.num_gaps, j.is_finished, tuple(j.chunks))
        for j in cluster.jobs
    ]
    shares = tuple(i / 20 for i in range(21))
    workers = [(w.engine.num_steps, w.engine.scheduler.stats()) for w in cluster.workers]
    return jobs, len(cluster.gaps), cluster.gaps.percentiles(shares), workers, cluster.clock.now


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=NUM_EXAMPLES)
@given(data=st.data(), rows=traces())
def test_simulator_fast_forward_equals_single_steps(kind, data, rows):
    fast = data.draw(setups())
    slow = Setup(**{**{n: getattr(fast, n) for n in fast.__slots__}, "fast_forward": False})
    assert outcome(simulated(kind, fast, rows)) == outcome(simulated(kind, slow, rows))


class _WithoutMemory(Cluster):
    """Takes nothing from what it has seen or decided before."""

    def _decide(self, job: Job, refused: Collection[str] = ()) -> Decision:
        self._refresh_views()
        for worker in self.workers:
            worker.seen.clear()
        return self._redecide(job, refused)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=NUM_EXAMPLES)
@given(setup=setups(), rows=traces())
def test_simulator_reuse_of_decisions_equals_fresh_decisions(kind, setup, rows):
    fresh = type("Fresh", (_WithoutMemory, kind), {})
    assert outcome(simulated(kind, setup, rows)) == outcome(simulated(fresh, setup, rows))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=NUM_EXAMPLES)
@given(setup=setups(), rows=traces())
def test_simulator_ends_or_rejects_every_request(kind, setup, rows):
    cluster = simulated(kind, setup, rows)
    for job in cluster.jobs:
        assert job.is_finished != bool(job.refusal)
        assert job.num_gaps == (job.num_output_tokens - 1 if job.is_finished else 0)
    assert len(cluster.gaps) == sum(job.num_gaps for job in cluster.jobs)
    num_computed = sum(worker.num_computed_tokens for worker in cluster.workers)
    prefilled = [job for job in cluster.jobs if job.is_finished]
    assert num_computed == sum(j.num_prompt_tokens - j.num_cached_tokens for j in prefilled)
    for worker in cluster.workers:
        load, scheduler = worker.load, worker.engine.scheduler
        assert (load.num_sequences, load.num_queued_tokens, load.num_held_tokens) == (0, 0, 0)
        assert load.num_queued_encoder_tokens == 0
        assert worker.capacity.num_promised == 0
        scheduler.check_integrity()
        assert not scheduler.requests
        assert scheduler.stats().is_idle


def test_simulator_ttft_and_itl_are_sums_of_step_costs():
    row = TraceRow(1.0, 500, 3)
    setup = Setup(machine=MACHINE, num_prefill=1, num_decode=1, block_size=16)
    cluster = simulated(Disaggregated, setup, [row])
    (job,) = cluster.jobs
    first = 3e-3 + 300 * 1e-5 + 7e-4 + (300 * 301 / 2) * 1e-9 + 300 * 1e-7
    second = 3e-3 + 200 * 1e-5 + 7e-4 + (500 * 501 - 300 * 301) / 2 * 1e-9 + 500 * 1e-7
    assert job.ttft == pytest.approx(NETWORK.per_request + first + second)
    moved = NETWORK.per_transfer + 200 * NETWORK.per_token  # the first chunk has gone before
    decode = [3e-3 + 1e-5 + 7e-4 + n * 1e-9 + n * 1e-7 for n in (501, 502)]
    assert job.last_token_at - job.arrival - job.ttft == pytest.approx(moved + sum(decode))


def test_simulator_encodes_equal_images_once_per_worker():
    setup = Setup(machine=MACHINE, num_prefill=1, num_decode=1, block_size=16)
    row = TraceRow(1.0, 250, 1, images=placed([160]))
    first, second = simulated(Disaggregated, setup, [row, replace(row, arrival=2.0)]).jobs
    step = 3e-3 + 250 * 1e-5 + 7e-4 + (250 * 251 / 2) * 1e-9 + 250 * 1e-7
    assert first.ttft == pytest.approx(NETWORK.per_request + step + 160 * 2e-5)
    assert second.ttft == pytest.approx(NETWORK.per_request + step)


def test_encode_worker_sends_output_to_the_prefill_worker():
    machine = replace(MACHINE, steps=replace(STEPS, per_encoder_token=1e-3))
    setup = Setup(machine=machine, num_prefill=1, num_decode=1, num_encode=1, block_size=16)
    cluster = simulated(Disaggregated, setup, [TraceRow(1.0, 250, 1, images=placed([160]))])
    assert encoder_tokens(cluster) == {"encode-0": 160}
    encoded = NETWORK.per_request + 3e-3 + 160 * 1e-3
    moved = NETWORK.per_transfer + 160 * NETWORK.per_encoder_token
    step = 3e-3 + 250 * 1e-5 + 7e-4 + (250 * 251 / 2) * 1e-9 + 250 * 1e-7
    assert cluster.jobs[0].ttft == pytest.approx(encoded + moved + step)


def test_equal_images_are_encoded_once_for_all_workers():
    machine = replace(MACHINE, steps=replace(STEPS, per_encoder_token=1e-3))
    setup = Setup(machine=machine, num_prefill=3, num_decode=1, block_size=16)
    rows = [TraceRow(0.0, 250, 1, images=placed([160]))]
    rows += [TraceRow(1.0, 1200, 1, images=placed([160]))] * 3
    cluster = simulated(Disaggregated, setup, rows)
    assert list(encoder_tokens(cluster).values()) == [160]
    assert all(worker.num_computed_tokens for worker in cluster.computing)


def encoder_tokens(cluster: Cluster) -> dict[str, int]:
    """Returns the tokens of images that each worker has encoded, of those that have any."""
    tokens = {worker.name: worker.engine.num_encoder_tokens for worker in cluster.workers}
    return {name: num_tokens for name, num_tokens in tokens.items() if num_tokens}


def test_simulator_rejects_image_beyond_the_encoder_budget():
    setup = Setup(machine=MACHINE, num_prefill=1, num_decode=1, block_size=16)
    (job,) = simulated(Disaggregated, setup, [TraceRow(0.0, 250, 1, images=placed([161]))]).jobs
    assert "encoder" in job.refusal


@pytest.mark.parametrize(
    ("field", "value"), [("num_prefill", 0), ("num_decode", -1), ("block_size", 4096)]
)
def test_setup_names_the_setting_that_is_invalid(field, value):
    given = {"num_prefill": 1, "num_decode": 1, field: value}
    with pytest.raises(InvalidArgumentError, match=f"{field}: is {value}"):
        Setup(machine=MACHINE, **given)


@pytest.mark.nightly
def test_predicted_admission_avoids_swings_of_naive_rejection():
    found = swings(Objectives(10.0, 0.1))
    naive, predicted = found["naive"], found["predicted"]
    assert naive.unevenness > 2 * predicted.unevenness
    assert naive.correlation < predicted.correlation
    assert naive.correlation < -0.5
    assert predicted.goodput > naive.goodput
