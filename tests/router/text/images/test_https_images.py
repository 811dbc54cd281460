"""Images by https URL: certificates and addresses, from real servers on loopback."""

import ssl
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from itertools import count
from pathlib import Path

import pytest

from baton.cli.certs import Authority, write
from baton_router.text.images.image_fetch import AllowedHosts, FetchError, ImageFetcher
from tests.support.router.web_site import BODY, Site, redirect, running

HOST = "images.example.org"
DAY = timedelta(days=1)
MISMATCH = f"Hostname mismatch, certificate is not valid for '{HOST}'."


class Servers:
    """TLS of servers whose certificates one authority has issued.

    Attributes:
        ca: file of the authority's certificate.
        names: server names (SNI) that clients have sent.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = count(1)
        self._authority = Authority()
        write(folder, {"ca": self._authority.own})
        self.ca = folder / "ca.pem"
        self.names: list[str | None] = []

    def tls(self, host: str = HOST, **validity: timedelta) -> ssl.SSLContext:
        """Returns the context of a server with a new certificate for a host."""
        issued = self._authority.issue("router", hosts=[host], **validity)
        cert, key = write(self._folder / str(next(self._numbers)), {"server": issued})
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(cert, key)
        context.sni_callback = lambda _socket, name, _context: self.names.append(name)
        return context


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Servers:
    """Servers whose authority is trusted as an operator has it trusted."""
    made = Servers(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(made.ca))
    return made


@pytest.fixture
async def site(servers: Servers) -> AsyncIterator[Site]:
    async with running(tls=servers.tls()) as made:
        yield made


async def loopback(_host: str, _port: int) -> Sequence[str]:
    return ["127.0.0.1"]


def fetcher_of(*patterns: str) -> ImageFetcher:
    hosts = AllowedHosts(patterns, ["127.0.0.1/32"])
    return ImageFetcher(hosts, 1000, 60.0, resolve=loopback)


async def refusal(fetcher: ImageFetcher, url: str) -> str:
    with pytest.raises(FetchError) as caught:
        await fetcher.fetch(url)
    return str(caught.value)


async def test_fetcher_trusts_authority_of_environment(servers, site):
    assert await fetcher_of(HOST).fetch(site.url("/a.png", HOST)) == BODY
    assert servers.names == [HOST]
    assert f"host: {HOST}:{site.port}" in site.heads[0].lower()


async def test_fetcher_refuses_unknown_authority(site, monkeypatch):
    monkeypatch.delenv("SSL_CERT_FILE")
    said = await refusal(fetcher_of(HOST), site.url("/a.png", HOST))
    assert said == "has a certificate that is not valid: unable to get local issuer certificate"
    assert not site.heads


@pytest.mark.parametrize(
    ("host", "validity", "reason"),
    [
        ("other.example.org", {}, MISMATCH),
        ("127.0.0.1", {}, MISMATCH),
        (HOST, {"begins_in": -2 * DAY, "lifetime": -DAY}, "certificate has expired"),
        (HOST, {"begins_in": DAY, "lifetime": 2 * DAY}, "certificate is not yet valid"),
    ],
    ids=["other host", "address alone", "expired", "not yet"],
)
async def test_fetcher_refuses_invalid_certificate(servers, host, validity, reason):
    async with running(tls=servers.tls(host, **validity)) as site:
        said = await refusal(fetcher_of("*"), site.url("/a.png", HOST))
        assert said == f"has a certificate that is not valid: {reason}"
        assert not site.heads


async def test_fetcher_checks_certificate_of_address(servers):
    async with running(tls=servers.tls("127.0.0.1")) as site:
        assert await fetcher_of("*").fetch(site.url("/a.png")) == BODY
    async with running(tls=servers.tls()) as site:
        said = await refusal(fetcher_of("*"), site.url("/a.png"))
        assert "certificate is not valid for '127.0.0.1'" in said


@pytest.mark.parametrize("is_first_secure", [True, False])
async def test_fetcher_follows_redirects_between_schemes(servers, is_first_secure):
    contexts = [servers.tls(), None]
    first_tls, second_tls = contexts if is_first_secure else contexts[::-1]
    async with running(tls=first_tls) as first, running(tls=second_tls) as second:
        first.answers["/r"] = redirect(second.url("/a.png", HOST))
        first.answers["/elsewhere"] = redirect(second.url("/a.png", "example.net"))
        assert await fetcher_of(HOST).fetch(first.url("/r", HOST)) == BODY
        said = await refusal(fetcher_of(HOST), first.url("/elsewhere", HOST))
        assert "host 'example.net'" in said
        assert second.num_connections == 1


async def test_fetcher_checks_certificate_after_redirect(servers):
    async with running() as first, running(tls=servers.tls("other.example.org")) as second:
        first.answers["/r"] = redirect(second.url("/a.png", HOST))
        assert "Hostname mismatch" in await refusal(fetcher_of("*"), first.url("/r", HOST))
        assert not second.heads


async def test_fetcher_checks_address_after_redirect(site):
    async with running("127.0.0.2") as inner:
        site.answers["/r"] = redirect(f"https://127.0.0.2:{inner.port}/a.png")

        async def literal(host: str, _port: int) -> Sequence[str]:
            return ["127.0.0.1" if host == HOST else host]

        fetcher = ImageFetcher(AllowedHosts(["*"], ["127.0.0.1/32"]), 1000, 60.0, resolve=literal)
        assert "not public" in await refusal(fetcher, site.url("/r", HOST))
        assert inner.num_connections == 0


async def test_fetcher_keeps_address_that_it_checked(servers, site):
    answers = iter([["127.0.0.1"], ["127.0.0.2"]])

    async def rebind(_host: str, _port: int) -> Sequence[str]:
        return next(answers)

    async with running("127.0.0.2", site.port) as inner:
        fetcher = ImageFetcher(AllowedHosts([HOST], ["127.0.0.1/32"]), 1000, 60.0, resolve=rebind)
        url = site.url("/a.png", HOST)
        assert await fetcher.fetch(url) == BODY
        assert "not public" in await refusal(fetcher, url)
        assert (servers.names, inner.num_connections) == ([HOST], 0)
