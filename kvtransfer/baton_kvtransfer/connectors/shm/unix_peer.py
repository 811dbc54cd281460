"""Unix socket for file descriptors: what source and claimant check of each other. Knows nothing of
blocks.

The socket is abstract: it has no file, so nothing is left of it however its owner ends, and it is
seen only inside one network namespace. Workers that have none in common, such as pods, may have a
folder in common instead. Neither keeps others out, so each end asks the kernel who the other is.
"""

import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_PROBE_SECONDS = 1.0
GREETING = b"baton-kv"
PREFIX = "baton-kv-"
"""Of the names of sockets."""


@dataclass(frozen=True, slots=True)
class HandleEndpoint:
    """Socket at which a source passes the descriptors of its pools.

    Attributes:
        address: the name of its socket, that nobody can guess.
        host: where it can be reached from.
        num_blocks: of the pool of each cache group, not counting block 0.
    """

    address: str
    host: str
    num_blocks: tuple[int, ...]


def host_id() -> str:
    """The same for all processes that may share memory: those under one running kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end belongs to this one's user."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    return bool(uid == os.geteuid())


def abstract(name: str) -> str:
    """The address of an abstract socket."""
    return f"\0{name}"


def address_of(name: str, folder: str | None) -> str:
    """The address of a socket of this name: in the folder, if there is one, else abstract.

    Raises `ValueError` for a name that would lead out of the folder.
    """
    if folder is None:
        return abstract(name)
    if not name.startswith(PREFIX) or "/" in name:
        raise ValueError(f"{name!r} is no name of a socket")
    return str(Path(folder) / name)


def listen(connecting: socket.socket, name: str, folder: str | None) -> None:
    """Has the socket listen at `address_of` a name. Raises `OSError` where it cannot.

    In a folder it appears once it listens: one that is there and refuses is of a process that has
    ended, and is removed.
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
    """Removes what `listen` has made."""
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
