"""Forecasts of admission, and what they learn from ended requests."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest

from baton.cluster.prefix import HashedInput
from baton.errors import OverloadedError
from baton_router.call.request import Demand
from baton_router.routing.admission.admission_queue import AdmissionQueue
from baton_router.routing.admission.forecast import QUEUE_SECONDS, Forecasts
from baton_router.routing.admission.policy import admission_named
from baton_router.routing.admission.quotas import Quotas
from baton_router.routing.fleet.candidate import Candidate, WorkerLimits
from baton_router.routing.fleet.cost_rates import Rates
from baton_router.routing.placement.decision import Decision, PlacementInputs, Rules

RATES = Rates(prefill_seconds_per_token=1e-3)


def request(num_tokens: int = 100, max_tokens: int = 100, n: int = 1) -> Demand:
    return Demand(num_tokens, max_tokens, n, n)


class Setting:
    """Two prefill workers and a decode worker with room for 1,000 tokens, and their clock."""

    def __init__(self, admission: str = "predicted") -> None:
        self.now = 0.0
        self.queues = [0, 0]
        self.cached = 0
        self.room: int | None = 1000
        self.excluded = ""
        self.rates = RATES
        self.images: tuple[HashedInput, ...] = ()
        self.encoders: tuple[Candidate, ...] = ()
        self.rules = Rules(conditional_disaggregation=False)
        self.forecasts: Forecasts[Demand] = Forecasts(
            self.decide, lambda demand: demand, admission_named(admission), lambda: self.now
        )

    def decide(self, demand: Demand, earlier: Decision | None) -> Decision:
        candidates = (*self.candidates(), *self.encoders)
        inputs = PlacementInputs(
            "r", demand.num_tokens, candidates, images=self.images, demand=demand
        )
        return self.rules.decision(inputs, earlier)

    def candidates(self) -> list[Candidate]:
        prefills = [
            Candidate(
                f"p{i}", "prefill", b"", self.cached, num_queued_tokens=queue, rates=self.rates
            )
            for i, queue in enumerate(self.queues)
        ]
        decode = Candidate(
            "d0", "decode", b"", max_held_tokens=self.room, excluded=self.excluded, rates=self.rates
        )
        return [*prefills, decode]

    @contextmanager
    def placed(self, count: int) -> Iterator[None]:
        """Places `count` requests for the length of the block."""
        with ExitStack() as stack:
            for _ in range(count):
                stack.enter_context(self.in_flight(request()))
            yield

    @contextmanager
    def in_flight(self, asked: Demand) -> Iterator[None]:
        """The request is in flight, and never gets a token, for the length of the block."""
        self.forecasts.begin(asked, self.forecasts.forecast(asked))
        yield
        self.forecasts.end(asked, 0, None)

    def answer(self, asked: Demand, num_output_tokens: int, seconds: float) -> None:
        first_token_at = self.now
        self.forecasts.begin(asked, self.forecasts.forecast(asked))
        self.now += seconds
        self.forecasts.end(asked, num_output_tokens, first_token_at)


def test_forecast_keeps_the_decision_until_the_cluster_changes():
    setting, one = Setting(), request()
    with setting.in_flight(request()):
        first = setting.forecasts.forecast(one).decision
        assert first is not None
        assert setting.forecasts.forecast(one, 0, first).decision is first
        setting.queues = [0, 10]
        changed = setting.forecasts.forecast(one, 0, first).decision
        assert changed is not None
        assert changed.inputs.candidates[1].num_queued_tokens == 10


def test_forecast_has_room_when_nothing_is_in_flight():
    setting = Setting()
    setting.queues = [10**6, 10**6]
    forecast = setting.forecasts.forecast(request(num_tokens=10**6))
    assert (forecast.has_room, forecast.ttft_seconds) == (True, 0.0)


def test_forecast_counts_queues_of_decode_workers_alone():
    """They compute the prompts, and have only so much room for answers."""
    setting = Setting()
    setting.rules, setting.queues = Rules(), []
    with setting.in_flight(request()):
        forecast = setting.forecasts.forecast(request())
        assert (forecast.has_room, forecast.ttft_seconds) == (True, pytest.approx(0.1))
        setting.room = 200
        assert not setting.forecasts.forecast(request()).has_room


def test_forecast_ttft_counts_shortest_queue_and_uncached_tokens():
    setting = Setting()
    with setting.in_flight(request()):
        setting.queues = [400, 200]
        assert setting.forecasts.forecast(request()).ttft_seconds == pytest.approx(0.3)
        setting.cached = 60
        assert setting.forecasts.forecast(request()).ttft_seconds == pytest.approx(0.24)
        ahead = setting.forecasts.forecast(request(), num_tokens_ahead=1000)
        assert ahead.ttft_seconds == pytest.approx(0.24 + 1.0 / 2), "two workers share it"


def test_forecast_has_no_room_when_prefill_queues_are_full():
    setting = Setting()
    with setting.in_flight(request()):
        setting.queues = [2000, 700]
        forecast = setting.forecasts.forecast(request())
        assert not forecast.has_room
        assert forecast.drain_seconds == pytest.approx(0.7 - QUEUE_SECONDS)
        setting.queues = [2000, 400]
        assert setting.forecasts.forecast(request()).has_room


def test_forecast_has_room_for_short_prompt_on_decode_worker():
    setting = Setting()
    setting.rules, setting.room = Rules(), None
    with setting.in_flight(request()):
        setting.queues = [2000, 2000]
        assert setting.forecasts.forecast(request(num_tokens=400)).has_room
        forecast = setting.forecasts.forecast(request(num_tokens=900))
        assert forecast.decision.placement.prefill == "", "it takes less than the queues"
        assert not forecast.has_room
        assert forecast.drain_seconds == pytest.approx(0.9 - QUEUE_SECONDS)


class Unlike(Setting):
    """A prefill worker of 160 tokens, and decode workers of 160 and 1,600."""

    def candidates(self) -> list[Candidate]:
        small, large = (WorkerLimits(2048, 16, num_blocks, 16) for num_blocks in (10, 100))
        return [
            Candidate("p0", "prefill", b"", rates=self.rates, limits=small),
            Candidate("d0", "decode", b"", max_held_tokens=160, rates=self.rates, limits=small),
            Candidate(
                "d1",
                "decode",
                b"",
                num_queued_tokens=self.queues[0],
                max_held_tokens=1600,
                num_sequences=9,
                rates=self.rates,
                limits=large,
            ),
        ]


def test_forecast_counts_only_workers_large_enough():
    """The small decode worker, which is full, leaves the large one its room."""
    setting = Unlike()
    with ExitStack() as stack:
        stack.enter_context(setting.in_flight(request(10, 10)))
        for _ in range(12):
            placement = setting.forecasts.forecast(request(80, 60)).decision.placement
            assert (placement.prefill, placement.decode) == ("p0", "d0")
            stack.enter_context(setting.in_flight(request(80, 60)))
        forecast = setting.forecasts.forecast(request(1200, 300))
        assert forecast.decision.placement.decode == "d1"
        assert forecast.has_room
        setting.queues = [900, 0]
        forecast = setting.forecasts.forecast(request(1200, 300))
        assert forecast.ttft_seconds == pytest.approx(0.9 + 1.2)
        assert forecast.drain_seconds == pytest.approx(0.9 - QUEUE_SECONDS)


def test_forecast_counts_prompts_in_flight_among_decodes():
    """Each is expected to hold its prompt and half of the answer it may have: 150 tokens."""
    setting = Setting()
    with ExitStack() as stack:
        for _ in range(6):
            assert setting.forecasts.forecast(request()).has_room
            stack.enter_context(setting.in_flight(request()))
        forecast = setting.forecasts.forecast(request())
        assert not forecast.has_room
        assert 0 < forecast.drain_seconds < 2.0
        setting.now = 10.0
        assert not setting.forecasts.forecast(request()).has_room, "they have not ended"
    with setting.in_flight(request()):
        assert setting.forecasts.forecast(request()).has_room


def test_forecast_counts_shared_prompt_once_for_sequences():
    setting = Setting()
    with setting.in_flight(request(n=15)):
        assert setting.forecasts.forecast(request(n=1, num_tokens=20, max_tokens=10)).has_room
        assert not setting.forecasts.forecast(request()).has_room


@pytest.mark.parametrize("change", [{"room": None}, {"excluded": "draining"}])
def test_forecast_has_room_when_capacity_is_unknown(change):
    setting = Setting()
    with setting.placed(20):
        for name, value in change.items():
            setattr(setting, name, value)
        assert setting.forecasts.forecast(request()).has_room


def test_forecast_always_has_room_with_policy_none():
    setting = Setting("none")
    with setting.placed(20):
        setting.queues = [10**6, 10**6]
        assert setting.forecasts.forecast(request()).has_room


def test_forecast_learns_length_of_answers():
    """Answers that use a tenth of what they may leave room for more."""
    setting = Setting()
    for _ in range(200):
        setting.answer(request(), num_output_tokens=10, seconds=0.1)
    with setting.placed(7):
        assert setting.forecasts.forecast(request()).has_room


def test_forecast_learns_seconds_per_token():
    setting = Setting()
    for _ in range(200):
        setting.answer(request(), num_output_tokens=100, seconds=20.0)
    with setting.placed(4):
        forecast = setting.forecasts.forecast(request())
        assert not forecast.has_room
        assert forecast.drain_seconds == pytest.approx(20.0, rel=0.05)


def test_forecast_learns_nothing_from_unstarted_answer():
    setting = Setting()
    with setting.in_flight(request()):
        setting.now += 1000.0
    with setting.placed(6):
        assert 0 < setting.forecasts.forecast(request()).drain_seconds < 2.0


IMAGE = (0, 50, b"i" * 16)
ENCODER = Candidate("e", "encode", b"", rates=replace(RATES, encoder_seconds_per_token=0.01))


def test_forecast_ttft_counts_encoder_seconds():
    setting = Setting()
    with setting.in_flight(request()):
        assert setting.forecasts.forecast(request()).ttft_seconds == pytest.approx(0.1)
        setting.images = (IMAGE,)
        own = 50 * RATES.encoder_seconds_per_token
        assert setting.forecasts.forecast(request()).ttft_seconds == pytest.approx(0.1 + own)
        setting.rates = replace(RATES, encoder_seconds_per_token=0.01)
        assert setting.forecasts.forecast(request()).ttft_seconds == pytest.approx(0.1 + 0.5)
        setting.queues, setting.encoders = [300, 300], (ENCODER,)
        fetched = 0.5 + 5e-3 + 50 * RATES.transfer_seconds_per_token
        forecast = setting.forecasts.forecast(request())
        assert forecast.ttft_seconds == pytest.approx(fetched + 0.1), "its queue hides 0.3 s"
        setting.encoders = (ENCODER._replace(cached_inputs=(0,)),)
        assert setting.forecasts.forecast(request()).ttft_seconds == pytest.approx(0.4)


def test_admission_rejects_image_that_cannot_be_encoded_in_time():
    """And no prompt of text: it waits for no encoder."""
    setting = Setting()
    setting.rates = replace(RATES, encoder_seconds_per_token=0.1)
    setting.encoders = (ENCODER._replace(num_queued_encoder_tokens=10**6),)
    queue: AdmissionQueue[Demand] = AdmissionQueue(
        Quotas(), setting.forecasts, on_displaced=lambda *_: None
    )
    with setting.in_flight(request()):
        queue.join(request(), tenant="", priority=0, num_tokens=100, seconds_left=4.0)
        setting.images = (IMAGE,)
        with pytest.raises(OverloadedError, match=r"in 5\.1 s, and the deadline is in 4\.0 s"):
            queue.join(request(), tenant="", priority=0, num_tokens=100, seconds_left=4.0)
