"""The recorded traces, where they are there: they are no part of the project."""

from pathlib import Path

import pytest

from bench.traces import trace_folder


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
