"""Call of Envoy about one HTTP request: the ext_proc protocol, message by message.

    request body mode       endpoint picked          named in the answer to
    FULL_DUPLEX_STREAMED    at the end of the body   request headers, which wait for it
    BUFFERED (_PARTIAL)     by the body              request body
    STREAMED, NONE          by load alone            request headers

Without a protocol configuration in the first message, both body modes are full-duplex, which is
what the endpoint picker protocol requires of data planes. Knows no gRPC.
"""

import secrets
from collections.abc import Mapping
from typing import Any

from baton.envoy import external_processor_pb2 as pb
from baton.envoy.processing_mode_pb2 import ProcessingMode
from baton.errors import InvalidArgumentError, OverloadedError
from baton_picker import envoy_messages
from baton_picker.addresses import Subset
from baton_picker.held_bytes import HeldBytes
from baton_picker.picker import EndpointPicker, Pick
from baton_picker.prompt import NO_PROMPT, PickedPrompt, PromptReader
from baton_router.apis.edge.errors import BodyTooLargeError

_DUPLEX = ProcessingMode.FULL_DUPLEX_STREAMED
_BUFFERED = (ProcessingMode.BUFFERED, ProcessingMode.BUFFERED_PARTIAL)
_FAILED = range(500, 600)


class EnvoyCall:
    """Call of Envoy about one HTTP request, from its headers to `close`.

    Args:
        max_bytes: maximum bytes of its body.
    """

    def __init__(
        self, picker: EndpointPicker, reader: PromptReader, held: HeldBytes, max_bytes: int
    ) -> None:
        self._picker = picker
        self._reader = reader
        self._held = held
        self._max_bytes = max_bytes
        self._request_mode: Any = _DUPLEX
        self._response_mode: Any = _DUPLEX
        self._subset: Subset | None = None
        self._request_id = ""
        self._path = ""
        self._has_prompt = False
        self._has_begun = False
        self._is_request_over = False
        self._body = bytearray()
        self._pick: Pick | None = None

    @property
    def awaits_body(self) -> bool:
        """Whether the picker needs more of the request before it can pick."""
        return self._has_begun and self._pick is None

    def close(self) -> None:
        """Ends the exchange: the request is no load any more. Idempotent."""
        self._drop_body()
        if self._pick is not None:
            self._pick.close()

    async def answer(self, request: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
        """Returns the answers to a message.

        Raises:
            InvalidArgumentError: messages in a wrong order or form, or a body that is no JSON.
            BodyTooLargeError, OverloadedError, UnavailableError: as the client is told.
        """
        match request.WhichOneof("request"):
            case "request_headers":
                return await self._request_headers(request)
            case "request_body":
                return await self._request_body(request)
            case "request_trailers":
                return await self._request_trailers(request)
            case "response_headers":
                self._response_headers(request)
                return [envoy_messages.unchanged(request)]
            case "response_body":
                return self._response_body(request)
            case "response_trailers":
                self._end_response()
                return [envoy_messages.unchanged(request)]
        raise InvalidArgumentError("request", "is unset; expected one message of ext_proc")

    async def _request_headers(self, request: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
        if self._has_begun:
            raise InvalidArgumentError("request_headers", "came twice; expected them once")
        self._has_begun = True
        self._set_modes(request)
        self._subset = envoy_messages.subset_of(request)
        headers = envoy_messages.headers_of(request.request_headers.headers)
        self._request_id = headers.get("x-request-id", "")[:128] or secrets.token_hex(8)
        self._path = headers.get(":path", "")
        self._is_request_over = request.request_headers.end_of_stream
        self._has_prompt = _is_json(headers) and not self._is_request_over
        if self._has_prompt and self._request_mode in (_DUPLEX, *_BUFFERED):
            length = headers.get("content-length", "")
            if length.isdecimal() and int(length[:20]) > self._max_bytes:
                raise BodyTooLargeError(self._max_bytes)
            return [] if self._request_mode == _DUPLEX else [envoy_messages.unchanged(request)]
        return [envoy_messages.picked_headers(self._choose(NO_PROMPT))]

    def _set_modes(self, request: pb.ProcessingRequest) -> None:
        if request.HasField("protocol_config"):
            config = request.protocol_config
            self._request_mode = config.request_body_mode
            self._response_mode = config.response_body_mode
        if ProcessingMode.GRPC in (self._request_mode, self._response_mode):
            raise InvalidArgumentError(
                "protocol_config", "has body mode GRPC; expected FULL_DUPLEX_STREAMED or BUFFERED"
            )

    async def _request_body(self, request: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
        self._check_request_goes_on("request_body")
        body = request.request_body
        self._is_request_over = body.end_of_stream
        if self._request_mode == _DUPLEX:
            if self._pick is not None:
                return list(envoy_messages.streamed_request(body.body, is_end=body.end_of_stream))
            self._hold(body.body)
            return await self._pick_duplex(is_end=True) if body.end_of_stream else []
        if self._pick is not None:
            return [envoy_messages.unchanged(request)]
        self._hold(body.body)
        # A body over Envoy's buffer arrives in part, which is not JSON.
        is_whole = body.end_of_stream or self._request_mode == ProcessingMode.BUFFERED
        pick = self._choose(await self._prompt() if is_whole else NO_PROMPT)
        self._drop_body()
        return [envoy_messages.picked_body(pick)]

    async def _request_trailers(self, request: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
        self._check_request_goes_on("request_trailers")
        self._is_request_over = True
        if self._pick is None:
            answers = await self._pick_duplex(is_end=False)
            return [*answers, envoy_messages.unchanged(request)]
        return [envoy_messages.unchanged(request)]

    async def _pick_duplex(self, *, is_end: bool) -> list[pb.ProcessingResponse]:
        """Picks by the body held, and gives it back. `is_end`: no trailers follow."""
        headers = envoy_messages.picked_headers(self._choose(await self._prompt()))
        body = list(envoy_messages.streamed_request(bytes(self._body), is_end=is_end))
        self._drop_body()
        return [headers, *body]

    async def _prompt(self) -> PickedPrompt:
        if not self._body:
            return NO_PROMPT
        return await self._reader.read(bytes(self._body), self._path)

    def _choose(self, prompt: PickedPrompt) -> Pick:
        self._pick = self._picker.pick(self._request_id, prompt, self._subset)
        return self._pick

    def _check_request_goes_on(self, kind: str) -> None:
        if not self._has_begun:
            raise InvalidArgumentError(
                kind, "came first; expected request_headers. Set request_header_mode to SEND"
            )
        if self._is_request_over:
            raise InvalidArgumentError(kind, "came after the end of the request")

    def _hold(self, chunk: bytes) -> None:
        if len(self._body) + len(chunk) > self._max_bytes:
            raise BodyTooLargeError(self._max_bytes)
        if not self._held.take(len(chunk)):
            raise OverloadedError("the endpoint picker holds too many bytes of bodies; retry later")
        self._body += chunk

    def _drop_body(self) -> None:
        self._held.release(len(self._body))
        self._body = bytearray()

    def _response_headers(self, request: pb.ProcessingRequest) -> None:
        if self._pick is None:
            return
        status = envoy_messages.headers_of(request.response_headers.headers).get(":status", "")
        is_failure = status.isdecimal() and int(status[:3]) in _FAILED
        address = envoy_messages.served_by(request)
        if address:
            self._pick.served_by(address, is_failure=is_failure)
        elif is_failure:
            self._pick.failed()
        if request.response_headers.end_of_stream:
            self._end_response()

    def _response_body(self, request: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
        body = request.response_body
        if self._pick is not None:
            self._pick.answering()
        if body.end_of_stream:
            self._end_response()
        if self._response_mode == _DUPLEX:
            return list(envoy_messages.streamed_response(body.body, is_end=body.end_of_stream))
        return [envoy_messages.unchanged(request)]

    def _end_response(self) -> None:
        if self._pick is not None:
            self._pick.close()


def _is_json(headers: Mapping[str, str]) -> bool:
    """Whether a body is JSON that can be read as it is. Others are placed by load alone."""
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    return content_type == "application/json" and "content-encoding" not in headers
