"""Offers of a worker to claimants: one message for each of its connectors."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict

from baton.errors import FailedPreconditionError, UnavailableError
from baton.v1 import kv_transfer_pb2 as pb
from baton_kvtransfer.connector import Connector, Offer, Region
from baton_kvtransfer.transfer_messages import ConnectorKey, connector_key, requested_connector

_NOT_REQUESTED = pb.KvOffer(problem="it was not asked for")


class Offers:
    """Connectors of one worker's pools, and what each offers."""

    def __init__(self, connectors: Sequence[Connector]) -> None:
        self._connectors = {connector_key(each.name): each for each in connectors}
        self._offers: dict[ConnectorKey, pb.KvOffer] = {}

    async def open(self, requested: Collection[int] = ()) -> list[pb.KvOffer]:
        """Opens the pools to claimants; by connectors that are opened on request alone if their
        values are in `requested`. Returns all offers."""
        for key, connector in self._connectors.items():
            is_due = key[0] in requested if connector.is_on_request else key not in self._offers
            if is_due:
                self._offers[key] = await _message_of(connector)
        return list(self._offers.values())

    def connector(self, request: pb.FetchRequest) -> Connector:
        """Returns the connector that a Fetch asks for. Raises `FailedPreconditionError` if this
        worker does not know it, or does not offer it."""
        key = requested_connector(request)
        if key not in self._connectors:
            known = ", ".join(each.name for each in self._connectors.values())
            raise FailedPreconditionError(
                f"connector {key[1] or key[0]} was asked for; this worker knows {known}"
            )
        name = self._connectors[key].name
        problem = self._offers.get(key, _NOT_REQUESTED).problem
        if problem:
            raise FailedPreconditionError(f"blocks cannot be had by {name} here: {problem}")
        return self._connectors[key]


def offer_by(connector: Connector, offers: Iterable[pb.KvOffer]) -> Offer:
    """Returns the offer that `connector` attaches to. Raises `UnavailableError`, with the reason,
    if there is none."""
    value, plugin = connector_key(connector.name)
    alike = {offer.plugin: offer for offer in offers if offer.connector == value}
    if not alike and plugin:
        raise UnavailableError("the other worker was given no connector of a package")
    if not alike:
        raise UnavailableError("the other worker does not offer it")
    offer = alike.get(plugin) or next(iter(alike.values()))
    if offer.problem or offer.plugin != plugin:
        raise UnavailableError(offer.problem or f"the other worker has {offer.plugin}")
    return Offer(
        offer.address,
        offer.host,
        offer.metadata,
        tuple(offer.num_blocks),
        tuple(map(_region_of, offer.regions)),
    )


async def _message_of(connector: Connector) -> pb.KvOffer:
    value, plugin = connector_key(connector.name)
    try:
        fields = asdict(await connector.offer())
    except UnavailableError as error:
        fields = {"problem": str(error)}
    return pb.KvOffer(connector=value, plugin=plugin, **fields)


def _region_of(message: pb.KvRegion) -> Region:
    device = message.device if message.HasField("device") else None
    return Region(message.address, device, message.handle, message.offset, message.device_uuid)
