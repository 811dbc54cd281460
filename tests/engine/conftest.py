"""One thread for torch, and small random checkpoints on disk, made when first asked for."""

from pathlib import Path

import pytest
import torch

import baton.models
from tests.support.engine.checkpoints import FAMILIES, save_random
from tests.support.engine.oracle import Oracle

torch.set_num_threads(1)


class Checkpoints:
    """Folders by family name."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[str, str] = {"tiny": baton.models.locate("tiny")}

    def __getitem__(self, family: str) -> str:
        if family not in self._made:
            folder = self._root / family
            save_random(FAMILIES[family](), folder)
            self._made[family] = str(folder)
        return self._made[family]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    return Oracle()
