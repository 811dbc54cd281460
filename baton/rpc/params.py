"""Conversion of `baton.sampling.SamplingParams` to its message and back, for all packages.

Lossless. `SamplingParams` itself checks its bounds; only the bounds of the message are checked
here.
"""

from dataclasses import asdict

from baton.errors import InvalidArgumentError
from baton.sampling import (
    DEFAULT_MAX_TOKENS,
    EarlyStopping,
    Grammar,
    GrammarKind,
    SamplingDefaults,
    SamplingParams,
)
from baton.v1 import sampling_pb2 as pb

_MAX_UINT32 = 2**32 - 1

_EARLY_STOPPING = {
    EarlyStopping.HEURISTIC: pb.EARLY_STOPPING_HEURISTIC,
    EarlyStopping.FIRST: pb.EARLY_STOPPING_FIRST,
    EarlyStopping.NEVER: pb.EARLY_STOPPING_NEVER,
}
_EARLY_STOPPING_OF = {
    pb.EARLY_STOPPING_UNSPECIFIED: EarlyStopping.HEURISTIC,
    **{message: value for value, message in _EARLY_STOPPING.items()},
}


def params_to_message(params: SamplingParams) -> pb.SamplingParams:
    """Returns the message with every field set that is not None, so that no default of the other
    side applies but a seed, and the model's for what the parameters leave to it.

    Raises `InvalidArgumentError` for a number the message cannot hold. A `top_k` beyond 32 bits
    means all tokens of any vocabulary, and is sent as the largest.
    """
    return pb.SamplingParams(
        max_tokens=_uint32("max_tokens", params.max_tokens),
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        top_k=None if params.top_k is None else min(params.top_k, _MAX_UINT32),
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
        n=params.n,
        best_of=params.best_of,
        beam_width=params.beam_width,
        length_penalty=params.length_penalty,
        early_stopping=_EARLY_STOPPING[params.early_stopping],
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=[
            pb.LogitBias(token_id=_uint32(f"logit_bias[{i}]", token_id), bias=bias)
            for i, (token_id, bias) in enumerate(params.logit_bias)
        ],
        bad_words=params.bad_words,
        bad_token_ids=[
            pb.BadTokens(token_ids=_uint32s(f"bad_token_ids[{i}]", token_ids))
            for i, token_ids in enumerate(params.bad_token_ids)
        ],
        stop_token_ids=_uint32s("stop_token_ids", params.stop_token_ids),
        stop=params.stop,
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
        top_logprobs=params.top_logprobs,
        prompt_logprobs=params.prompt_logprobs,
        grammar=_grammar_to_message(params.grammar),
        speculate=params.speculate,
    )


def params_of(message: pb.SamplingParams, *, default_seed: int) -> SamplingParams:
    """Returns the parameters, with unset fields at the defaults of `sampling.proto`.

    `default_seed` is used if the message has none. Raises `InvalidArgumentError` for a value out of
    bounds.
    """
    return SamplingParams(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else DEFAULT_MAX_TOKENS,
        min_tokens=message.min_tokens,
        temperature=message.temperature if message.HasField("temperature") else None,
        top_k=message.top_k if message.HasField("top_k") else None,
        top_p=message.top_p if message.HasField("top_p") else None,
        min_p=message.min_p if message.HasField("min_p") else None,
        seed=message.seed if message.HasField("seed") else default_seed,
        n=message.n if message.HasField("n") else 1,
        best_of=message.best_of if message.HasField("best_of") else None,
        beam_width=message.beam_width,
        length_penalty=message.length_penalty if message.HasField("length_penalty") else 1.0,
        early_stopping=_early_stopping_of(message.early_stopping),
        repetition_penalty=(
            message.repetition_penalty if message.HasField("repetition_penalty") else None
        ),
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple((item.token_id, item.bias) for item in message.logit_bias),
        bad_words=tuple(message.bad_words),
        bad_token_ids=tuple(tuple(item.token_ids) for item in message.bad_token_ids),
        stop_token_ids=tuple(message.stop_token_ids),
        stop=tuple(message.stop),
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs,
        top_logprobs=message.top_logprobs,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        grammar=_grammar_of(message.grammar) if message.HasField("grammar") else None,
        speculate=message.speculate if message.HasField("speculate") else None,
    )


def defaults_to_message(defaults: SamplingDefaults) -> pb.SamplingDefaults:
    """Returns the message; what is None is unset."""
    return pb.SamplingDefaults(**asdict(defaults))


def defaults_of(message: pb.SamplingDefaults) -> SamplingDefaults:
    """Returns the values; what is unset is None."""
    return SamplingDefaults(**{field.name: value for field, value in message.ListFields()})


def _grammar_to_message(grammar: Grammar | None) -> pb.Grammar | None:
    # The fields have the names of the kinds.
    return None if grammar is None else pb.Grammar(**{grammar.kind.value: grammar.text})


def _grammar_of(message: pb.Grammar) -> Grammar:
    kind = message.WhichOneof("text")
    if kind is None:
        raise InvalidArgumentError(
            "sampling.grammar", "is empty; set json_schema, regex or ebnf, or leave it unset"
        )
    return Grammar(GrammarKind(kind), getattr(message, kind))


def _early_stopping_of(value: pb.EarlyStopping.ValueType) -> EarlyStopping:
    if value not in _EARLY_STOPPING_OF:
        raise InvalidArgumentError(
            "sampling.early_stopping", f"is {value}; must be one of the values of EarlyStopping"
        )
    return _EARLY_STOPPING_OF[value]


def _uint32s(field: str, values: tuple[int, ...]) -> list[int]:
    return [_uint32(f"{field}[{i}]", value) for i, value in enumerate(values)]


def _uint32(field: str, value: int) -> int:
    if not 0 <= value <= _MAX_UINT32:
        raise InvalidArgumentError(f"sampling.{field}", f"is {value}; must be in [0, 2^32)")
    return value
