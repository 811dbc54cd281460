"""Budget of the images of requests in flight, and the tenants that share it."""

import pytest

from baton.errors import BatonError, OverloadedError
from baton.models.images.encoder_input import EncoderInput, TensorData
from baton.sampling import SamplingParams
from baton.serving.tenant import Tenant
from baton_router.call.request import Request
from baton_router.routing.admission.image_budget import ImageBudget

SIZE = 100


def request(name: str) -> Request:
    """Returns a request with an image, of the tenant whose letter its name begins with."""
    data = {"pixel_values": TensorData("uint8", (SIZE,), bytes(SIZE))}
    images = (EncoderInput(b"i" * 16, 0, 1, data),)
    tenant = Tenant(name[0])
    return Request(name, (1,), SamplingParams(), tenant=tenant, encoder_inputs=images)


class Held:
    """Requests that hold bytes of a budget, of which some wait for admission."""

    def __init__(self, max_requests: int) -> None:
        self.budget = ImageBudget(max_held_bytes=max_requests * SIZE)
        self.waiting: set[str] = set()
        self.displaced: list[str] = []

    def reserve(self, *names: str, waits: bool = True) -> None:
        for name in names:
            self.budget.reserve(request(name), self.displace)
            if waits:
                self.waiting.add(name)

    def displace(self, request: Request, _error: BatonError) -> bool:
        if request.request_id not in self.waiting:
            return False
        self.waiting.remove(request.request_id)
        self.displaced.append(request.request_id)
        return True


def test_budget_displaces_newest_of_largest_tenant():
    held = Held(4)
    held.reserve("a0", "a1", "a2", "a3", "b0")
    assert held.displaced == ["a3"]
    held.reserve("b1")
    assert held.displaced == ["a3", "a2"]
    with pytest.raises(OverloadedError, match="hold 400 bytes of images; expected at most 400"):
        held.reserve("b2")
    assert held.displaced == ["a3", "a2"]
    assert (held.budget.num_bytes, held.budget.num_rejected) == (4 * SIZE, 3)


def test_budget_displaces_no_request_that_runs():
    held = Held(3)
    held.reserve("a0", waits=False)
    held.reserve("a1")
    held.reserve("a2", waits=False)
    held.reserve("b0")
    assert held.displaced == ["a1"]
    with pytest.raises(OverloadedError):
        held.reserve("c0")
    assert held.budget.num_bytes == 3 * SIZE


def test_budget_releases_bytes_of_displaced_request_once():
    held = Held(2)
    releases = [held.budget.reserve(request(name), held.displace) for name in ("a0", "a1")]
    held.waiting.add("a1")
    held.reserve("b0")
    assert held.displaced == ["a1"]
    for release in releases:
        release(None)
    assert held.budget.num_bytes == SIZE
