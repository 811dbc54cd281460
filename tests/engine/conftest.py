"""One thread for torch, and small random checkpoints on disk, made when first asked for."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import baton.models
from baton.engine.client import EngineClient
from baton.engine.config import EngineConfig
from baton.engine.core.process.engine_process import EngineProcess
from baton.engine.llm import LLM
from tests.support.engine.by_handle import forks, forks_by_handle, ipc  # noqa: F401
from tests.support.engine.checkpoints import FAMILIES, save_random
from tests.support.engine.oracle import Oracle
from tests.support.engine.streams import running

Serve = Callable[..., AbstractAsyncContextManager[EngineClient]]

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


@pytest.fixture(params=["thread", "process"])
def serve(request: pytest.FixtureRequest) -> Serve:
    """Context of an engine with streams, in a thread and in a process of its own."""

    def load(path: str, config: EngineConfig) -> LLM | EngineProcess:
        if request.param == "thread":
            return LLM.from_pretrained(path, config)
        return EngineProcess.load(request.getfixturevalue("forks").fork(), path, config)

    @asynccontextmanager
    async def serving(path: str, **options: Any) -> AsyncIterator[EngineClient]:
        callbacks = {name: options.pop(name) for name in tuple(options) if name.startswith("on_")}
        config = EngineConfig(**{"device": "cpu", "dtype": "float32", "num_threads": 1} | options)
        async with running(load(path, config), **callbacks) as engine:
            yield engine

    return serving
