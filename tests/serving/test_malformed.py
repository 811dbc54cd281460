import pytest

from baton.errors import InvalidArgumentError
from baton.serving.grpc.malformed import Malformed, tolerant
from baton.v1 import inference_pb2 as pb
from tests.support.failures import failure_of
from tests.support.serving.fakes import chunk, serving

parse = tolerant(pb.GenerateRequest.FromString)


def broken(**fields: object) -> bytes:
    """A request in which the text "good" is not UTF-8."""
    return pb.GenerateRequest(**fields).SerializeToString().replace(b"good", b"b\xffad")


def chat(*contents: str) -> pb.Chat:
    return pb.Chat(messages=[pb.ChatMessage(role="user", content=c) for c in contents])


def test_parse_returns_valid_message():
    request = pb.GenerateRequest(text="good")
    assert parse(request.SerializeToString()) == request


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (broken(model="good"), "model"),
        (broken(text="good"), "input.text"),
        (broken(chat=chat("a", "good")), "input.chat.messages[1].content"),
        (broken(sampling={"stop": ["a", "b", "good"]}), "sampling.stop[2]"),
        (b"\x0a\x7f", "request"),
        (b"\xff" * 20, "request"),
    ],
)
def test_parse_names_field_of_malformed_message(data, field):
    malformed = parse(data)
    assert isinstance(malformed, Malformed)
    assert malformed.error.field == field


def test_tolerant_leaves_other_parsers_alone():
    assert tolerant(bytes.decode) is bytes.decode


async def test_server_refuses_malformed_request_before_its_handler():
    reached = []

    async def generate(request, context):
        reached.append(request)
        yield chunk("a")

    async with serving(generate) as running:
        raw = running.channel.unary_stream("/baton.v1.Inference/Generate")
        error = await failure_of(raw(broken(text="good")).read())
    assert isinstance(error, InvalidArgumentError)
    assert (error.field, error.problem) == ("input.text", "is not valid UTF-8; text must be")
    assert reached == []


async def test_error_with_long_message_fits_header_in_any_script():
    async def generate(request, context):
        raise InvalidArgumentError("模" * 3000, "語" * 3000)
        yield

    async with serving(generate) as running:
        error = await failure_of(running.inference.Generate(pb.GenerateRequest()).read())
    assert isinstance(error, InvalidArgumentError)
    assert error.field.startswith("模")
    assert error.problem.endswith("…")
