"""Conversion between messages of `baton.v1` and the plain data of `baton_kvtransfer`."""

from typing import Protocol

from baton.engine.scheduler.plan import TokenLogprobs
from baton.errors import FailedPreconditionError, InvalidArgumentError
from baton.v1 import kv_transfer_pb2 as pb
from baton.v1 import prefill_pb2
from baton.worker.engine_messages import (
    hashes_of,
    layouts_of,
    layouts_to_messages,
    top_logprobs_to_message,
)
from baton.worker.pairing import Pairing
from baton_kvtransfer.connector import Integrity
from baton_kvtransfer.lease.handle import LEASE_ID_BYTES, FirstToken, Handle
from baton_kvtransfer.lease.lease import Claim

HANDLE_VERSION = 1

# A connector as messages have it: its value and, for one without, `CONNECTOR_PLUGIN` and its name.
ConnectorKey = tuple[pb.Connector.ValueType, str]

_CONNECTORS = {
    name.removeprefix("CONNECTOR_").lower().replace("_", "-"): value
    for name, value in pb.Connector.items()
    if value not in (pb.CONNECTOR_UNSPECIFIED, pb.CONNECTOR_PLUGIN)
}
_INTEGRITIES = {
    pb.INTEGRITY_XXH3_64: Integrity.CHECKSUMS,
    pb.INTEGRITY_FENCE: Integrity.FENCE,
    pb.INTEGRITY_BY_CONNECTOR: Integrity.BY_CONNECTOR,
}
_INTEGRITY_VALUES = {integrity: value for value, integrity in _INTEGRITIES.items()}

_Source = prefill_pb2.PrefixSource | prefill_pb2.EncoderSource


def lease_id_of(raw: bytes) -> bytes:
    if len(raw) != LEASE_ID_BYTES:
        raise InvalidArgumentError("lease_id", f"has {len(raw)} bytes; must have {LEASE_ID_BYTES}")
    return raw


def handle_of(message: pb.KvHandle) -> Handle:
    if message.version != HANDLE_VERSION:
        raise FailedPreconditionError(
            f"the handle's version is {message.version}, this worker's is {HANDLE_VERSION}"
        )
    return Handle(
        source_worker=message.source_worker,
        source_endpoint=message.source_endpoint,
        source_epoch=message.source_epoch,
        lease_id=lease_id_of(message.lease_id),
        pairing=Pairing(message.baton_version, message.fingerprint, layouts_of(message.layouts)),
        num_tokens=message.num_tokens,
        block_hashes=hashes_of(message.block_hashes, "handle.block_hashes"),
        integrity=integrity_of(message.integrity),
        tenant=message.tenant,
    )


def handle_of_source(source: _Source, pairing: Pairing, num_tokens: int, tenant: str) -> Handle:
    """Returns the handle of a source that a request names.

    Args:
        pairing: the claimant's own; the source itself checks it before it sends blocks.
    """
    return Handle(
        source_worker=source.worker,
        source_endpoint=source.endpoint,
        source_epoch=source.epoch,
        lease_id=source.lease_id,
        pairing=pairing,
        num_tokens=num_tokens,
        block_hashes=(),
        tenant=tenant,
    )


def integrity_of(value: int) -> Integrity:
    if value not in _INTEGRITIES:
        known = ", ".join(f"{v} ({pb.Integrity.Name(v)})" for v in _INTEGRITIES)
        raise FailedPreconditionError(
            f"the handle asks for integrity {value}, this worker knows {known}"
        )
    return _INTEGRITIES[pb.Integrity.ValueType(value)]


def connector_key(name: str) -> ConnectorKey:
    """Returns the connector `name`, as messages have it."""
    value = _CONNECTORS.get(name)
    return (pb.CONNECTOR_PLUGIN, name) if value is None else (value, "")


def requested_connector(request: pb.FetchRequest) -> ConnectorKey:
    """Returns the connector that a Fetch asks for, which may be unknown here."""
    if request.connector == pb.CONNECTOR_PLUGIN:
        return request.connector, request.plugin
    return request.connector or pb.CONNECTOR_GRPC, ""


def fetch_request(
    handle: Handle,
    claimant: str,
    own: Pairing,
    num_held: int,
    connector: str,
    integrity: Integrity,
) -> pb.FetchRequest:
    """Returns the request of a Fetch by the connector of that name."""
    value, plugin = connector_key(connector)
    return pb.FetchRequest(
        tenant=handle.tenant,
        connector=value,
        plugin=plugin,
        integrity=_INTEGRITY_VALUES[integrity],
        lease_id=handle.lease_id,
        source_epoch=handle.source_epoch,
        claimant=claimant,
        baton_version=own.version,
        fingerprint=own.fingerprint,
        layouts=layouts_to_messages(own.layouts),
        num_held_blocks=num_held,
    )


def first_token_to_message(token: FirstToken) -> prefill_pb2.FirstToken:
    """Returns the message of the only sequence's token; the caller sets a finish reason."""
    logprobs = token.logprobs
    return prefill_pb2.FirstToken(
        sequence_index=0,
        position=token.position,
        token_id=token.token_id,
        logprob=None if logprobs is None else logprobs.logprob,
        top_logprobs=(
            top_logprobs_to_message(logprobs) if logprobs and logprobs.top_token_ids else None
        ),
    )


def first_token_of(message: prefill_pb2.PrefillResult) -> FirstToken | None:
    """Returns the token, if any. Raises `FailedPreconditionError` for several sequences."""
    if not message.first_tokens:
        return None
    if len(message.first_tokens) > 1:
        raise FailedPreconditionError(
            f"the prefill brought {len(message.first_tokens)} sequences; this worker takes one"
        )
    token = message.first_tokens[0]
    if not token.HasField("logprob"):
        return FirstToken(token.position, token.token_id)
    top = token.top_logprobs
    logprobs = TokenLogprobs(token.logprob, tuple(top.token_ids), tuple(top.logprobs))
    return FirstToken(token.position, token.token_id, logprobs)


class _Claiming(Protocol):
    """Message that names a lease and its claimant."""

    @property
    def lease_id(self) -> bytes: ...
    @property
    def claimant(self) -> str: ...
    @property
    def tenant(self) -> str: ...


def claim_of(request: _Claiming) -> Claim:
    lease_id = lease_id_of(request.lease_id)
    if not request.claimant:  # a Prefill without a decode worker opens a lease without a claimant
        raise InvalidArgumentError("claimant", "is empty; must be the id of a worker")
    return Claim(lease_id, request.claimant, request.tenant)
