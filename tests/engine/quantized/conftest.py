"""Quantized checkpoints on disk, made when first asked for."""

import pytest

from tests.support.engine.quantized.formats import Packed


@pytest.fixture(scope="session")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    return Packed(tmp_path_factory.mktemp("quantized"))
