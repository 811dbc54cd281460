from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cluster.redis.address import RedisAddress, Tls, has_secret, parse_address, with_password
from baton.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://host", RedisAddress("standalone", (("host", 6379),))),
        ("redis://host:1/3", RedisAddress("standalone", (("host", 1),), db=3)),
        ("redis://host:1?db=3", RedisAddress("standalone", (("host", 1),), db=3)),
        ("redis://[::1]:7/0", RedisAddress("standalone", (("::1", 7),))),
        ("redis://[::1]", RedisAddress("standalone", (("::1", 6379),))),
        ("redis://:pw@host", RedisAddress("standalone", (("host", 6379),), password="pw")),
        (
            "redis://me:p%40%2F@host",
            RedisAddress("standalone", (("host", 6379),), username="me", password="p@/"),
        ),
        ("unix:///run/redis.sock?db=2", RedisAddress("unix", path="/run/redis.sock", db=2)),
        (
            "redis+sentinel://a,b:2/mine/4?sentinel_username=s&sentinel_password=q",
            RedisAddress(
                "sentinel",
                (("a", 26379), ("b", 2)),
                service="mine",
                db=4,
                sentinel_username="s",
                sentinel_password="q",
            ),
        ),
        ("redis+cluster://a,b:2", RedisAddress("cluster", (("a", 6379), ("b", 2)))),
        (
            "redis+cluster://a?prefix=blue-2",
            RedisAddress("cluster", (("a", 6379),), prefix="blue-2:"),
        ),
        ("rediss+cluster://a/", RedisAddress("cluster", (("a", 6379),), tls=Tls())),
        (
            "rediss://a?ssl_check_hostname=false",
            RedisAddress("standalone", (("a", 6379),), tls=Tls(check_hostname=False)),
        ),
    ],
)
def test_parse_address_splits_a_url(url: str, expected: RedisAddress) -> None:
    assert parse_address(url) == expected


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("localhost:6379", "begins with none of redis://"),
        ("http://host", "begins with none of redis://"),
        ("redis://", "a host is missing"),
        ("redis+cluster://a,,b", "a host is missing"),
        ("redis://a,b", "several hosts are for redis+sentinel:// and redis+cluster://"),
        ("redis://a:x", "the port of host a is no number from 1 to 65535"),
        ("redis://a:70000", "the port of host a is no number"),
        ("redis://::1:6379", "written in brackets"),
        ("redis://a/one", "the database is no number"),
        ("redis://a/1/2", "too much is behind the host"),
        ("redis+sentinel://a:1", "the name of the service is missing"),
        ("redis+cluster://a/1", "no database but 0"),
        ("redis://a?ssl_ca_certs=x", "write rediss in place of redis"),
        ("rediss://a?ssl_ca_cert=x", "is ssl_ca_certs meant?"),
        ("redis://a?timeout=1", "the option timeout is not known here; known are db"),
        ("rediss://a?ssl_ca_certs=/no/such/file", "ssl_ca_certs cannot be used: No such file"),
        ("rediss://a?ssl_keyfile=x", "ssl_certfile is missing"),
        ("rediss://a?ssl_check_hostname=maybe", "neither true nor false"),
        ("redis://a?prefix=", "the prefix is not 1 to 64 letters"),
        ("redis://a?prefix={x}", "the prefix is not 1 to 64 letters"),
        ("unix://host/path", "a socket has no host"),
        ("unix://", "the path of the socket is missing"),
        ("redis://u:p/w@host", "in a user or a password, / is written %2F"),
        ("redis://u:p#w@host", "# %23"),
        ("redis://u:p\u2100w@host", "no URL"),
    ],
)
def test_parse_address_names_the_problem_of_a_url(url: str, problem: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_address(url)
    assert caught.value.field == "redis_url"
    assert problem in caught.value.problem


@given(
    st.sampled_from(["redis://", "rediss://", "redis+sentinel://", "redis+cluster://", "unix://"]),
    st.lists(st.sampled_from([*"/?#@:%,[]", "\u2100", "="]), max_size=3),
    st.sampled_from(["host:6379/0", "host:x/0", "a,b/mymaster", "host?ssl_what=1", "/sock"]),
)
def test_parse_address_leaks_no_password(scheme: str, odd: list[str], rest: str) -> None:
    """Whatever odd characters are in it, unescaped."""
    url = f"{scheme}user:{'SECRET'.join(['', *odd, ''])}SECRET@{rest}"
    try:
        said = repr(parse_address(url))
    except InvalidArgumentError as error:
        said = str(error)
    assert "SECRET" not in said


def test_has_secret_detects_passwords_in_a_url() -> None:
    assert has_secret("redis://:pw@host")
    assert has_secret("redis+sentinel://host/mine?sentinel_password=q")
    assert not has_secret("redis://host:6379/0")


@pytest.mark.parametrize(
    "url",
    ["redis://host", "rediss://me:old@[::1]:7/3", "unix://me@/run/redis.sock?db=2",
     "redis+sentinel://a,b:2/mine?prefix=x"],
)  # fmt: skip
@given(password=st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_any_password_survives_its_way_through_url(url, password):
    before, after = parse_address(url), parse_address(with_password(url, password))
    assert after == replace(before, password=password)


def test_url_keeps_its_password_when_none_is_given():
    assert with_password("redis://:p%40@host/1", None) == "redis://:p%40@host/1"


def test_password_is_refused_for_what_is_no_url():
    with pytest.raises(InvalidArgumentError):
        with_password("localhost:6379", "secret")
