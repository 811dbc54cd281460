"""Access log: a line of each call, whatever its end, and no text of a client."""

import json
from pathlib import Path

import httpx
import pytest

from baton.errors import FailedPreconditionError
from baton_router.routing.admission.quotas import Quota, Quotas
from baton_router.telemetry.access_log import AccessLog
from tests.support.router.front import routes_of
from tests.support.router.scripted import (
    answering,
    card,
    fleet_of,
)
from tests.support.waiting import until

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "a secret"}], "max_tokens": 2}
PATH = "/v1/chat/completions"


async def test_access_log_has_status_and_reason_of_each_call(tmp_path):
    path, quota = tmp_path / "log", Quota(requests_per_minute=3)
    log = AccessLog(str(path))
    workers = answering()
    async with fleet_of(*workers) as fleet:
        fleets, cards, quotas = {"tiny": fleet}, {"tiny": card()}, Quotas(default=quota)
        transport = httpx.ASGITransport(routes_of(fleets, cards, quotas, access_log=log).app())
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            await client.post(PATH, json=CHAT)
            await client.post(PATH, json={**CHAT, "stream": True})
            await client.post(PATH, json={**CHAT, "top_p": 3})
            await client.post(PATH, json=CHAT)
            await client.get("/a/secret/path")
            await client.get("/health")
    log.close()
    text = path.read_text()
    assert "secret" not in text
    lines = [json.loads(line) for line in text.splitlines()]
    assert [(line["method"], line["status"], line["reason"]) for line in lines] == [
        (f"POST {PATH}", 200, ""),
        (f"POST {PATH}", 200, ""),
        (f"POST {PATH}", 400, "invalid_argument"),
        (f"POST {PATH}", 429, "requests_per_minute"),
        ("GET unknown route", 404, ""),
    ]
    assert [line["num_output_tokens"] for line in lines] == [2, 2, 0, 0, 0]
    assert {line["tenant"] for line in lines} == {"default"}


async def test_access_log_continues_in_a_new_file_after_rotation(tmp_path):
    path = tmp_path / "log"
    log = AccessLog(str(path))
    log.write({"status": 1})
    await until(lambda: path.read_text() != "")
    path.rename(tmp_path / "log.1")
    log.write({"status": 2})
    log.close()
    assert json.loads((tmp_path / "log.1").read_text()) == {"status": 1}
    assert json.loads(path.read_text()) == {"status": 2}


def test_access_log_names_file_that_cannot_be_written():
    with pytest.raises(FailedPreconditionError, match="cannot write --access-log /none/log"):
        AccessLog(str(Path("/none/log")))
