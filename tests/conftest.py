"""Property tests are never timed. The recorded traces, where they are: no part of the project."""

from contextlib import suppress
from pathlib import Path

import pytest

from bench.traces import trace_folder

with suppress(ImportError):  # `make gpu` does without
    from hypothesis import settings

    settings.register_profile("untimed", deadline=None)
    settings.load_profile("untimed")


@pytest.fixture(scope="session")
def conversation_trace() -> Path:
    return _trace("mooncake_conversation.jsonl")


@pytest.fixture(scope="session")
def code_trace() -> Path:
    return _trace("azure_2023_code.csv")


def _trace(name: str) -> Path:
    path = trace_folder() / name
    if not path.exists():
        pytest.skip(f"the trace {name} is not there; BATON_TRACES says in which folder to look")
    return path
