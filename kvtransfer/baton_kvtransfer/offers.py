"""Transports that a source offers, as messages and as plain data."""

from dataclasses import dataclass

from baton.v1 import kv_transfer_pb2 as pb
from baton_kvtransfer.connectors.cuda_ipc.memory_handles import IpcOffer, IpcRegion
from baton_kvtransfer.connectors.nixl.agent import NixlOffer, Region
from baton_kvtransfer.connectors.shm.unix_peer import HandleEndpoint

_NOT_OFFERED = "the other worker does not offer it"


@dataclass(frozen=True, slots=True)
class Description:
    """Transports of a source; for each that it lacks, the reason.

    Attributes:
        epoch: incarnation of the source.
        shm: socket that passes the descriptors of its shared memory, on one host.
        nixl: its NIXL agent.
        ipc: CUDA IPC handles of its GPU memory.
    """

    epoch: int
    shm: HandleEndpoint | str = _NOT_OFFERED
    nixl: NixlOffer | str = _NOT_OFFERED
    ipc: IpcOffer | str = _NOT_OFFERED


def description_to_message(description: Description) -> pb.DescribeResponse:
    offers = [
        pb.KvOffer(connector=pb.CONNECTOR_GRPC),
        _shm_offer(description.shm),
        _nixl_offer(description.nixl),
        _ipc_offer(description.ipc),
    ]
    return pb.DescribeResponse(epoch=description.epoch, offers=offers)


def description_of(message: pb.DescribeResponse) -> Description:
    """Returns the message as plain data; ignores offers of connectors that it does not know."""
    shm: HandleEndpoint | str = _NOT_OFFERED
    nixl: NixlOffer | str = _NOT_OFFERED
    ipc: IpcOffer | str = _NOT_OFFERED
    for offer in message.offers:
        counted = list(zip(offer.regions, offer.num_blocks, strict=False))
        match offer.connector:
            case pb.CONNECTOR_SHM:
                there = HandleEndpoint(offer.address, offer.host, tuple(offer.num_blocks))
                shm = offer.problem or there
            case pb.CONNECTOR_NIXL:
                regions = tuple(_region(region, count) for region, count in counted)
                nixl = offer.problem or NixlOffer(offer.metadata, regions)
            case pb.CONNECTOR_CUDA_IPC:
                places = tuple(
                    IpcRegion(region.handle, region.offset, region.device_uuid, count)
                    for region, count in counted
                )
                ipc = offer.problem or IpcOffer(offer.host, places)
    return Description(message.epoch, shm, nixl, ipc)


def _shm_offer(shm: HandleEndpoint | str) -> pb.KvOffer:
    if isinstance(shm, str):
        return pb.KvOffer(connector=pb.CONNECTOR_SHM, problem=shm)
    return pb.KvOffer(
        connector=pb.CONNECTOR_SHM,
        address=shm.address,
        host=shm.host,
        num_blocks=shm.num_blocks,
    )


def _nixl_offer(nixl: NixlOffer | str) -> pb.KvOffer:
    if isinstance(nixl, str):
        return pb.KvOffer(connector=pb.CONNECTOR_NIXL, problem=nixl)
    return pb.KvOffer(
        connector=pb.CONNECTOR_NIXL,
        metadata=nixl.metadata,
        num_blocks=[region.num_blocks for region in nixl.regions],
        regions=[
            pb.KvRegion(address=region.address, device=region.device) for region in nixl.regions
        ],
    )


def _ipc_offer(ipc: IpcOffer | str) -> pb.KvOffer:
    if isinstance(ipc, str):
        return pb.KvOffer(connector=pb.CONNECTOR_CUDA_IPC, problem=ipc)
    return pb.KvOffer(
        connector=pb.CONNECTOR_CUDA_IPC,
        host=ipc.host,
        num_blocks=[region.num_blocks for region in ipc.regions],
        regions=[
            pb.KvRegion(handle=region.handle, offset=region.offset, device_uuid=region.device_uuid)
            for region in ipc.regions
        ],
    )


def _region(message: pb.KvRegion, num_blocks: int) -> Region:
    device = message.device if message.HasField("device") else None
    return Region(message.address, device, num_blocks)
