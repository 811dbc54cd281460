"""Cost rates that the router learns, against those of its workers."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_router.routing.fleet.candidate import Candidate
from baton_router.routing.fleet.cost_rates import PRIOR, Rates
from baton_router.routing.fleet.regression import Coefficient, Regression
from baton_router.routing.fleet.worker_model import _WORK, PoolModel, WorkDone, WorkerModel
from baton_router.routing.placement.cost_model import CostModel
from tests.support.strategies import rates

SLOW = Rates(3e-3, 4e-4, 2e-8, interference_seconds_per_sequence=40 * 6e-4)
FAST = Rates(8e-3, 1e-6, 2e-11, interference_seconds_per_sequence=40 * 5e-5)


class Source:
    """Reports of a worker that computes prompts of all lengths, some with decodes beside them."""

    def __init__(self, rates: Rates, rng: random.Random, noise: float = 0.1) -> None:
        self._rates, self._noise, self._random = rates, noise, rng
        self.done = WorkDone()

    def report(self, *, times: float = 1.0) -> WorkDone:
        draw, rates, done = self._random, self._rates, self.done
        num_tokens = round(10 ** draw.uniform(0.5, 3.5))
        num_cached = draw.choice([0, 0, num_tokens])
        num_decodes = draw.choice([0, 0, draw.randrange(200)])
        num_steps = -(-num_tokens // 512) + draw.choice([0, num_decodes // 4])
        num_pairs = num_tokens * (num_cached + num_tokens // 2)
        seconds = (
            num_steps * rates.prefill_seconds_per_step
            + num_tokens * rates.prefill_seconds_per_token
            + num_pairs * rates.attention_seconds_per_pair
            + num_decodes * rates.interference_seconds_per_sequence / 40
        )
        seconds *= times * draw.lognormvariate(0.0, self._noise)
        self.done = WorkDone(
            done.num_steps + num_steps,
            done.num_prompt_tokens + num_tokens,
            done.num_prompt_pairs + num_pairs,
            done.num_decode_tokens + num_decodes,
            done.seconds + seconds,
            done.num_encoder_tokens,
        )
        return self.done


def taught(model: WorkerModel, source: Source, reports: int) -> WorkerModel:
    for _ in range(reports):
        model.observe_work(source.report())
    return model


def test_worker_model_tells_step_time_and_slowness_against_peers():
    rng, pool = random.Random(5), PoolModel()
    sources = [Source(FAST, rng), Source(FAST, rng)]
    models = [WorkerModel(pool), WorkerModel(pool)]
    assert [model.step_seconds for model in models] == [0.0, 0.0]
    for _ in range(60):
        models[0].observe_work(sources[0].report())
        models[0].observe_work(sources[0].report())
        models[1].observe_work(sources[1].report(times=12.0))
    assert 4 < models[1].step_seconds / models[0].step_seconds < 40
    assert models[0].slowness < 1.5 < 4 < models[1].slowness


class ImageSource(Source):
    """Reports of a worker that also encodes images, some in steps of their own."""

    def report(self, *, times: float = 1.0) -> WorkDone:
        done = super().report(times=times)
        num_tokens = self._random.choice([0, 0, 256, 576, 2048])
        num_steps = self._random.randrange(2) if num_tokens else 0
        seconds = num_steps * self._rates.prefill_seconds_per_step
        seconds += num_tokens * self._rates.encoder_seconds_per_token
        self.done = replace(
            done,
            num_steps=done.num_steps + num_steps,
            seconds=done.seconds + seconds * times * self._random.lognormvariate(0.0, self._noise),
            num_encoder_tokens=done.num_encoder_tokens + num_tokens,
        )
        return self.done


def check_predicts(rates: Rates, true: Rates, within: float) -> None:
    """Prompts of any length, cached or not, take as long as they are said to."""
    true = replace(true, max_step_tokens=512)
    for num_uncached in (16, 100, 512, 3000):
        for num_cached in (0, 1000):
            expected = true.prefill_seconds(num_uncached, num_cached)
            found = rates.prefill_seconds(num_uncached, num_cached)
            assert found == pytest.approx(expected, rel=within)


@pytest.mark.parametrize("true", [SLOW, FAST], ids=["slow", "fast"])
def test_worker_model_learns_prompt_cost_from_noisy_reports(true, rng):
    model = taught(WorkerModel(PoolModel(), 512), Source(true, rng), 100)
    check_predicts(model.rates, true, within=0.25)


@pytest.mark.parametrize("true", [SLOW, FAST], ids=["slow", "fast"])
def test_worker_model_learns_prompt_cost_from_exact_reports(true, rng):
    model = taught(WorkerModel(PoolModel(), 512), Source(true, rng, noise=0.0), 200)
    check_predicts(model.rates, true, within=0.08)


def test_worker_model_resists_outliers(rng):
    model, source = taught(WorkerModel(PoolModel(), 512), Source(SLOW, rng), 100), Source(SLOW, rng)
    for i in range(100):
        model.observe_work(source.report(times=50.0 if i % 20 == 7 else 1.0))
    check_predicts(model.rates, SLOW, within=0.35)


def test_worker_model_follows_slower_machine(rng):
    model = taught(WorkerModel(PoolModel(), 512), Source(SLOW, rng), 100)
    slower = Source(SLOW, rng)
    slower.done = model.done
    for _ in range(200):
        model.observe_work(slower.report(times=4.0))
    four_times = [4 * value for value in SLOW.__getstate__()[:3]]
    check_predicts(model.rates, Rates(*four_times), within=0.35)


def test_worker_model_tells_slow_worker_from_equal_ones(rng):
    pool = PoolModel()
    models = [WorkerModel(pool, 512) for _ in range(4)]
    sources = [Source(SLOW, rng) for i in range(4)]
    for _ in range(100):
        for i, (model, source) in enumerate(zip(models, sources, strict=True)):
            model.observe_work(source.report(times=3.0 if i == 3 else 1.0))
    assert models[0].rates is models[1].rates is models[2].rates
    check_predicts(models[0].rates, SLOW, within=0.35)
    ratio = models[3].rates.prefill_seconds(512, 0) / models[0].rates.prefill_seconds(512, 0)
    assert 2.0 < ratio < 4.0


def test_worker_model_of_new_worker_comes_from_its_pool(rng):
    pool = PoolModel()
    known = taught(WorkerModel(pool, 512), Source(SLOW, rng), 50)
    assert WorkerModel(pool, 512).rates == known.rates != PRIOR


def test_worker_model_starts_with_prior():
    assert WorkerModel(PoolModel()).rates == PRIOR


def test_worker_model_ignores_late_or_empty_reports(rng):
    source = Source(SLOW, rng)
    first, second = source.report(), source.report()
    model = WorkerModel(PoolModel())
    model.observe_work(WorkDone())
    assert model.rates == PRIOR
    model.observe_work(second)
    learned = model.rates
    model.observe_work(first)
    model.observe_work(second)
    assert model.rates == learned


def test_worker_model_learns_handoff_per_connector(rng):
    pool = PoolModel()
    model = WorkerModel(pool)
    for connector, base, per_token in (("grpc", 4e-3, 2e-5), ("shm", 5e-4, 1e-7)):
        for _ in range(60):
            num_tokens = rng.randrange(2000)
            seconds = (base + num_tokens * per_token) * rng.lognormvariate(0, 0.05)
            model.received(num_tokens, seconds, connector)
        found = model.rates.handoff_seconds + 1000 * model.rates.transfer_seconds_per_token
        assert found == pytest.approx(base + 1000 * per_token, rel=0.2)
    other = WorkerModel(pool)
    other.received(1000, 4e-3 + 2e-2, "grpc")
    assert other.rates.handoff_seconds == pytest.approx(4e-3, rel=0.2)


observations = st.lists(
    st.tuples(
        st.tuples(st.integers(1, 10**4), st.integers(0, 10**6), st.integers(0, 10**6)),
        st.floats(1e-6, 1e4),
    ),
    max_size=30,
)


@given(observations)
def test_regression_is_bounded_and_reproducible(observed):
    coefficients = [
        Coefficient(0.0, 1e-3, 1.0),
        Coefficient(1e-4, 1e-4, 0.1),
        Coefficient(0, 1e-8, 1),
    ]
    one, other = Regression(coefficients), Regression(coefficients)
    for features, y in observed:
        one.observe(features, y)
        other.observe(features, y)
    assert one.values == other.values
    assert all(0.0 <= v <= c.largest for v, c in zip(one.values, coefficients, strict=True))


@given(
    rates,
    st.sampled_from(["prefill", "decode"]),
    st.integers(0, 2000),
    st.integers(0, 2000),
    st.integers(0, 3000),
    st.none() | st.integers(1, 4096),
)
def test_cost_never_grows_with_cached_prefix_at_learned_rates(
    rates, role, num_tokens, num_cached, num_held, room
):
    one = Candidate(
        "w", role, b"", num_cached, 9, 9.0, 2, num_held, max_held_tokens=room, rates=rates
    )
    more = one._replace(num_cached_tokens=num_cached + 16)
    before, after = (CostModel().terms(c, num_tokens) for c in (one, more))
    assert all(after[term] <= before[term] for term in before)


def test_pool_model_absorbs_change_of_all_workers(rng):
    pool = PoolModel()
    models = [taught(WorkerModel(pool, 512), Source(SLOW, rng), 50) for i in range(2)]
    later = [Source(SLOW, rng) for i in range(2)]
    for model, source in zip(models, later, strict=True):
        source.done = model.done
    for _ in range(400):
        for model, source in zip(models, later, strict=True):
            model.observe_work(source.report(times=5.0))
    assert [model.slowness for model in models] == [1.0, 1.0]
    check_predicts(models[0].rates, Rates(*(5 * v for v in SLOW.__getstate__()[:3])), within=0.35)


def test_worker_model_is_not_slow_when_whole_pool_is():
    rng = random.Random(9)  # of other reports it is found slow, now and then
    pool = PoolModel()
    models = [taught(WorkerModel(pool, 512), Source(SLOW, rng), 50) for i in range(2)]
    later = Source(SLOW, rng, noise=0.5)
    later.done = models[0].done
    for i in range(300):
        models[0].observe_work(later.report(times=3.0 if 100 <= i < 200 else 1.0))
        assert [model.slowness for model in models] == [1.0, 1.0]


def test_worker_model_never_learns_free_tokens(rng):
    pool = PoolModel()
    model = WorkerModel(pool, 512)
    for i in range(100):
        num_tokens = rng.randrange(10, 300)
        model.received(num_tokens, 2e-3 + 1.0 / num_tokens, "grpc")  # the more, the sooner
        model.observe_work(WorkDone(i + 1, num_tokens * (i + 1), 0, 0, 5e-3 * (i + 1)))
    assert model.rates.transfer_seconds_per_token > 0
    assert model.rates.prefill_seconds_per_token > 0


def test_worker_model_without_transfers_uses_pool_rates():
    pool = PoolModel()
    used, unused = WorkerModel(pool), WorkerModel(pool)
    for _ in range(30):
        used.received(100, 0.1, "grpc")
    assert used.rates == unused.rates
    assert used.rates.handoff_seconds > 10 * PRIOR.handoff_seconds


def test_decode_pool_model_uses_prefill_pool_until_it_computes(rng):
    prefill = PoolModel()
    decode = WorkerModel(PoolModel(prefill), 512)
    taught(WorkerModel(prefill, 512), Source(FAST, rng), 60)
    check_predicts(decode.rates, FAST, within=0.3)
    decode.observe_work(WorkDone(num_steps=50, num_decode_tokens=500, seconds=0.05))
    check_predicts(decode.rates, FAST, within=0.3)
    taught(decode, Source(SLOW, rng), 80)
    check_predicts(decode.rates, SLOW, within=0.35)


@pytest.mark.parametrize("true", [SLOW, FAST], ids=["slow", "fast"])
@pytest.mark.parametrize("token", [1e-5, 1e-3])
def test_worker_model_learns_encoder_seconds_apart(true, token, rng):
    """Images slow no prompt of text, as far as the model knows."""
    true = replace(true, encoder_seconds_per_token=token)
    model = taught(WorkerModel(PoolModel(), 512), ImageSource(true, rng, noise=0.05), 200)
    check_predicts(model.rates, true, within=0.3)
    assert model.rates.encoder_seconds_per_token == pytest.approx(token, rel=0.3)


def test_worker_model_learns_encoder_seconds_of_encode_worker(rng):
    """It computes no prompts: what a step takes besides comes from the prefill pool."""
    prefill = PoolModel()
    encode = WorkerModel(PoolModel(prefill), 512)
    taught(WorkerModel(prefill, 512), Source(SLOW, rng), 60)
    check_predicts(encode.rates, SLOW, within=0.35)
    done = WorkDone()
    for _ in range(30):
        num_tokens = rng.choice([256, 576])
        seconds = (3e-3 + 2e-3 * num_tokens) * rng.lognormvariate(0.0, 0.1)
        done = WorkDone(
            done.num_steps + 1,
            0,
            0,
            0,
            done.seconds + seconds,
            done.num_encoder_tokens + num_tokens,
        )
        encode.observe_work(done)
    assert encode.rates.encoder_seconds_per_token == pytest.approx(2e-3, rel=0.15)
    check_predicts(encode.rates, SLOW, within=0.35)


def test_worker_model_without_images_fits_as_if_none_existed(rng):
    """A regression without the coefficient has the same values, bit for bit."""
    source, pool = Source(SLOW, rng), PoolModel()
    fewer, before = Regression(_WORK[:-1]), WorkDone()
    for _ in range(100):
        done = source.report()
        work = done.since(before)
        pool.observe_work(work)
        fewer.observe(work.features[:-1], work.seconds)
        before = done
    *others, encoder_token = pool._work._regression.values
    assert (tuple(others), encoder_token) == (fewer.values, PRIOR.encoder_seconds_per_token)
