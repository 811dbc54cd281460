import asyncio
import json
import logging
import sys

import pytest
from opentelemetry.trace import NonRecordingSpan, SpanContext, use_span

from baton.rpc.attempt_id import attempt_id, request_id_of
from baton.serving.logs import HumanFormatter, JsonFormatter, configure_logging, name_request


def record(message: str, exc_info=None) -> logging.LogRecord:
    return logging.LogRecord("baton.x", logging.INFO, __file__, 1, message, (), exc_info)


@pytest.fixture
def _restored_logging():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


async def test_human_log_line_has_level_role_and_request():
    formatter = HumanFormatter("router")
    assert formatter.format(record("hello")).endswith("INFO router baton.x: hello")
    name_request("r-1")
    assert formatter.format(record("hello")).endswith("INFO router [r-1] baton.x: hello")


def test_json_log_line_is_one_object_with_traceback():
    try:
        raise ValueError("broken\nbadly")
    except ValueError:
        line = JsonFormatter("decode").format(record("hello", sys.exc_info()))
    assert "\n" not in line
    fields = json.loads(line)
    assert fields["role"] == "decode"
    assert fields["level"] == "INFO"
    assert fields["message"] == "hello"
    assert "ValueError: broken" in fields["exception"]
    assert "request_id" not in fields


async def test_logs_name_request_of_each_task():
    formatter = JsonFormatter("router")

    async def handle(request_id: str) -> str:
        name_request(request_id)
        await asyncio.sleep(0.001)
        return json.loads(formatter.format(record("x")))["request_id"]

    assert await asyncio.gather(handle("a"), handle("b")) == ["a", "b"]


async def test_log_line_names_trace_even_after_its_span():
    human, as_json = HumanFormatter("router"), JsonFormatter("router")
    context = SpanContext(0xABC, 0xDEF, is_remote=True)
    trace_id = "0" * 29 + "abc"
    with use_span(NonRecordingSpan(context)):
        assert json.loads(as_json.format(record("x")))["trace_id"] == trace_id
        name_request("r-1")
    assert json.loads(as_json.format(record("x")))["trace_id"] == trace_id
    assert human.format(record("x")).endswith(f"INFO router [r-1 {trace_id}] baton.x: x")


@pytest.mark.parametrize("request_id", ["r", "", "a.b", "line\nbreak", "a.0123456789ab"])
def test_attempt_id_yields_its_request_id(request_id):
    attempt = attempt_id(request_id, bytes(range(16)))
    assert attempt != request_id
    assert request_id_of(attempt) == request_id


def test_request_id_of_plain_name_is_that_name():
    assert request_id_of("another.client") == "another.client"


@pytest.mark.usefixtures("_restored_logging")
def test_logging_writes_to_stderr_from_level_on(capsys):
    configure_logging("WARNING", "json", "prefill")
    logging.getLogger("baton.y").info("quiet")
    logging.getLogger("baton.y").warning("loud %d", 3)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [json.loads(line)["message"] for line in captured.err.splitlines()] == ["loud 3"]
