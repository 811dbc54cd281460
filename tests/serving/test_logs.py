import asyncio
import json
import logging
import sys

import pytest

from baton.serving.logs import HumanFormatter, JsonFormatter, configure_logging, request_logged_as


def record(message: str, exc_info=None) -> logging.LogRecord:
    return logging.LogRecord("baton.x", logging.INFO, __file__, 1, message, (), exc_info)


@pytest.fixture
def _restored_logging():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_human_line_says_when_what_who_and_for_which_request():
    formatter = HumanFormatter("router")
    with request_logged_as("r-1"):
        line = formatter.format(record("hello"))
    assert line.endswith("INFO router [r-1] baton.x: hello")
    assert formatter.format(record("hello")).endswith("INFO router baton.x: hello")


def test_a_json_line_is_one_object_with_the_traceback_inside():
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


async def test_each_task_logs_its_own_request():
    formatter = JsonFormatter("router")

    async def handle(request_id: str) -> str:
        with request_logged_as(request_id):
            await asyncio.sleep(0.001)
            return json.loads(formatter.format(record("x")))["request_id"]

    assert await asyncio.gather(handle("a"), handle("b")) == ["a", "b"]


@pytest.mark.usefixtures("_restored_logging")
def test_configured_logging_goes_to_stderr_from_the_level_on(capsys):
    configure_logging("WARNING", "json", "prefill")
    logging.getLogger("baton.y").info("quiet")
    logging.getLogger("baton.y").warning("loud %d", 3)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [json.loads(line)["message"] for line in captured.err.splitlines()] == ["loud 3"]
