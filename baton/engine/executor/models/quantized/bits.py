"""Integers of a few bits, packed one after the other into words of 32 bits."""

import torch

_WORD = 32
_BYTE = 8


def unpack(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Returns the first `count` integers of each row: uint8 `[..., count]`.

    Args:
        words: int32 `[..., num_words]`; the first integer is in the lowest bits of the first word,
            and one may be in two words.
        bits: of an integer, at most 8.
    """
    if count * bits > words.shape[-1] * _WORD:
        raise ValueError(f"{words.shape[-1]} words hold no {count} integers of {bits} bits")
    packed = words.contiguous().view(torch.uint8)
    if _BYTE % bits == 0:
        shifts = torch.arange(0, _BYTE, bits, dtype=torch.uint8, device=words.device)
        parts = (packed[..., None] >> shifts).bitwise_and_(2**bits - 1)
        return parts.flatten(-2)[..., :count]
    begins = torch.arange(count, device=words.device) * bits
    first, shift = begins // _BYTE, (begins % _BYTE).to(torch.int16)
    packed = torch.nn.functional.pad(packed, (0, 1))
    pairs = packed[..., first].to(torch.int16) | packed[..., first + 1].to(torch.int16) << _BYTE
    return (pairs >> shift).bitwise_and_(2**bits - 1).to(torch.uint8)


def bits_of(words: int, count: int) -> int:
    """Returns of how many bits `count` integers are that take up `words` words."""
    return words * _WORD // count
