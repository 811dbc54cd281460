"""Images by URL: what may be fetched, from real servers on loopback, and what may not."""

import asyncio
import ipaddress
from collections.abc import AsyncIterator, Sequence

import pytest

from baton_router.text.images.image_fetch import (
    MAX_REDIRECTS,
    AllowedHosts,
    FetchError,
    ImageFetcher,
    resolve,
)
from tests.support.router.web_site import BODY, Site, redirect, running, whole

LOOPBACK = ("127.0.0.0/8", "::1/128")
MAX_BYTES = 1000


async def endless(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while not writer.is_closing():
        writer.write(b"x" * 500)
        await writer.drain()


async def dripping(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while not writer.is_closing():
        writer.write(b"x")
        await asyncio.sleep(0.02)


async def silent(_writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running() as made:
        yield made


def fetcher_of(
    *patterns: str, networks: Sequence[str] = LOOPBACK, seconds: float = 60.0
) -> ImageFetcher:
    return ImageFetcher(AllowedHosts(patterns, networks), MAX_BYTES, seconds)


async def refusal(fetcher: ImageFetcher, url: str) -> str:
    with pytest.raises(FetchError) as caught:
        await fetcher.fetch(url)
    return str(caught.value)


async def test_fetcher_returns_the_body(site):
    assert await fetcher_of("127.0.0.1").fetch(site.url("/a.png")) == BODY
    assert "cookie" not in site.heads[0].lower()
    assert "authorization" not in site.heads[0].lower()


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0", "10.1.2.3", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.8.8.8",
        "168.63.129.16", "169.254.169.254", "172.16.0.1", "192.0.0.192", "192.168.1.1",
        "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "::", "::1", "::ffff:10.0.0.1",
        "::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe",
        "2001::1", "::127.0.0.1", "192.88.99.1", "2002:7f00:1::", "2002:a9fe:a9fe::", "fc00::1",
        "fd00:ec2::254", "fe80::1",
        "fec0::1", "ff02::1", "64:ff9b:1::a9fe:a9fe", "64:ff9b:1:a9fe:a9:fe00::",
        "::ffff:0:127.0.0.1", "::ffff:0:169.254.169.254", "5f00::1", "3ffe::1", "3fff::1",
        "3fff:fff::1", "2001:db8::1", "100::1", "4000::1", "200::7f00:1", "1fff::1",
    ],
)  # fmt: skip
def test_address_is_refused_that_is_not_public(address):
    assert not AllowedHosts(["*"]).may_reach(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "address",
    [
        "1.1.1.1", "93.184.215.14", "2606:4700::1111", "2001:4860:4860::8888", "2a00:1450:4001::1",
        "::ffff:1.1.1.1",
    ],
)  # fmt: skip
def test_address_is_reached_that_is_public(address):
    assert AllowedHosts(["*"]).may_reach(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "localhost", "[::1]",
             "[::ffff:127.0.0.1]", "0.0.0.0", "LOCALHOST"]
)  # fmt: skip
async def test_fetcher_reaches_no_loopback(site, host):
    said = await refusal(fetcher_of("*", networks=()), site.url("/a.png", host))
    assert "not public" in said
    assert site.num_connections == 0


@pytest.mark.parametrize(
    ("url", "part"),
    [
        ("file:///etc/passwd", "scheme 'file'"),
        ("FILE:///etc/passwd", "scheme 'file'"),
        ("ftp://127.0.0.1/a", "scheme 'ftp'"),
        ("gopher://127.0.0.1/a", "scheme 'gopher'"),
        ("//127.0.0.1/a", "scheme ''"),
        ("http:///a.png", "no host"),
        ("http://user:secret@127.0.0.1/a.png", "credentials"),
        ("http://user@127.0.0.1/a.png", "credentials"),
        ("http://127.0.0.1:0/a.png", "port 0"),
        ("http://127.0.0.1:99999/a.png", "no URL"),
        ("http://[::1/a.png", "no URL"),
        ("http://127.0.0.1\\@example.org/a", "credentials"),
        ("http://ex%61mple.org/a", "no host"),
        ("http://ⓔxample.org/a", "no host"),
        ("http://.com/a.png", "between dots"),
        ("http://./a.png", "between dots"),
        ("http://a..b/a.png", "between dots"),
        (f"http://{'a' * 64}.com/a.png", "between dots"),
        (f"http://{'a' * 63}.com./a.png", "does not allow"),
        ("http://127.0.0.1/a b", "ASCII"),
        ("http://127.0.0.1/" + "a" * 9000, "characters"),
        ("http://example.org/a.png", "does not allow"),
        ("http://127.0.0.1.example.org/a.png", "does not allow"),
    ],
)
async def test_fetcher_refuses_url(url, part):
    assert part in await refusal(fetcher_of("127.0.0.1"), url)


@pytest.mark.parametrize(
    ("pattern", "host", "allowed"),
    [
        ("example.org", "example.org", True),
        ("Example.org", "EXAMPLE.ORG.", True),
        ("example.org", "a.example.org", False),
        ("*.example.org", "a.b.example.org", True),
        ("*.example.org", "example.org", False),
        ("*.example.org", "evilexample.org", False),
        ("*", "anything", True),
    ],
)
def test_host_is_allowed_by_pattern(pattern, host, allowed):
    assert AllowedHosts([pattern]).allows(host) is allowed


async def test_fetcher_follows_redirects_up_to_a_bound(site):
    for at in range(MAX_REDIRECTS + 1):
        site.answers[f"/{at}"] = redirect(f"/{at + 1}")
    site.answers[f"/{MAX_REDIRECTS + 1}"] = whole("200 OK", BODY)
    fetcher = fetcher_of("127.0.0.1")
    assert await fetcher.fetch(site.url("/1")) == BODY
    assert "redirects too often" in await refusal(fetcher, site.url("/0"))


@pytest.mark.parametrize(
    ("location", "part"),
    [
        ("http://example.org/a.png", "does not allow"),
        ("file:///etc/passwd", "scheme 'file'"),
        ("http://u:p@127.0.0.1/a.png", "credentials"),
        ("http://[", "redirects to no URL"),
        ("//[::1/a.png", "redirects to no URL"),
        ("http://[::g]/a.png", "no URL"),
        ("http://.com/a.png", "between dots"),
        (f"//{'a' * 64}.com/a.png", "between dots"),
    ],
)
async def test_fetcher_checks_each_redirect(site, location, part):
    site.answers["/r"] = redirect(location)
    assert part in await refusal(fetcher_of("127.0.0.1"), site.url("/r"))


async def test_fetcher_checks_address_of_redirect(site):
    async with running("127.0.0.2") as inner:
        site.answers["/r"] = redirect(inner.url("/a.png", "127.0.0.2"))
        fetcher = fetcher_of("*", networks=["127.0.0.1/32"])
        assert "not public" in await refusal(fetcher, site.url("/r"))
        assert inner.num_connections == 0


async def test_fetcher_connects_to_the_address_it_checked(site):
    answers = iter([["127.0.0.1"], ["127.0.0.2"]])

    async def rebind(_host: str, _port: int) -> Sequence[str]:
        return next(answers)

    hosts = AllowedHosts(["images.example.org"], ["127.0.0.1/32"])
    async with running("127.0.0.2", site.port) as inner:
        fetcher = ImageFetcher(hosts, MAX_BYTES, 60.0, resolve=rebind)
        url = site.url("/a.png", "images.example.org")
        assert await fetcher.fetch(url) == BODY
        assert f"host: images.example.org:{site.port}" in site.heads[0].lower()
        assert "not public" in await refusal(fetcher, url)
        assert inner.num_connections == 0


async def test_fetcher_refuses_host_with_any_private_address(site):
    async def mixed(_host: str, _port: int) -> Sequence[str]:
        return ["1.1.1.1", "127.0.0.1"]

    fetcher = ImageFetcher(AllowedHosts(["*"]), MAX_BYTES, 60.0, resolve=mixed)
    assert "not public" in await refusal(fetcher, site.url("/a.png", "images.example.org"))


async def test_fetcher_bounds_size(site):
    site.answers["/endless"] = endless
    site.answers["/announced"] = whole("200 OK", b"x" * (MAX_BYTES + 1))
    for path in ("/endless", "/announced"):
        said = await refusal(fetcher_of("127.0.0.1"), site.url(path))
        assert f"more than {MAX_BYTES} bytes" in said


async def test_fetcher_bounds_time(site):
    site.answers |= {"/dripping": dripping, "/silent": silent}
    for path in ("/dripping", "/silent"):
        said = await refusal(fetcher_of("127.0.0.1", seconds=0.3), site.url(path))
        assert "within 0.3 s" in said


async def test_fetcher_tells_other_answers(site):
    site.answers["/missing"] = whole("404 Not Found")
    site.answers["/nowhere"] = whole("302 Found")
    fetcher = fetcher_of("*")
    assert "status 404" in await refusal(fetcher, site.url("/missing"))
    assert "without a location" in await refusal(fetcher, site.url("/nowhere"))
    assert "cannot be fetched" in await refusal(fetcher, "http://127.0.0.1:1/a.png")
    assert "cannot be fetched" in await refusal(fetcher, "http://no-such-host.invalid/a.png")


async def test_system_resolver_finds_loopback():
    assert set(await resolve("localhost", 80)) <= {"127.0.0.1", "::1"}
