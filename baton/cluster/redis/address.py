"""Redis addresses: one URL for a server, a Sentinel group or a Cluster.

    redis://[[user]:password@]host[:6379][/db]
    redis+sentinel://[[user]:password@]host[:26379],host,.../service[/db]
    redis+cluster://[[user]:password@]host[:6379],host,...
    unix://[[user]:password@]/path/of/socket[?db=0]

With `rediss` instead of `redis` all connections use TLS. `?prefix=NAME` at the end of any URL
separates several Baton deployments on one Redis. Error messages contain no text that may be part of
a password. Independent of connections.
"""

import difflib
import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

from baton.errors import InvalidArgumentError

Kind = Literal["standalone", "unix", "sentinel", "cluster"]
Node = tuple[str, int]
"""Host and port."""

_KINDS: dict[str, Kind] = {
    "redis": "standalone",
    "unix": "unix",
    "redis+sentinel": "sentinel",
    "redis+cluster": "cluster",
}
_REDIS_PORT = 6379
_SENTINEL_PORT = 26379

_TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_TLS_OPTIONS = (*_TLS_FILES, "ssl_check_hostname")
_SENTINEL_OPTIONS = ("sentinel_username", "sentinel_password")
_PREFIX = re.compile(r"[A-Za-z0-9._-]{1,64}")  # no brace, which would be a hash tag
_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS settings for Redis: certificates of the server's CA and of this client, as PEM files.

    Attributes:
        ca_file: CA certificates for the server; None: the system's trust store.
        cert_file, key_file: client certificate and its key; None: no client certificate.
        check_hostname: whether the server's certificate must match its host name.
    """

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    check_hostname: bool = True


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """Parsed Redis URL.

    Attributes:
        nodes: the server, the sentinels, or some of the cluster's nodes.
        path: path of the socket, for "unix".
        service: the sentinels' name of the master.
        db: database number.
        username, password: of an ACL user; a password alone is that of the default user.
        sentinel_username, sentinel_password: credentials for the sentinels, if they need any.
        prefix: prefix of all key names, colon included; empty for none.
    """

    kind: Kind
    nodes: tuple[Node, ...] = ()
    path: str = ""
    service: str = ""
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)
    tls: Tls | None = None
    prefix: str = ""


def parse_address(url: str) -> RedisAddress:
    """Returns the address in `url`. Reads the certificate files that it names.

    Raises:
        InvalidArgumentError: for the field "redis_url", with the reason.
    """
    try:
        parts = urlsplit(url)
    except ValueError:  # its message quotes the URL
        raise InvalidArgumentError("redis_url", "it is no URL") from None
    try:
        return _parse(parts)
    except ValueError as error:
        raise InvalidArgumentError("redis_url", str(error)) from None


def with_password(url: str, password: str | None) -> str:
    """Returns `url` with `password`, any text, in place of its own; unchanged if there is none.

    Raises:
        InvalidArgumentError: `url` is not a Redis URL.
    """
    if not password:
        return url
    parse_address(url)
    parts = urlsplit(url)
    user, _, hosts = parts.netloc.rpartition("@")
    username = user.partition(":")[0]
    return parts._replace(netloc=f"{username}:{quote(password, safe='')}@{hosts}").geturl()


def has_secret(url: str) -> bool:
    """Returns whether `url` may contain a password, which must not be shown."""
    return "@" in url or "password=" in url


def _parse(parts: SplitResult) -> RedisAddress:
    kind = _KINDS.get(parts.scheme.replace("rediss", "redis"))
    if kind is None:
        raise ValueError(
            "it begins with none of redis://, redis+sentinel://, redis+cluster://, the same with "
            "rediss for TLS, and unix://"
        )
    if "@" in parts.path + parts.query + parts.fragment:
        raise ValueError(
            "there is an @ behind the host; in a user or a password, / is written %2F, ? %3F, "
            "# %23 and @ %40"
        )
    if parts.fragment:
        raise ValueError("there is a # in it; in a password, it is written %23")
    user, _, hosts = parts.netloc.rpartition("@")
    username, _, password = map(unquote, user.partition(":"))
    is_tls = parts.scheme.startswith("rediss")
    options = _options(parts.query, kind, is_tls=is_tls)
    service, db = _service_and_db(parts.path, kind, options)
    return RedisAddress(
        kind,
        _nodes(hosts, kind),
        unquote(parts.path) if kind == "unix" else "",
        service,
        db,
        username or None,
        password or None,
        options.get("sentinel_username"),
        options.get("sentinel_password"),
        _tls(options) if is_tls else None,
        _prefix(options),
    )


def _options(query: str, kind: Kind, *, is_tls: bool) -> dict[str, str]:
    """Returns the query parameters by name."""
    allowed = [
        *(("db",) if kind in ("standalone", "unix") else ()),
        *(_SENTINEL_OPTIONS if kind == "sentinel" else ()),
        *(_TLS_OPTIONS if is_tls else ()),
        "prefix",
    ]
    options = dict(parse_qsl(query, keep_blank_values=True))
    for name in options:
        if name in allowed:
            continue
        if name in _TLS_OPTIONS:
            raise ValueError(f"{name} is for TLS: write rediss in place of redis")
        close = difflib.get_close_matches(name, allowed, n=1)
        hint = f"; is {close[0]} meant?" if close else f"; known are {', '.join(allowed) or 'none'}"
        raise ValueError(f"the option {name} is not known here{hint}")
    return options


def _nodes(hosts: str, kind: Kind) -> tuple[Node, ...]:
    if kind == "unix":
        if hosts:
            raise ValueError("a socket has no host: write unix:///path/of/socket")
        return ()
    default = _SENTINEL_PORT if kind == "sentinel" else _REDIS_PORT
    nodes = tuple(_node(host.strip(), default) for host in hosts.split(","))
    if kind == "standalone" and len(nodes) > 1:
        raise ValueError("several hosts are for redis+sentinel:// and redis+cluster://")
    return nodes


def _node(text: str, default_port: int) -> Node:
    """Parses "host", "host:port" or "[address]:port"."""
    host, colon, port = text.rpartition(":")
    if not colon or port.endswith("]"):
        host, port = text, str(default_port)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("an IPv6 address is written in brackets, such as [::1]:6379")
    if not host:
        raise ValueError("a host is missing")
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"the port of host {host} is no number from 1 to 65535")
    return host, int(port)


def _service_and_db(path: str, kind: Kind, options: Mapping[str, str]) -> tuple[str, int]:
    if kind == "unix":
        if not path.strip("/"):
            raise ValueError("the path of the socket is missing")
        return "", _db(options.get("db", ""))
    names = [unquote(name) for name in path.split("/")[1:] if name]
    service = ""
    if kind == "sentinel":
        if not names:
            raise ValueError(
                "the name of the service is missing behind the sentinels, such as /mymaster"
            )
        service = names.pop(0)
    if len(names) > 1:
        raise ValueError("too much is behind the host: one number of a database may be")
    db = _db(names[0] if names else options.get("db", ""))
    if kind == "cluster" and db != 0:
        raise ValueError("a cluster has no database but 0")
    return service, db


def _prefix(options: Mapping[str, str]) -> str:
    if "prefix" not in options:
        return ""
    if _PREFIX.fullmatch(options["prefix"]) is None:
        raise ValueError("the prefix is not 1 to 64 letters, digits, dots, underscores or hyphens")
    return options["prefix"] + ":"


def _db(text: str) -> int:
    if text and not (text.isascii() and text.isdigit()):
        raise ValueError("the database is no number")
    return int(text or 0)


def _tls(options: Mapping[str, str]) -> Tls:
    """Returns the TLS options after checking that their files can be loaded."""
    ca_file, cert_file, key_file = (options.get(name) or None for name in _TLS_FILES)
    check = options.get("ssl_check_hostname", "true").lower()
    if check not in _BOOLEANS:
        raise ValueError("ssl_check_hostname is neither true nor false")
    if key_file is not None and cert_file is None:
        raise ValueError("ssl_keyfile is the key of a certificate: ssl_certfile is missing")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca_file is not None:
        _try("ssl_ca_certs", lambda: context.load_verify_locations(ca_file))
    if cert_file is not None:
        chain = "ssl_certfile and ssl_keyfile"
        _try(chain, lambda: context.load_cert_chain(cert_file, key_file, password=_no_password))
    return Tls(ca_file, cert_file, key_file, _BOOLEANS[check])


def _try(name: str, load: Callable[[], None]) -> None:
    try:
        load()
    except OSError as error:  # SSLError is one
        raise ValueError(f"{name} cannot be used: {error.strerror or error}") from None


def _no_password() -> str:
    """Rejects a key with a password, for which OpenSSL would prompt on the terminal."""
    raise ValueError("ssl_keyfile has a password; use a key without")
