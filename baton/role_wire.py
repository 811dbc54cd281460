"""Conversion of worker roles to `baton.v1.WorkerRole`, and back."""

from typing import Literal

from baton.errors import InvalidArgumentError
from baton.v1 import inference_pb2 as pb

_MESSAGES = {"prefill": pb.WORKER_ROLE_PREFILL, "decode": pb.WORKER_ROLE_DECODE}


def role_to_message(role: str) -> pb.WorkerRole.ValueType:
    """Returns the role's message. Raises `InvalidArgumentError` for an unknown role."""
    if role not in _MESSAGES:
        raise InvalidArgumentError("role", f"is {role!r}; must be prefill or decode")
    return _MESSAGES[role]


def role_of(message: pb.WorkerRole.ValueType) -> Literal["prefill", "decode"]:
    """Returns the role. Raises `InvalidArgumentError` for one that is unset or unknown."""
    if message == pb.WORKER_ROLE_PREFILL:
        return "prefill"
    if message == pb.WORKER_ROLE_DECODE:
        return "decode"
    raise InvalidArgumentError("role", f"is {message}; must be prefill or decode")
