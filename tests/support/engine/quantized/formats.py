"""Checkpoints of tests in all formats of quantized weights."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine.checkpoints import FAMILIES, save_random
from tests.support.engine.images import VISION_LANGUAGE, save_vision_language, share_processor
from tests.support.engine.quantized import (
    bitsandbytes,
    compressed_tensors,
    fp4,
    fp8,
    grouped_integers,
)
from tests.support.engine.quantized.codes import save_numbers
from tests.support.engine.quantized.written import Format, save_quantized

FORMATS: dict[str, Format] = (
    fp8.FORMATS
    | grouped_integers.FORMATS
    | fp4.FORMATS
    | compressed_tensors.FORMATS
    | bitsandbytes.FORMATS
)
# Those that transformers reads here: of others it needs packages or devices that tests lack, or
# takes the blocks at the end of a weight for whole ones.
BY_TRANSFORMERS = [
    "fp8 in blocks",
    "fp8 as a whole",
    "mxfp8",
    *compressed_tensors.FORMATS,
    *compressed_tensors.ROUNDED,
]
ALL = FORMATS | fp4.MXFP4 | compressed_tensors.ROUNDED


def by_lanes(names: Iterable[str], quick: Sequence[str], often: Sequence[str]) -> list[Any]:
    """Formats as parameters: some of every lane, some of `make test-full`, others of `make
    nightly`."""
    marks = {**dict.fromkeys(often, pytest.mark.slow), **dict.fromkeys(quick, ())}
    return [pytest.param(name, marks=marks.get(name, pytest.mark.nightly)) for name in names]


class Packed:
    """Small random checkpoints by format and family.

    Each is two folders: the checkpoint, and a plain one with the values that it stands for.
    `with_codes` gives a plain one with the numbers of an engine that keeps codes: of scales of 16
    bits, values are rounded to their dtype and these are not.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[tuple[str, str], tuple[str, str]] = {}

    def __call__(self, name: str, family: str) -> tuple[str, str]:
        if (name, family) not in self._made:
            folder = self._root / str(len(self._made))
            self._save_plain(family, folder / "plain")
            meant = save_quantized(ALL[name], folder / "plain", folder / "packed")
            if family in VISION_LANGUAGE:
                share_processor(folder / "plain", folder / "packed", meant)
            self._made[name, family] = str(folder / "packed"), str(meant)
        return self._made[name, family]

    def with_codes(self, name: str, family: str) -> tuple[str, str]:
        path, meant = self(name, family)
        numbers = Path(path).with_name("numbers")
        if not numbers.exists():
            save_numbers(path, numbers, meant)
        return path, str(numbers)

    def _save_plain(self, family: str, folder: Path) -> None:
        if family in VISION_LANGUAGE:
            save_vision_language(family, folder)
        else:
            save_random(FAMILIES[family](), folder)
