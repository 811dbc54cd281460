"""Recorded traces: where tests find them, and what a test does without one."""

import os
from pathlib import Path

import pytest

from baton_simulator.traces import trace_folder

# The file of each fixture in tests/conftest.py.
FIXTURES = {
    "conversation_trace": "mooncake_conversation.jsonl",
    "code_trace": "azure_2023_code.csv",
}
# Where each trace can be downloaded, by the name it is kept under.
SOURCES = {
    "mooncake_conversation.jsonl": (
        "github.com/kvcache-ai/Mooncake FAST25-release/traces/conversation_trace.jsonl"
    ),
    "azure_2023_code.csv": (
        "github.com/Azure/AzurePublicDataset data/AzureLLMInferenceTrace_code.csv"
    ),
}
_HOW = "download " + ", ".join(f"{source} as {name}" for name, source in SOURCES.items())


def recorded_trace(name: str, folder: Path | None = None) -> Path:
    """Returns the path of a trace, in `folder` or where `trace_folder()` says.

    Fails the test if BATON_TRACES is set, or the folder exists, but the trace is missing. Skips it
    if there is neither. The reason is one for all traces: where a hook calls this, rather than a
    fixture, pytest prints all skipped tests as one line with their number.
    """
    folder = folder or trace_folder()
    if (folder / name).exists():
        return folder / name
    if os.environ.get("BATON_TRACES") or folder.exists():
        pytest.fail(f"{folder / name} is missing; {_HOW}", pytrace=False)
    pytest.skip(f"BATON_TRACES names no folder of recorded traces; to run these tests, {_HOW}")
