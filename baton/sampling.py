"""How tokens are chosen and when to stop: the one set of parameters and bounds all rooms share.

Knows nothing of models, tokenizers or protobuf. `Parameter.field` names in errors are those of
`baton.v1.SamplingParams`.
"""

import math
from dataclasses import dataclass

from baton.errors import InvalidArgumentError

DEFAULT_MAX_TOKENS = 16
MAX_TEMPERATURE = 100.0
MAX_STOP_STRINGS = 4
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to continue one prompt. Checked when made: `InvalidArgumentError` names field and bound.

    Attributes:
        max_tokens: tokens to generate at most, at least 1.
        temperature: 0 is greedy; in [0, 100].
        top_k: only the k most likely tokens are considered; 0 means all.
        top_p: only the most likely tokens whose probabilities sum to this; in (0, 1].
        seed: the random numbers of token i of sequence s are a function of (seed, s, i) alone.
        stop_token_ids: generation ends with one of these, which is part of the output.
        stop: generation ends when the text contains one of these; applied where text is made, so
            the engine on token ids ignores it.
        ignore_eos: go on past the model's end-of-sequence tokens.
        logprobs: report the log-probability of each generated token, in nats, before temperature.
    """

    max_tokens: int = DEFAULT_MAX_TOKENS
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            _refuse("max_tokens", self.max_tokens, "at least 1")
        # Written so that NaN fails.
        if not 0.0 <= self.temperature <= MAX_TEMPERATURE:
            _refuse("temperature", self.temperature, f"in [0, {MAX_TEMPERATURE:g}]")
        if self.top_k < 0:
            _refuse("top_k", self.top_k, "0 (all) or more")
        if not 0.0 < self.top_p <= 1.0:
            _refuse("top_p", self.top_p, "in (0, 1]")
        if not 0 <= self.seed <= MAX_SEED:
            _refuse("seed", self.seed, "in [0, 2^64)")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            _refuse(
                "stop_token_ids", f"{len(self.stop_token_ids)} ids", f"at most {MAX_STOP_TOKEN_IDS}"
            )
        self._check_stop_strings()

    def _check_stop_strings(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            _refuse("stop", f"{len(self.stop)} strings", f"at most {MAX_STOP_STRINGS}")
        for i, text in enumerate(self.stop):
            if not 1 <= len(text.encode()) <= MAX_STOP_BYTES:
                _refuse(f"stop[{i}]", f"{len(text.encode())} bytes", f"1 to {MAX_STOP_BYTES} bytes")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def check_token_ids(token_ids: "list[int] | tuple[int, ...]", vocab_size: int, field: str) -> None:
    """Raises `InvalidArgumentError` unless there is a token and all are in [0, vocab_size)."""
    if not token_ids:
        raise InvalidArgumentError(field, "is empty; at least 1 token is needed")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        at = next(i for i, t in enumerate(token_ids) if not 0 <= t < vocab_size)
        _refuse(f"{field}[{at}]", token_ids[at], f"in [0, {vocab_size})")


def check_length(num_prompt_tokens: int, max_tokens: int, max_model_len: int) -> None:
    """Raises `InvalidArgumentError` unless prompt and output fit the model's length together."""
    if num_prompt_tokens + max_tokens > max_model_len:
        raise InvalidArgumentError(
            "sampling.max_tokens",
            f"{num_prompt_tokens} prompt tokens + {max_tokens} max_tokens = "
            f"{num_prompt_tokens + max_tokens}; the model's length is {max_model_len}",
        )


def _refuse(field: str, value: object, bound: str) -> None:
    shown = "NaN" if isinstance(value, float) and math.isnan(value) else value
    raise InvalidArgumentError(
        field if field.startswith(("input", "token_ids", "sampling.")) else f"sampling.{field}",
        f"is {shown}; must be {bound}",
    )
