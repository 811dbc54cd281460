"""One thread for torch, and small random checkpoints on disk, made when first asked for."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import baton.models
from tests.support.engine.by_handle import forks, forks_by_handle, ipc  # noqa: F401
from tests.support.engine.checkpoints import FAMILIES, save_random

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The folder of a family's checkpoint."""
    root = tmp_path_factory.mktemp("checkpoints")
    made: dict[str, str] = {"tiny": baton.models.locate("tiny")}

    def folder_of(family: str) -> str:
        if family not in made:
            folder: Path = root / family
            save_random(FAMILIES[family](), folder)
            made[family] = str(folder)
        return made[family]

    return folder_of
