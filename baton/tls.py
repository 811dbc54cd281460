"""What TLS is made of: PEM files, read again once they have changed. Knows nothing of who calls
whom."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

from baton.errors import BatonError, FailedPreconditionError

INTERVAL_SECONDS = 1.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tls:
    """Whom to believe, and who one is oneself.

    Attributes:
        ca: PEM file of the authorities whose certificates are believed.
        cert, key: PEM files of one's own certificate and its private key; None: one shows none.
        server_name: whom certificates of those that one connects to must name; None: the host that
            one has been told to connect to.
    """

    ca: str | Path
    cert: str | Path | None = None
    key: str | Path | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise FailedPreconditionError("a certificate and its private key come together")

    def channel_options(self) -> list[tuple[str, str]]:
        """Of a channel with `Pem.channel_credentials`."""
        name = self.server_name
        return [] if name is None else [("grpc.ssl_target_name_override", name)]


@dataclass(frozen=True, slots=True)
class Pem:
    """What is in the files of a `Tls`."""

    ca: bytes
    cert: bytes | None
    key: bytes | None

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)


class PemFiles:
    """The files of a `Tls`, which may be replaced at any time. Safe to share between threads."""

    def __init__(
        self,
        tls: Tls,
        check: Callable[[Tls], None] = lambda _: None,
        interval: float = INTERVAL_SECONDS,
    ) -> None:
        """`check` raises what is wrong with the files as they are. `interval`: seconds between two
        looks at them, at least. Raises what `check` does, and `FailedPreconditionError` for files
        that cannot be read."""
        self.tls = tls
        self._check = check
        self._interval = interval
        self._lock = threading.Lock()
        self._stamp, self._pem = self._read()
        self._next_look = time.monotonic() + interval

    def current(self) -> Pem:
        """What they say now, the very same object as long as that is the same. Of files that are
        no good: what they said before."""
        with self._lock:
            if time.monotonic() >= self._next_look:
                self._look()
                self._next_look = time.monotonic() + self._interval
            return self._pem

    def _look(self) -> None:
        stamp = _stamp(self.tls)
        if stamp == self._stamp:
            return
        try:
            self._stamp, pem = self._read()
        except BatonError as error:
            # Perhaps only half of them are there yet: then they will change once more.
            self._stamp = stamp
            logger.warning("the certificates stay as they were: %s", error)
            return
        if pem != self._pem:
            self._pem = pem
            logger.info("new certificates, from %s", self.tls.cert or self.tls.ca)

    def _read(self) -> tuple[tuple[int, ...], Pem]:
        before = _stamp(self.tls)
        ca, cert, key = (_bytes_of(path) for path in (self.tls.ca, self.tls.cert, self.tls.key))
        assert ca is not None
        self._check(self.tls)
        if _stamp(self.tls) != before:
            raise FailedPreconditionError(f"{self.tls.ca} and those beside it are being changed")
        return before, Pem(ca, cert, key)


def _stamp(tls: Tls) -> tuple[int, ...]:
    """Another one whenever a file is."""
    stamp: list[int] = []
    for path in (tls.ca, tls.cert, tls.key):
        if path is not None:
            try:
                found = Path(path).stat()
            except OSError:
                stamp.append(0)
            else:
                stamp += (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
    return tuple(stamp)


def _bytes_of(path: str | Path | None) -> bytes | None:
    try:
        return None if path is None else Path(path).read_bytes()
    except OSError as error:
        raise FailedPreconditionError(f"cannot read {path}: {error.strerror}") from error
