"""TLS files: PEM files that are reloaded after they have changed. Independent of callers."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

from baton.errors import FailedPreconditionError
from baton.rpc.watched_files import INTERVAL_SECONDS, WatchedFiles
from baton.settings import setting


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS configuration of one side: trusted authorities, and the certificate that it shows.

    Attributes:
        ca: PEM file of the authorities whose certificates are trusted.
        cert, key: PEM files of the own certificate and its private key; None: none is shown.
        server_name: name that certificates of servers must have; None: the host in the address.
        reload_interval: seconds between two checks of the files for changes, at least.
    """

    ca: str | Path
    cert: str | Path | None = None
    key: str | Path | None = None
    server_name: str | None = None
    reload_interval: float = INTERVAL_SECONDS

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise FailedPreconditionError("a certificate and its private key come together")

    def channel_options(self) -> list[tuple[str, str]]:
        """Returns the options of a channel with `Pem.channel_credentials`."""
        name = self.server_name
        return [] if name is None else [("grpc.ssl_target_name_override", name)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Settings of a process's TLS: all three files, or none."""

    cert: str | None = setting(
        None,
        "PEM file of this process's certificate chain, for connections in both directions. Unset: "
        "no TLS.",
    )
    key: str | None = setting(None, "PEM file of the private key of --tls-cert.")
    ca: str | None = setting(
        None, "PEM file of the trusted certificate authorities, for clients and servers."
    )

    @property
    def tls(self) -> Tls | None:
        """TLS with these files; None unless there are all three."""
        return Tls(self.ca, self.cert, self.key) if self.ca and self.cert and self.key else None


@dataclass(frozen=True, slots=True)
class Pem:
    """Contents of the files of a `Tls`."""

    ca: bytes
    cert: bytes | None
    key: bytes | None

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)


class PemFiles(WatchedFiles[Pem]):
    """Watched files of a `Tls`, which may be replaced at any time."""

    def __init__(self, tls: Tls, check: Callable[[Tls], None] = lambda _: None) -> None:
        """Calls `check` after each read, to raise an error for bad files. Raises that error, and
        `FailedPreconditionError` for files that cannot be read."""

        def read() -> Pem:
            ca, cert, key = map(_bytes_of, (tls.ca, tls.cert, tls.key))
            assert ca is not None
            check(tls)
            return Pem(ca, cert, key)

        paths = [Path(path) for path in (tls.ca, tls.cert, tls.key) if path is not None]
        super().__init__(paths, read, interval=tls.reload_interval)


def _bytes_of(path: str | Path | None) -> bytes | None:
    try:
        return None if path is None else Path(path).read_bytes()
    except OSError as error:
        raise FailedPreconditionError(f"cannot read {path}: {error.strerror}") from error
