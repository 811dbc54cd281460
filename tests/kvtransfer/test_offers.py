"""Offers: what a source says of its connectors, and what a claimant makes of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import FailedPreconditionError, UnavailableError
from baton.v1 import kv_transfer_pb2 as pb
from baton_kvtransfer.connector import Connector, Offer, Region
from baton_kvtransfer.connectors.grpc.connector import GrpcConnector
from baton_kvtransfer.offers import Offers, offer_by

COUNTS = st.integers(0, 2**64 - 1)
DEVICES = st.none() | st.integers(0, 2**32 - 1)
REGIONS = st.builds(Region, COUNTS, DEVICES, st.binary(), COUNTS, st.binary())
OFFERS = st.builds(
    Offer,
    st.text(),
    st.text(),
    st.binary(),
    st.lists(COUNTS).map(tuple),
    st.lists(REGIONS).map(tuple),
)


class OfferedConnector(Connector):
    """Connector that offers what it is given: an offer, or the reason for none."""

    def __init__(self, name: str, offered: Offer | str = "it is sealed") -> None:
        super().__init__(())
        self.name = name
        self.offered = offered

    async def offer(self) -> Offer:
        if isinstance(self.offered, str):
            raise UnavailableError(self.offered)
        return self.offered

    async def attach(self, offer):
        raise NotImplementedError


class RequestedConnector(OfferedConnector):
    """Connector that is opened on request."""

    is_on_request = True


@pytest.mark.parametrize("name", ["shm", "cuda-ipc", "fabric"])
@given(OFFERS)
async def test_offer_round_trips_through_message(name, offered):
    connector = OfferedConnector(name, offered)
    messages = await Offers([connector, GrpcConnector()]).open()
    sent = pb.DescribeResponse(offers=messages).SerializeToString()
    assert offer_by(connector, pb.DescribeResponse.FromString(sent).offers) == offered


@pytest.mark.parametrize(
    ("theirs", "own", "reason"),
    [
        (OfferedConnector("shm"), "shm", "it is sealed"),
        (OfferedConnector("shm"), "cuda-ipc", "does not offer it"),
        (OfferedConnector("shm"), "fabric", "was given no connector of a package"),
        (OfferedConnector("fabric"), "fabric", "it is sealed"),
        (OfferedConnector("web", Offer()), "fabric", "the other worker has web"),
        (RequestedConnector("nixl", Offer()), "nixl", "does not offer it"),
    ],
)
async def test_claimant_says_why_there_is_no_offer(theirs, own, reason):
    messages = await Offers([theirs]).open()
    with pytest.raises(UnavailableError, match=reason):
        offer_by(OfferedConnector(own), messages)


async def test_source_opens_connector_only_when_requested():
    connector = RequestedConnector("nixl", Offer(host="here"))
    offers = Offers([connector, GrpcConnector()])
    by_nixl = pb.FetchRequest(connector=pb.CONNECTOR_NIXL)
    await offers.open()
    with pytest.raises(FailedPreconditionError, match="by nixl here: it was not asked for"):
        offers.connector(by_nixl)
    assert offer_by(connector, await offers.open([pb.CONNECTOR_NIXL])).host == "here"
    assert offers.connector(by_nixl) is connector


async def test_source_refuses_connector_that_it_lacks_or_not_offers():
    fabric, sealed = OfferedConnector("fabric", Offer()), OfferedConnector("shm")
    offers = Offers([fabric, sealed, GrpcConnector()])
    await offers.open()
    refusals = {
        "web was asked for; this worker knows fabric, shm, grpc": (pb.CONNECTOR_PLUGIN, "web"),
        "connector shm was asked for": (pb.CONNECTOR_PLUGIN, "shm"),
        "connector 3 was asked for": (pb.CONNECTOR_NIXL, ""),
        "connector 99 was asked for": (99, ""),
        "by shm here: it is sealed": (pb.CONNECTOR_SHM, ""),
    }
    for reason, (value, plugin) in refusals.items():
        with pytest.raises(FailedPreconditionError, match=reason):
            offers.connector(pb.FetchRequest(connector=value, plugin=plugin))
    for value, plugin, name in ((5, "fabric", "fabric"), (0, "", "grpc"), (1, "web", "grpc")):
        request = pb.FetchRequest(connector=value, plugin=plugin)
        assert offers.connector(request).name == name
