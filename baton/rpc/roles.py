"""Conversion of worker roles to `baton.v1.WorkerRole`, and back."""

from baton.errors import InvalidArgumentError
from baton.rpc.worker_role import Role
from baton.v1 import inference_pb2 as pb

_MESSAGES: dict[Role, pb.WorkerRole.ValueType] = {
    "encode": pb.WORKER_ROLE_ENCODE,
    "prefill": pb.WORKER_ROLE_PREFILL,
    "decode": pb.WORKER_ROLE_DECODE,
}
_ROLES = {message: role for role, message in _MESSAGES.items()}


def role_to_message(role: str) -> pb.WorkerRole.ValueType:
    """Returns the role's message. Raises `InvalidArgumentError` for an unknown role."""
    for name, message in _MESSAGES.items():
        if name == role:
            return message
    raise InvalidArgumentError("role", f"is {role!r}; must be encode, prefill or decode")


def role_of(message: pb.WorkerRole.ValueType) -> Role:
    """Returns the role. Raises `InvalidArgumentError` for one that is unset or unknown."""
    if message not in _ROLES:
        raise InvalidArgumentError("role", f"is {message}; must be encode, prefill or decode")
    return _ROLES[message]
