"""Byte budget of the images that a router holds: of one request, and of all in flight."""

from collections.abc import Callable
from functools import partial

from baton.errors import InvalidArgumentError, OverloadedError
from baton.serving.grpc.channels import MAX_ENCODER_INPUT_BYTES
from baton_router.call.request import Request

MAX_HELD_BYTES = 512 * 2**20

_RETRY_SECONDS = 1.0


class ImageBudget:
    """Byte budget of preprocessed images, which a request holds until its end.

    Attributes:
        num_bytes: bytes held now.
        max_held_bytes: maximum of them; a request alone may hold more.
        num_rejected: requests that found no room.
    """

    def __init__(
        self,
        max_request_bytes: int = MAX_ENCODER_INPUT_BYTES,
        max_held_bytes: int = MAX_HELD_BYTES,
    ) -> None:
        self.num_bytes = 0
        self.num_rejected = 0
        self.max_held_bytes = max_held_bytes
        self._max_request_bytes = max_request_bytes

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

    def reserve(self, request: Request) -> Callable[[object], None]:
        """Reserves the bytes of a request's images, and returns what releases them. Raises as
        `check`, and `OverloadedError` if other requests leave no room."""
        num_bytes = self.check(request)
        if self.num_bytes and self.num_bytes + num_bytes > self.max_held_bytes:
            self.num_rejected += 1
            raise OverloadedError(
                f"requests in flight hold {self.num_bytes} bytes of images; expected at most "
                f"{self.max_held_bytes} with the {num_bytes} of this one. Retry later, or raise "
                "--encoder-input-budget-bytes.",
                _RETRY_SECONDS,
                reason="image_budget",
            )
        self.num_bytes += num_bytes
        return partial(self._release, num_bytes)

    def _release(self, num_bytes: int, _outcome: object) -> None:
        self.num_bytes -= num_bytes
