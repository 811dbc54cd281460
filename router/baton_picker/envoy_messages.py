"""Messages of ext_proc and of the endpoint picker protocol, read and written.

request   filter metadata `envoy.lb.subset_hint`  x-gateway-destination-endpoint-subset
answer    header, and metadata `envoy.lb`         x-gateway-destination-endpoint
response  filter metadata `envoy.lb`              x-gateway-destination-endpoint-served
"""

import json
from collections.abc import Iterator

from baton.envoy import base_pb2, http_status_pb2
from baton.envoy import external_processor_pb2 as pb
from baton.errors import InvalidArgumentError
from baton_picker.addresses import Subset
from baton_picker.picker import Pick
from baton_router.apis.edge.errors import Failure

DESTINATION = "x-gateway-destination-endpoint"
_SUBSET = f"{DESTINATION}-subset"
_SERVED = f"{DESTINATION}-served"
_SUBSET_NAMESPACE = "envoy.lb.subset_hint"
_NAMESPACE = "envoy.lb"
_EXPLANATION_NAMESPACE = "baton"
_ATTRIBUTES = "envoy.filters.http.ext_proc"
_UPSTREAM = "upstream.address"
# Envoy refuses larger chunks, or delays them, at its default buffer limits.
_CHUNK_BYTES = 62_000


def headers_of(headers: base_pb2.HeaderMap) -> dict[str, str]:
    """Returns the headers by name, which Envoy sends in lower case; of equal names the last."""
    return {
        one.key.lower(): one.value or one.raw_value.decode(errors="replace")
        for one in headers.headers
    }


def subset_of(request: pb.ProcessingRequest) -> Subset | None:
    """Returns the endpoints to pick from; None without a subset hint. It is a list of addresses, or
    a text, as rules of Envoy make it of a header. Raises `InvalidArgumentError` for other forms: an
    Envoy that lets requests pass after a failure would send them out of the subset."""
    hint = request.metadata_context.filter_metadata.get(_SUBSET_NAMESPACE)
    if hint is None or _SUBSET not in hint.fields:
        return None
    given = hint.fields[_SUBSET]
    is_list = given.WhichOneof("kind") == "list_value"
    values = given.list_value.values if is_list else [given]
    if any(one.WhichOneof("kind") != "string_value" for one in values):
        raise InvalidArgumentError(_SUBSET, "is no text or list of texts; expected IP:PORT")
    return Subset.read((one.string_value for one in values), _SUBSET)


def served_by(response: pb.ProcessingRequest) -> str:
    """Returns the address of the model server that answered; empty if Envoy does not say. Takes the
    attribute `upstream.address` where the protocol's metadata is missing."""
    metadata = response.metadata_context.filter_metadata.get(_NAMESPACE)
    attributes = response.attributes.get(_ATTRIBUTES)
    for struct, key in ((metadata, _SERVED), (attributes, _UPSTREAM)):
        if struct is not None and key in struct.fields and struct.fields[key].string_value:
            return struct.fields[key].string_value
    return ""


def picked_headers(pick: Pick) -> pb.ProcessingResponse:
    """Returns the answer to request headers that names the picked endpoints."""
    response = pb.ProcessingResponse(request_headers=pb.HeadersResponse(response=_named(pick)))
    _add_metadata(response, pick)
    return response


def picked_body(pick: Pick) -> pb.ProcessingResponse:
    """Returns the answer to a buffered request body that names the picked endpoints."""
    response = pb.ProcessingResponse(request_body=pb.BodyResponse(response=_named(pick)))
    _add_metadata(response, pick)
    return response


def unchanged(request: pb.ProcessingRequest) -> pb.ProcessingResponse:
    """Returns the answer that leaves a message as it is."""
    match request.WhichOneof("request"):
        case "request_headers":
            return pb.ProcessingResponse(request_headers=pb.HeadersResponse())
        case "response_headers":
            return pb.ProcessingResponse(response_headers=pb.HeadersResponse())
        case "request_body":
            return pb.ProcessingResponse(request_body=pb.BodyResponse())
        case "response_body":
            return pb.ProcessingResponse(response_body=pb.BodyResponse())
        case "request_trailers":
            return pb.ProcessingResponse(request_trailers=pb.TrailersResponse())
        case _:
            return pb.ProcessingResponse(response_trailers=pb.TrailersResponse())


def streamed_request(body: bytes, *, is_end: bool) -> Iterator[pb.ProcessingResponse]:
    """Yields a request body in full-duplex mode, in chunks."""
    for chunk in _chunks(body, is_end=is_end):
        yield pb.ProcessingResponse(request_body=pb.BodyResponse(response=chunk))


def streamed_response(body: bytes, *, is_end: bool) -> Iterator[pb.ProcessingResponse]:
    """Yields a response body in full-duplex mode, in chunks."""
    for chunk in _chunks(body, is_end=is_end):
        yield pb.ProcessingResponse(response_body=pb.BodyResponse(response=chunk))


def refusal(failure: Failure) -> pb.ProcessingResponse:
    """Returns an answer to the client in place of a model server's, in OpenAI's format."""
    headers = {"content-type": "application/json", **failure.headers}
    return pb.ProcessingResponse(
        immediate_response=pb.ImmediateResponse(
            status=http_status_pb2.HttpStatus(code=failure.status),  # type: ignore[arg-type]
            headers=pb.HeaderMutation(set_headers=[_header(k, v) for k, v in headers.items()]),
            body=json.dumps(failure.body).encode(),
            details=f"baton_{failure.code}",
        )
    )


def _chunks(body: bytes, *, is_end: bool) -> Iterator[pb.CommonResponse]:
    starts = range(0, len(body), _CHUNK_BYTES) or range(1)
    for start in starts:
        chunk = body[start : start + _CHUNK_BYTES]
        is_last = is_end and start + _CHUNK_BYTES >= len(body)
        streamed = pb.StreamedBodyResponse(body=chunk, end_of_stream=is_last)
        yield pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=streamed))


def _named(pick: Pick) -> pb.CommonResponse:
    # A client may have set the header, too.
    mutation = pb.HeaderMutation(set_headers=[_header(DESTINATION, ",".join(pick.endpoints))])
    return pb.CommonResponse(header_mutation=mutation)


def _header(key: str, value: str) -> base_pb2.HeaderValueOption:
    return base_pb2.HeaderValueOption(
        header=base_pb2.HeaderValue(key=key, raw_value=value.encode()),
        append_action=base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )


def _add_metadata(response: pb.ProcessingResponse, pick: Pick) -> None:
    explanation: dict[str, str | float] = {"why": pick.why, "cached_tokens": pick.num_cached_tokens}
    response.dynamic_metadata.update(
        {
            _NAMESPACE: {DESTINATION: ",".join(pick.endpoints)},
            _EXPLANATION_NAMESPACE: explanation,
        }
    )
