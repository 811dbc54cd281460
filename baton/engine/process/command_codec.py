"""Commands as bytes: the number of the command's type, then its fields in MessagePack."""

from typing import Any, Final

import msgspec

from baton.engine.core import commands
from baton.engine.core.commands import Command

_TYPES: Final[tuple[type[Any], ...]] = (
    commands.Add,
    commands.Abort,
    commands.CommitExternal,
    commands.FailExternal,
    commands.Suspend,
    commands.EndSequence,
    commands.Pause,
    commands.Resume,
    commands.Unpin,
    commands.Encode,
    commands.ExpectOutput,
    commands.CommitOutput,
    commands.ReleaseOutput,
    commands.FlushCache,
    commands.Pin,
    commands.ReportMemory,
    commands.CompileGrammar,
)
_NUMBERS: Final = {each: bytes([i]) for i, each in enumerate(_TYPES)}
_DECODERS: Final = [msgspec.msgpack.Decoder(each) for each in _TYPES]
_encode = msgspec.msgpack.Encoder().encode


def encode_command(command: Command) -> bytes:
    """Returns a command as bytes."""
    return _NUMBERS[type(command)] + _encode(command)


def decode_command(record: bytes) -> Command:
    """Returns the command that `encode_command` was given."""
    command: Command = _DECODERS[record[0]].decode(memoryview(record)[1:])
    return command
