"""`baton.sampling.SamplingParams` to its message and back: the one conversion all rooms share."""

from baton.errors import InvalidArgumentError
from baton.sampling import DEFAULT_MAX_TOKENS, SamplingParams
from baton.v1 import sampling_pb2 as pb

_MAX_UINT32 = 2**32 - 1


def to_proto(params: SamplingParams) -> pb.SamplingParams:
    """The message with every field set, so that no default of the other side applies.

    Raises `InvalidArgumentError` for a number the message cannot hold. `temperature` and `top_p`
    lose what a 32-bit float does not hold.
    """
    return pb.SamplingParams(
        max_tokens=_uint32("sampling.max_tokens", params.max_tokens),
        temperature=params.temperature,
        top_k=min(params.top_k, _MAX_UINT32),
        top_p=params.top_p,
        seed=params.seed,
        stop_token_ids=[
            _uint32(f"sampling.stop_token_ids[{i}]", token_id)
            for i, token_id in enumerate(params.stop_token_ids)
        ],
        stop=params.stop,
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
    )


def from_proto(message: pb.SamplingParams, *, default_seed: int) -> SamplingParams:
    """The parameters, unset fields at the defaults `sampling.proto` states.

    `default_seed` is used where the message has none. Raises `InvalidArgumentError` for a value out
    of bounds.
    """
    return SamplingParams(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else DEFAULT_MAX_TOKENS,
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        seed=message.seed if message.HasField("seed") else default_seed,
        stop_token_ids=tuple(message.stop_token_ids),
        stop=tuple(message.stop),
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs,
    )


def _uint32(field: str, value: int) -> int:
    if not 0 <= value <= _MAX_UINT32:
        raise InvalidArgumentError(field, f"is {value}; must be in [0, 2^32)")
    return value
