"""Types of the public APIs, by which tests validate every answer of a front."""

from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from tests.router.apis.test_streams import BODIES
from tests.support.router.api_types import Checked
from tests.support.router.front import front_of
from tests.support.router.written import writing

MODEL = (b'"model":', b'"other":')  # a field that is missing, and one that is not known


@pytest.mark.parametrize(
    ("path", "stream", "fault"),
    [
        *[(path, stream, MODEL) for path in BODIES for stream in (False, True)],
        ("/v1/responses", True, (b'"content_index":0', b'"content_index":"0"')),
        ("/v1/responses", False, (b'"error":null', b'"errors":null')),
        ("/v1/responses", True, (b'"sequence_number":1', b'"sequence_number":9')),
        ("/v1/messages", True, (b'"index":0', b'"index":null')),
        ("/v1/completions", False, (b'"finish_reason":"stop"', b'"finish_reason":null')),
    ],
)
async def test_answer_of_another_form_is_refused(path, stream, fault):
    async with front_of(*writing("It rains.", 1)) as front:
        answer = await front.post(path, json={"model": "tiny", "stream": stream, **BODIES[path]})
    assert fault[0] in answer.content

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        headers = [(b"content-type", answer.headers["content-type"].encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer.content.replace(*fault)})

    transport = httpx.ASGITransport(Checked(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        with pytest.raises((ValidationError, AssertionError)):
            await client.post(path, json={})
