"""Commands as bytes: the place of the type in `COMMANDS`, then the fields in MessagePack."""

from typing import Final

import msgspec

from baton.engine.core.commands import COMMANDS, Command

_NUMBERS: Final = {each: bytes([i]) for i, each in enumerate(COMMANDS)}
_DECODERS: Final = [msgspec.msgpack.Decoder(each) for each in COMMANDS]
_encode = msgspec.msgpack.Encoder().encode


def encode_command(command: Command) -> bytes:
    """Returns a command as bytes."""
    return _NUMBERS[type(command)] + _encode(command)


def decode_command(record: bytes) -> Command:
    """Returns the command that `encode_command` was given."""
    command: Command = _DECODERS[record[0]].decode(memoryview(record)[1:])
    return command
