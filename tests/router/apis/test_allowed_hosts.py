"""Host headers, by requests to the HTTP front of a router."""

import httpx
import pytest

from baton_router.apis.edge.allowed_hosts import AllowedHosts, allowed_hosts
from baton_router.apis.edge.middleware import Failures


async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})


async def status_for(host: str, setting: str | None, listens_on: str) -> int:
    served = Failures(AllowedHosts(app, allowed_hosts(setting, listens_on)))
    transport = httpx.ASGITransport(served)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        response = await client.get("/", headers={"host": host})
    if response.status_code != 200:
        assert response.json()["error"]["type"] == "invalid_request_error"
    return response.status_code


LOOPBACK = ["localhost", "localhost:8000", "LocalHost:1", "127.0.0.1:8000", "[::1]:8000", "[::1]"]
FOREIGN = [
    *("evil.example", "evil.example:8000", "localhost.evil.example", "evil.localhost"),
    *("127.0.0.1.evil.example", "localhost@evil.example", "", "[::1", "::1"),
]


@pytest.mark.parametrize("listens_on", ["127.0.0.1", "::1", "localhost"])
@pytest.mark.parametrize("host", LOOPBACK)
async def test_router_on_loopback_serves_loopback_hosts(host, listens_on):
    assert await status_for(host, None, listens_on) == 200


@pytest.mark.parametrize("host", FOREIGN)
async def test_router_on_loopback_rejects_other_hosts(host):
    assert await status_for(host, None, "127.0.0.1") == 403


@pytest.mark.parametrize("host", ["localhost", "evil.example", "10.0.0.7:8000"])
async def test_router_beyond_loopback_serves_any_host(host):
    assert await status_for(host, None, "0.0.0.0") == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *[("a.example", 200), ("A.example:80", 200), ("x.b.example", 200), ("a.example.", 200)],
        *[("b.example", 403), ("xb.example", 403), ("localhost", 403), ("x.a.example", 403)],
    ],
)
@pytest.mark.parametrize("listens_on", ["127.0.0.1", "0.0.0.0"])
async def test_router_serves_hosts_of_its_setting(host, status, listens_on):
    assert await status_for(host, "a.example, *.B.example", listens_on) == status


async def test_router_on_loopback_serves_any_host_if_told():
    assert await status_for("evil.example", "*", "127.0.0.1") == 200
