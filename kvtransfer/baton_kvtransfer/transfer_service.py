"""gRPC services that hand over blocks: the same calls and messages for different content."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from baton.v1 import kv_transfer_pb2 as pb
from baton.v1 import kv_transfer_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    Stub = pb_grpc.KvTransferAsyncStub | pb_grpc.EncoderTransferAsyncStub


@dataclass(frozen=True, slots=True)
class TransferService:
    """Service that hands over blocks of one content, each under a lease.

    Attributes:
        content: content of the blocks, as names of metrics and spans have it.
        noun: the content, as texts have it.
        name: full name of the service.
        stub: makes its generated stub.
    """

    content: str
    noun: str
    name: str
    stub: "Callable[[grpc.aio.Channel], Stub]"


def _name_of(service: str) -> str:
    return pb.DESCRIPTOR.services_by_name[service].full_name


KV = TransferService("kv", "KV", _name_of("KvTransfer"), pb_grpc.KvTransferStub)
ENCODER = TransferService(
    "encoder", "encoder outputs", _name_of("EncoderTransfer"), pb_grpc.EncoderTransferStub
)
