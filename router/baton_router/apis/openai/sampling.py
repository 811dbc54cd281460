"""Sampling parameters of OpenAI's API as Baton's.

The bounds are those of `baton.sampling`; only the temperature of a model that gives none differs,
which is OpenAI's.
"""

import re
import secrets
from typing import Any

from baton.errors import InvalidArgumentError
from baton.sampling import (
    DEFAULT_MAX_TOKENS,
    NOTHING_CHANGED,
    EarlyStopping,
    SamplingDefaults,
    SamplingParams,
)
from baton_router.apis.openai.schemas import ChatOptions, CompletionRequest, GenerationRequest
from baton_router.apis.openai.structured_outputs import grammar_of

_EARLY_STOPPING = {
    False: EarlyStopping.HEURISTIC,
    True: EarlyStopping.FIRST,
    "never": EarlyStopping.NEVER,
}
_TOKEN_ID = re.compile(r"[0-9]{1,10}")
# Keys of `logit_bias` that an error shows, and characters of each.
_SHOWN_KEYS, _SHOWN_CHARS = 8, 40


_OF_OPENAI = SamplingDefaults(temperature=1.0)


def defaults_over_http(of_model: SamplingDefaults) -> SamplingDefaults:
    """Returns the defaults of a model's requests over HTTP."""
    return of_model.over(_OF_OPENAI).over(NOTHING_CHANGED)


def completion_sampling(body: CompletionRequest, defaults: SamplingDefaults) -> SamplingParams:
    """Returns the parameters. `defaults`: of the model's requests over HTTP. Raises
    `InvalidArgumentError` if one is out of bounds."""
    wants_logprobs = body.logprobs is not None
    return _params(
        body,
        defaults,
        # A worker generates one token at least; of the prompt alone it is left out.
        1 if body.is_prompt_alone else body.max_tokens,
        best_of=body.best_of,
        logprobs=wants_logprobs,
        top_logprobs=body.logprobs or 0,
        prompt_logprobs=body.logprobs if body.echo and wants_logprobs else body.prompt_logprobs,
    )


def is_bounded(body: ChatOptions) -> bool:
    """Returns whether a chat sets the maximum tokens of its answer."""
    return body.max_tokens is not None or body.max_completion_tokens is not None


def chat_sampling(
    body: ChatOptions, defaults: SamplingDefaults, max_tokens_unset: int
) -> SamplingParams:
    """Returns the parameters, as `completion_sampling`. `max_tokens` is `max_tokens_unset` unless
    the chat sets it."""
    given = body.max_completion_tokens
    if given is not None and body.max_tokens not in (None, given):
        raise InvalidArgumentError(
            "max_completion_tokens", f"is {given} and max_tokens is {body.max_tokens}; give one"
        )
    max_tokens = body.max_tokens if given is None else given
    return _params(
        body,
        defaults,
        max_tokens_unset if max_tokens is None else max_tokens,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs,
        prompt_logprobs=body.prompt_logprobs,
    )


def _params(
    body: GenerationRequest, defaults: SamplingDefaults, max_tokens: int | None, **others: Any
) -> SamplingParams:
    if body.use_beam_search:
        others |= _of_beams(body)
    given = SamplingParams(
        bad_words=tuple(body.bad_words),
        **{"temperature": body.temperature, **others},
        # OpenAI and Anthropic take 0 as well: of the most likely token alone.
        top_p=1.0 if body.top_p == 0.0 else body.top_p,
        n=body.n,
        seed=secrets.randbits(64) if body.seed is None else body.seed % 2**64,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=_logit_bias(body.logit_bias),
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop),
        grammar=grammar_of(body),
        top_k=_top_k(body),
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        min_tokens=body.min_tokens,
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        max_tokens=DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens,
    )
    return given.with_defaults(defaults)


def _top_k(body: GenerationRequest) -> int | None:
    if body.top_p == 0.0 and not body.use_beam_search:
        return 1
    return 0 if body.top_k == -1 else body.top_k  # as vLLM and SGLang say "all"


def _of_beams(body: GenerationRequest) -> dict[str, Any]:
    """Returns the parameters of a beam search, which one beam makes greedy sampling. It ranks by
    the model's own probabilities, which temperature 1 leaves as they are."""
    return {
        "temperature": 0.0 if body.temperature in (None, 1.0) else body.temperature,
        "beam_width": body.n if body.n > 1 else 0,
        "length_penalty": body.length_penalty,
        "early_stopping": _EARLY_STOPPING[body.early_stopping],
    }


def _logit_bias(given: dict[str, float]) -> tuple[tuple[int, float], ...]:
    wrong = [key for key in given if not _TOKEN_ID.fullmatch(key)]
    if wrong:
        shown = ", ".join(repr(key[:_SHOWN_CHARS]) for key in wrong[:_SHOWN_KEYS])
        raise InvalidArgumentError("logit_bias", f"has keys that are no token ids: {shown}")
    return tuple((int(token_id), bias) for token_id, bias in given.items())
