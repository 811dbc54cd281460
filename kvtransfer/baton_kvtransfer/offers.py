"""Transports that a source offers, as messages and as plain data."""

from dataclasses import asdict, dataclass

from baton.v1 import kv_transfer_pb2 as pb
from baton_kvtransfer.connectors.cuda_ipc.memory_handles import IpcOffer, IpcRegion
from baton_kvtransfer.connectors.nixl.agent import NixlOffer, Region
from baton_kvtransfer.connectors.shm.unix_peer import HandleEndpoint

_NOT_OFFERED = "the other worker does not offer it"


@dataclass(frozen=True, slots=True)
class PluginOffer:
    """Offer of a connector that a package adds: its name, and what a claimant needs to attach."""

    plugin: str
    metadata: bytes


@dataclass(frozen=True, slots=True)
class Description:
    """Transports of a source; for each that it lacks, the reason.

    Attributes:
        epoch: incarnation of the source.
        shm: socket that passes the descriptors of its shared memory, on one host.
        nixl: its NIXL agent.
        ipc: CUDA IPC handles of its GPU memory.
        plugin: connector that a package adds.
    """

    epoch: int
    shm: HandleEndpoint | str = _NOT_OFFERED
    nixl: NixlOffer | str = _NOT_OFFERED
    ipc: IpcOffer | str = _NOT_OFFERED
    plugin: PluginOffer | str = _NOT_OFFERED


def description_to_message(description: Description) -> pb.DescribeResponse:
    offers = [
        pb.KvOffer(connector=pb.CONNECTOR_GRPC),
        _offer(pb.CONNECTOR_SHM, description.shm),
        _offer(pb.CONNECTOR_NIXL, description.nixl),
        _offer(pb.CONNECTOR_CUDA_IPC, description.ipc),
        _offer(pb.CONNECTOR_PLUGIN, description.plugin),
    ]
    return pb.DescribeResponse(epoch=description.epoch, offers=offers)


def description_of(message: pb.DescribeResponse) -> Description:
    """Returns the message as plain data; ignores offers of connectors that it does not know."""
    shm: HandleEndpoint | str = _NOT_OFFERED
    nixl: NixlOffer | str = _NOT_OFFERED
    ipc: IpcOffer | str = _NOT_OFFERED
    plugin: PluginOffer | str = _NOT_OFFERED
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
            case pb.CONNECTOR_PLUGIN:
                plugin = offer.problem or PluginOffer(offer.plugin, offer.metadata)
    return Description(message.epoch, shm, nixl, ipc, plugin)


def _offer(
    connector: pb.Connector.ValueType,
    offered: HandleEndpoint | NixlOffer | IpcOffer | PluginOffer | str,
) -> pb.KvOffer:
    """Returns a message with the fields of `offered`; of its regions, `num_blocks` stands apart."""
    if isinstance(offered, str):
        return pb.KvOffer(connector=connector, problem=offered)
    fields = asdict(offered)
    if "regions" in fields:
        fields["num_blocks"] = [region.pop("num_blocks") for region in fields["regions"]]
    return pb.KvOffer(connector=connector, **fields)


def _region(message: pb.KvRegion, num_blocks: int) -> Region:
    device = message.device if message.HasField("device") else None
    return Region(message.address, device, num_blocks)
