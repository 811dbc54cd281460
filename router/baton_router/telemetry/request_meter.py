"""Request metrics, observed at the first token and at the end of each request.

The first three distributions follow OpenTelemetry's conventions for generative AI in names, labels
and bounds. Knows nothing of how metrics are exposed.
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from baton.errors import BatonError
from baton.serving.deadline import Clock
from baton.serving.grpc.errors import code_of
from baton.serving.telemetry import buckets
from baton.serving.telemetry.distribution import Distribution, Distributions
from baton_router.call.failure import FailureKind
from baton_router.call.request import RequestOutcome
from baton_router.call.usage import EncodedBy

PROVIDER = "baton"
_OPERATIONS = {"chat": "chat", "pooled": "embeddings"}


class RequestMeter:
    """Request metrics of one router since its start, in seconds; labels are operation, provider and
    model.

    Attributes:
        ttft: from arrival to the first token.
        per_token: between the tokens of a sequence, the mean of each request.
        duration: from arrival to end; a fourth label is the error code, empty for none.
        admission: from arrival until workers had admitted the request.
        prefill_queue: from a prompt's arrival at its worker to the first step of its prefill.
        encode: from the call of another worker until it had encoded an input.
        num_encoder_inputs: encoder inputs by where they were encoded.
        num_failures: failed attempts, by kind, of the requests that have ended.
    """

    def __init__(self, model: str, clock: Clock = time.monotonic) -> None:
        self.ttft = Distributions(buckets.TIME_TO_FIRST_TOKEN)
        self.per_token = Distributions(buckets.TIME_PER_OUTPUT_TOKEN)
        self.duration = Distributions(buckets.REQUEST_DURATION)
        self.admission = Distribution(buckets.STAGE)
        self.prefill_queue = Distribution(buckets.STAGE)
        self.encode = Distribution(buckets.STAGE)
        self.num_encoder_inputs: Counter[EncodedBy] = Counter()
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.num_migrations = 0
        self.num_failures: Counter[FailureKind] = Counter()
        self.clock = clock
        self._model = model

    @contextmanager
    def failing(self, prompt_kind: str | None = None) -> Iterator[None]:
        """Meters a call that fails in the block, before it has become a request."""
        arrived = self.clock()
        try:
            yield
        except BatonError:
            with self.begin(prompt_kind, arrived):
                raise

    def begin(self, prompt_kind: str | None, arrived: float) -> "MeteredRequest":
        """Starts metering a request. Use the result in `with` until the request has ended.

        Args:
            prompt_kind: the kind of the call's input; "pooled" for that of a pooled output; None if
                the call could not be read.
            arrived: arrival time in seconds of the clock.
        """
        operation = _OPERATIONS.get(prompt_kind or "", "text_completion")
        return MeteredRequest(self, (operation, PROVIDER, self._model), arrived)


class MeteredRequest:
    """Metrics of one request."""

    def __init__(self, meter: RequestMeter, labels: tuple[str, str, str], arrived: float) -> None:
        self._meter = meter
        self._labels = labels
        self._arrived = arrived

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _type: object, error: BaseException | None, *_: object) -> None:
        error_type = "" if error is None else code_of(error)
        duration = self._meter.clock() - self._arrived
        self._meter.duration.at(*self._labels, error_type).observe(duration)

    def first_token(self, moment: float) -> None:
        """Observes TTFT; `moment` is in seconds of the clock."""
        self._meter.ttft.at(*self._labels).observe(moment - self._arrived)

    def ended(self, outcome: RequestOutcome) -> None:
        """Observes the outcome of a valid request."""
        meter, account = self._meter, outcome.account
        timings = account.timings
        num_new = account.num_new_tokens
        meter.num_failures.update(outcome.failures)
        meter.num_prompt_tokens += account.num_prompt_tokens
        meter.num_output_tokens += num_new
        meter.num_migrations += account.num_migrations
        if timings.admitted is not None:
            meter.admission.observe(timings.admitted - self._arrived)
        if timings.prefill_queue_s is not None:
            meter.prefill_queue.observe(timings.prefill_queue_s)
        for encoded in account.encoded_inputs:
            meter.num_encoder_inputs[encoded.source] += 1
            if encoded.seconds is not None:
                meter.encode.observe(encoded.seconds)
        num_gaps = num_new / outcome.request.params.n - 1
        if timings.first_token is not None and num_gaps > 0:
            ended = meter.clock() if timings.finished is None else timings.finished
            meter.per_token.at(*self._labels).observe((ended - timings.first_token) / num_gaps)
