"""Byte budget of the images that a router holds: of one request, and of all in flight."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from baton.errors import BatonError, InvalidArgumentError, OverloadedError
from baton.fairness.fair_bound import FairBound
from baton.serving.grpc.channels import MAX_ENCODER_INPUT_BYTES
from baton_router.call.request import Request

MAX_HELD_BYTES = 512 * 2**20

_RETRY_SECONDS = 1.0


Displace = Callable[[Request, BatonError], bool]
"""Ends a request with an error, if it waits for its admission; returns whether it did."""


@dataclass(frozen=True, slots=True, eq=False)
class _Reservation:
    request: Request
    num_bytes: int
    displace: Displace


class ImageBudget:
    """Byte budget of preprocessed images, which a request holds until its end.

    Attributes:
        max_held_bytes: maximum of the bytes held; a request alone may hold more.
        num_rejected: requests that found no room, or gave way to another tenant's.
    """

    def __init__(
        self,
        max_request_bytes: int = MAX_ENCODER_INPUT_BYTES,
        max_held_bytes: int = MAX_HELD_BYTES,
    ) -> None:
        self.num_rejected = 0
        self.max_held_bytes = max_held_bytes
        self._max_request_bytes = max_request_bytes
        self._held = FairBound(max_held_bytes)
        self._reservations: dict[_Reservation, None] = {}  # by age

    @property
    def num_bytes(self) -> int:
        """Bytes held now."""
        return self._held.total

    def check(self, request: Request) -> int:
        """Returns the bytes of a request's images. Raises `InvalidArgumentError` for more than
        workers take."""
        tensors = (data for each in request.encoder_inputs for data in each.tensors.values())
        num_bytes = sum(len(tensor.data) for tensor in tensors)
        if num_bytes > self._max_request_bytes:
            raise InvalidArgumentError(
                "images",
                f"have {num_bytes} bytes after preprocessing; expected at most "
                f"{self._max_request_bytes}. Send fewer or smaller ones, or raise "
                "--max-encoder-input-bytes of routers and workers.",
            )
        return num_bytes

    def reserve(self, request: Request, displace: Displace) -> Callable[[object], None]:
        """Reserves the bytes of a request's images, and returns what releases them. Raises as
        `check`, and `OverloadedError` if other requests leave no room: those that wait of the
        tenant with the most give way, by their `displace`, the newest first."""
        num_bytes, tenant = self.check(request), request.tenant.name
        while self._held.total:
            victim = self._held.victim_for(tenant, num_bytes)
            if victim is None:
                break
            error = self._overload(num_bytes)
            self.num_rejected += 1
            if victim == tenant or not self._make_room(victim, error):
                raise error
        reservation = _Reservation(request, num_bytes, displace)
        self._reservations[reservation] = None
        self._held.add(tenant, num_bytes)
        return partial(self._release, reservation)

    def _make_room(self, victim: str, error: OverloadedError) -> bool:
        for each in reversed(self._reservations):
            if each.request.tenant.name == victim and each.displace(each.request, error):
                self._release(each)
                return True
        return False

    def _overload(self, num_bytes: int) -> OverloadedError:
        return OverloadedError(
            f"requests in flight hold {self.num_bytes} bytes of images; expected at most "
            f"{self.max_held_bytes} with the {num_bytes} of one more. Retry later, or raise "
            "--encoder-input-budget-bytes.",
            _RETRY_SECONDS,
            reason="image_budget",
        )

    def _release(self, reservation: _Reservation, _outcome: object = None) -> None:
        if reservation in self._reservations:
            del self._reservations[reservation]
            self._held.remove(reservation.request.tenant.name, reservation.num_bytes)
