"""Signatures of what Baton keeps in Redis: HMAC-SHA-256 with keys of a file.

Each line of the file is a key of 32 characters or more; the first one signs, and all of them
verify. A signature covers the name of the Redis key, so that it is valid there alone. Independent
of what is signed.
"""

import hmac
import struct
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from baton.errors import FailedPreconditionError
from baton.rpc.watched_files import INTERVAL_SECONDS, WatchedFiles

MIN_KEY_CHARS = 32
MAX_AGE = 60.0  # seconds for which a signature with a time is valid, and clocks may differ

_SIGNATURE = b"signature"
_SIGNED_AT = b"signed_at"

Value = str | bytes | int


class SigningKeys:
    """Signing keys of a file, which is read again after it was replaced.

    Args:
        path: path of the file.
        interval: seconds between two checks of the file, at least.

    Raises:
        FailedPreconditionError: the file cannot be read, or a line is no key.
    """

    def __init__(self, path: Path, *, interval: float = INTERVAL_SECONDS) -> None:
        self._file = WatchedFiles([path], partial(_read, path), interval=interval)

    @property
    def first(self) -> bytes:
        """Key that signs."""
        return self._file.current()[0]

    def sign(self, *parts: bytes) -> bytes:
        """Returns the signature of `parts`, 32 bytes."""
        return _mac(self.first, parts)

    def is_signed(self, signature: bytes, *parts: bytes) -> bool:
        """Returns whether one of the keys has signed `parts`."""
        return any(
            hmac.compare_digest(_mac(key, parts)[: len(signature)], signature)
            for key in self._file.current()
            if len(signature) >= 16
        )

    def sign_fields(self, name: str, fields: Mapping[str, Value]) -> dict[str, Value]:
        """Returns `fields` of the Redis key `name`, with the time and a signature of all."""
        signed = {**fields, _SIGNED_AT.decode(): time.time_ns() // 1_000_000}
        encoded = {field.encode(): _encoded(value) for field, value in signed.items()}
        return {**signed, _SIGNATURE.decode(): self.sign(*_parts(name, encoded))}

    def check_fields(
        self, name: str, fields: Mapping[bytes, bytes], max_age: float | None = MAX_AGE
    ) -> None:
        """Checks fields that `sign_fields` returned. `max_age`: seconds since they were signed, at
        most; None: any time.

        Raises:
            ValueError: they are not signed, signed by another key, changed, or too old.
        """
        signature = fields.get(_SIGNATURE)
        if signature is None:
            raise ValueError("it is not signed; give its process --redis-signing-key-file")
        content = {field: value for field, value in fields.items() if field != _SIGNATURE}
        if not self.is_signed(signature, *_parts(name, content)):
            raise ValueError("its signature is of another key, or it was changed")
        if max_age is not None:
            check_age(int(content.get(_SIGNED_AT, b"0")), max_age)


def signing_keys(path: str | None) -> SigningKeys | None:
    """Returns the keys of the file at `path`; None for None.

    Raises:
        FailedPreconditionError: as `SigningKeys` does.
    """
    return None if path is None else SigningKeys(Path(path))


def check_age(signed_at: int, max_age: float = MAX_AGE) -> None:
    """Checks the time of a signature, in milliseconds since 1970.

    Raises:
        ValueError: it differs from now by more than `max_age` seconds.
    """
    age = time.time() - signed_at / 1000
    if abs(age) > max_age:
        raise ValueError(
            f"it was signed {age:.0f} s ago; expected at most {max_age:g}. It is a copy, or the "
            "clocks differ"
        )


def _read(path: Path) -> tuple[bytes, ...]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FailedPreconditionError(f"cannot read the signing keys in {path}: {error}") from error
    keys = []
    for number, line in enumerate(lines, 1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if len(key) < MIN_KEY_CHARS:
            raise FailedPreconditionError(
                f"{path}:{number} has {len(key)} characters; expected {MIN_KEY_CHARS} or more. "
                "Make a key with `openssl rand -hex 32`"
            )
        keys.append(key.encode())
    if not keys:
        raise FailedPreconditionError(
            f"{path} has no key; expected one per line. Make a key with `openssl rand -hex 32`"
        )
    return tuple(keys)


def _mac(key: bytes, parts: tuple[bytes, ...]) -> bytes:
    content = b"".join(struct.pack("<Q", len(part)) + part for part in parts)
    return hmac.digest(key, content, "sha256")


def _parts(name: str, fields: Mapping[bytes, bytes]) -> list[bytes]:
    ordered = sorted(fields.items())
    return [name.encode(), *(part for field in ordered for part in field)]


def _encoded(value: Value) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()
