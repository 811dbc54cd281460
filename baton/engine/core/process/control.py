"""Control messages between an engine's process and its parent: start, progress of loading, stop.

They pass over a socket that keeps messages apart and carries file descriptors, as the number of the
message's type and its fields in MessagePack. Its end tells either process that the other is gone.
"""

import socket
from dataclasses import dataclass
from typing import Any, Final, get_args

import msgspec

from baton.engine.config import EngineConfig
from baton.engine.core.process.error_codec import ErrorData
from baton.engine.executor.cache.cuda_ipc import IpcPlace
from baton.engine.facts import EngineFacts
from baton.models.images.image_format_codec import decode_image_format

_MAX_BYTES: Final = 1 << 17
_MAX_DESCRIPTORS: Final = 64


@dataclass(frozen=True, slots=True)
class Start:
    """Order to load a model. Comes with the descriptors of the rings of commands and of reports,
    and of the page for readings."""

    model: str
    config: EngineConfig


@dataclass(frozen=True, slots=True)
class Sample:
    """Place of a `SampleMemory` on the engine's GPU. The model is loaded after `SampleOpened`."""

    device: str
    place: IpcPlace


@dataclass(frozen=True, slots=True)
class SampleOpened:
    """The parent can open memory of the engine's GPU."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Order to end after the current step."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Phase of loading, and the fraction done."""

    phase: str
    fraction: float


@dataclass(frozen=True, slots=True)
class LoadedBytes:
    """Bytes of weights loaded so far, and of all weights."""

    num_loaded: int
    num_all: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine takes commands. Has the places of its pools on a GPU, or comes with the
    descriptors of their memory; that of encoder outputs is the last."""

    facts: EngineFacts
    places: tuple[IpcPlace, ...]


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The model cannot be loaded."""

    error: ErrorData


@dataclass(frozen=True, slots=True)
class NotShared:
    """The engine's memory cannot be opened by another process; `problem` is a whole sentence."""

    problem: str


Message = (
    Start | Sample | SampleOpened | Stop | Progress | LoadedBytes | Ready | LoadFailed | NotShared
)

_TYPES: Final[tuple[type[Any], ...]] = get_args(Message)
_NUMBERS: Final = {each: bytes([i]) for i, each in enumerate(_TYPES)}
_DECODERS: Final = [msgspec.msgpack.Decoder(each, dec_hook=decode_image_format) for each in _TYPES]


def send(control: socket.socket, message: Message, descriptors: list[int] | None = None) -> None:
    """Sends a message with descriptors, which stay open here. Raises `OSError` if the other process
    is gone."""
    content = _NUMBERS[type(message)] + msgspec.msgpack.encode(message)
    socket.send_fds(control, [content], descriptors or [])


def receive(control: socket.socket) -> tuple[Message | None, list[int]]:
    """Waits for a message; returns it with the descriptors that came with it, which belong to the
    caller. None: the other process is gone."""
    try:
        content, descriptors, _, _ = socket.recv_fds(control, _MAX_BYTES, _MAX_DESCRIPTORS)
    except ConnectionError:
        return None, []
    if not content:
        return None, []
    return _DECODERS[content[0]].decode(memoryview(content)[1:]), descriptors
