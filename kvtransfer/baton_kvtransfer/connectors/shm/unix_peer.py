"""Unix sockets for file descriptors, and the checks that source and claimant make of each other.

An abstract socket has no file, so it leaves none behind even after a crash, and is visible only
within one network namespace. Workers in several, such as pods, may share a folder instead. Neither
restricts access, so each end checks the other's user through the kernel.
"""

import os
import socket
import struct
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_PROBE_SECONDS = 1.0
GREETING = b"baton-kv"
PREFIX = "baton-kv-"
"""Prefix of socket names."""


def belongs_to(connection: socket.socket, user: int | None) -> bool:
    """Returns whether the process at the other end runs as `user`; None: as this process's."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    return bool(uid == (os.geteuid() if user is None else user))


def abstract(name: str) -> str:
    """Returns the address of an abstract socket."""
    return f"\0{name}"


def address_of(name: str, folder: str | None) -> str:
    """Returns the address of a socket by its name: in `folder`, or abstract if that is None.

    Raises `ValueError` for a name that would lead out of the folder.
    """
    if folder is None:
        return abstract(name)
    if not name.startswith(PREFIX) or "/" in name:
        raise ValueError(f"{name!r} is no name of a socket")
    return str(Path(folder) / name)


def listen(connecting: socket.socket, name: str, folder: str | None) -> None:
    """Binds the socket to `address_of(name, folder)` and listens. Raises `OSError` if it cannot.

    In a folder it becomes visible only after it listens. So a visible socket that refuses
    connections belongs to a dead process, and is removed.
    """
    if folder is None:
        connecting.bind(abstract(name))
        connecting.listen()
        return
    _remove_left_over(Path(folder))
    hidden = Path(folder) / f".{name}"
    connecting.bind(str(hidden))
    hidden.chmod(0o600)
    connecting.listen()
    hidden.rename(address_of(name, folder))


def remove(name: str, folder: str | None) -> None:
    """Removes the file that `listen` has made, if any."""
    if folder is not None:
        Path(address_of(name, folder)).unlink(missing_ok=True)


def _remove_left_over(folder: Path) -> None:
    for path in folder.glob(f"{PREFIX}*"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_PROBE_SECONDS)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:  # such as another user's, or one that is busy
                continue
