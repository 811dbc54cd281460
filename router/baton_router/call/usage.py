"""Usage and timings of one request, counted while it runs. Knows nothing of messages."""

import time
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

EncodedBy = Literal["local", "encode", "cached_remote", "failed"]
"""Source of an encoder output: the worker that computes the prompt (`local`), another one for this
request (`encode`) or before (`cached_remote`); `failed`: the first, after all."""

ENCODED_BY: Final[tuple[EncodedBy, ...]] = get_args(EncodedBy)


@dataclass(frozen=True, slots=True)
class EncodedInput:
    """Encoder input that was encoded. `seconds`: from the call of another worker until that had
    encoded it; None unless it did."""

    source: EncodedBy
    seconds: float | None = None


@dataclass(slots=True)
class Timings:
    """Timings of one request: moments in seconds of one monotonic clock; None: did not happen."""

    arrived: float
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None
    prefill_started: float | None = None
    handed_over: float | None = None
    prefill_queue_s: float | None = None
    exposed_transfer_s: float | None = None

    def durations(self) -> dict[str, float | None]:
        """Returns the durations by their public names, in seconds; None of what did not happen."""
        moments = {
            "admission": self.admitted,
            "time_to_first_token": self.first_token,
            "total": self.finished,
            "prefill_started": self.prefill_started,
            "handed_over": self.handed_over,
        }
        return {
            **{name: None if at is None else at - self.arrived for name, at in moments.items()},
            "prefill_queue": self.prefill_queue_s,
            "exposed_transfer": self.exposed_transfer_s,
        }


@dataclass(slots=True)
class Account:
    """Usage of one request so far: tokens, blocks and timings.

    Attributes:
        num_received_tokens: of `num_output_tokens`, those that the client resumed with.
        num_cached_prompt_tokens: the most that an attempt found cached.
        num_reused_decode_blocks: the most that an attempt's decode worker already held.
        encoded_inputs: encoder inputs that an attempt's computing worker had not cached.
    """

    timings: Timings
    num_prompt_tokens: int
    num_output_tokens: int = 0
    num_received_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_transferred_blocks: int = 0
    num_transferred_bytes: int = 0
    num_reused_decode_blocks: int = 0
    num_migrations: int = 0
    encoded_inputs: tuple[EncodedInput, ...] = ()

    @property
    def num_new_tokens(self) -> int:
        """Output tokens without those that the client resumed with."""
        return self.num_output_tokens - self.num_received_tokens

    def snapshot(self) -> "Account":
        """Returns a copy, which the rest of the request does not change."""
        return replace(self, timings=replace(self.timings))

    def started(self, queue_seconds: float, elapsed: float, num_cached_tokens: int) -> None:
        """Records a prefill begun `elapsed` seconds ago; only the first one's queue time counts."""
        if self.timings.prefill_queue_s is None:
            self.timings.prefill_queue_s = queue_seconds
            self.timings.prefill_started = time.monotonic() - elapsed
        num_cached = min(num_cached_tokens, self.num_prompt_tokens)
        self.num_cached_prompt_tokens = max(self.num_cached_prompt_tokens, num_cached)

    def encoded(self, encoded: EncodedInput) -> None:
        """Records where an encoder input was encoded."""
        self.encoded_inputs += (encoded,)

    def handed_over(
        self, exposed_seconds: float, num_blocks: int, num_bytes: int, num_reused_blocks: int
    ) -> None:
        """Records the handoff of the prompt's `num_blocks` transferred blocks, for which the decode
        worker waited `exposed_seconds` after the prompt was computed."""
        if self.timings.exposed_transfer_s is None:
            self.timings.exposed_transfer_s = exposed_seconds
            self.timings.handed_over = time.monotonic()
        self.num_transferred_blocks += num_blocks
        self.num_transferred_bytes += num_bytes
        self.num_reused_decode_blocks = max(self.num_reused_decode_blocks, num_reused_blocks)
