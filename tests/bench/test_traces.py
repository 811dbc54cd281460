"""Traces are read to the row, and what is wrong with one is said with its file, line and field."""

import json
import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from baton_simulator.traces import (
    MOONCAKE_BLOCK_SIZE,
    TraceError,
    TraceRow,
    read_trace,
    trace_folder,
)
from tests.support.recorded_traces import SOURCES, recorded_trace

GOOD = {"timestamp": 1500, "input_length": 513, "output_length": 7, "hash_ids": [0, 3]}
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def mooncake(folder: Path, *rows: Any) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n")
    return path


def azure(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text)
    return path


def test_mooncake_row_is_read_in_seconds_and_tokens(tmp_path: Path) -> None:
    path = mooncake(tmp_path, GOOD, "", {**GOOD, "timestamp": 1500.5})
    assert list(read_trace(path)) == [
        TraceRow(1.5, 513, 7, (0, 3)),
        TraceRow(1.5005, 513, 7, (0, 3)),
    ]


def test_azure_arrivals_count_from_the_first_row(tmp_path: Path) -> None:
    rows = "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319601,3180,8\n"
    first, second = read_trace(azure(tmp_path, HEADER + rows))
    assert first == TraceRow(0.0, 4808, 10)
    assert second.arrival == pytest.approx(0.052)


def test_azure_images_begin_their_prompts(tmp_path: Path) -> None:
    rows = (
        "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n"
        "2024-10-15 00:00:01.0,2,900,5\n"
        "2024-10-15 00:00:02.0,1,100,5\n"
        "2024-10-15 00:00:03.0,0,100,5\n"
    )
    path = azure(tmp_path, rows)
    found = [row.images for row in read_trace(path, image_tokens=256)]
    spans = [[(image.start, image.num_tokens) for image in images] for images in found]
    assert spans == [[(0, 256), (256, 256)], [(0, 100)], []]
    assert len({image.content for images in found for image in images}) == 3
    assert all(not row.images for row in read_trace(path))


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("{", "line 2: is not JSON"),
        ([1], "line 2: is no JSON object"),
        ({k: v for k, v in GOOD.items() if k != "hash_ids"}, "line 2, field hash_ids: missing"),
        ({**GOOD, "input_length": "9"}, "line 2, field input_length: '9' is no count"),
        ({**GOOD, "output_length": -1}, "line 2, field output_length: -1 is no count"),
        ({**GOOD, "output_length": True}, "line 2, field output_length: True is no count"),
        ({**GOOD, "hash_ids": 4}, "line 2, field hash_ids: 4 is no list"),
        ({**GOOD, "hash_ids": [0, 0.5]}, "line 2, field hash_ids: 0.5 is no count"),
        ({**GOOD, "hash_ids": [0]}, "line 2, field hash_ids: has 1 ids; the prompt has 2 blocks"),
        ({**GOOD, "timestamp": float("nan")}, "line 2, field timestamp: nan is no time"),
        ({**GOOD, "timestamp": 3}, "line 2, field timestamp: comes before the row above it"),
    ],
)
def test_read_trace_names_line_of_a_bad_mooncake_row(
    tmp_path: Path, row: Any, problem: str
) -> None:
    path = mooncake(tmp_path, GOOD, row)
    with pytest.raises(TraceError) as caught:
        list(read_trace(path))
    assert str(caught.value).startswith(f"{path}, {problem}")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2024-10-15 00:00:01,x,9,5\n",
            "line 2, field NumImages: 'x' is no count",
        ),
        ("TIMESTAMP,ContextTokens\n", "line 1, field GeneratedTokens: missing"),
        ("", "line 1, field TIMESTAMP: missing"),
        (HEADER + "yesterday,1,2\n", "line 2, field TIMESTAMP: 'yesterday' is no time"),
        (HEADER + "2023-11-16 18:17:03.9,1\n", "line 2, field GeneratedTokens: missing"),
        (HEADER + "2023-11-16 18:17:03.9,-1,2\n", "line 2, field ContextTokens: '-1' is no count"),
        (
            HEADER + "2023-11-16 18:17:03.9,1,2\n2023-11-16 18:17:03,1,2\n",
            "line 3, field TIMESTAMP: comes before",
        ),
    ],
)
def test_read_trace_names_line_of_a_bad_azure_row(tmp_path: Path, text: str, problem: str) -> None:
    path = azure(tmp_path, text)
    with pytest.raises(TraceError) as caught:
        list(read_trace(path))
    assert str(caught.value).startswith(f"{path}, {problem}")


def test_read_trace_rejects_unknown_file_extension() -> None:
    with pytest.raises(TraceError, match=r"a trace ends in \.jsonl or \.csv"):
        read_trace(Path("trace.parquet"))


def test_read_trace_yields_rows_before_a_bad_one(tmp_path: Path) -> None:
    path = mooncake(tmp_path, GOOD, GOOD, "{")
    assert len(list(islice(read_trace(path), 2))) == 2


def test_missing_trace_fails_where_a_folder_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BATON_TRACES", str(tmp_path / "empty"))
    assert trace_folder() == tmp_path / "empty"
    for name, source in SOURCES.items():
        with pytest.raises(pytest.fail.Exception, match=re.escape(source)):
            recorded_trace(name)


def test_missing_traces_are_skipped_where_no_folder_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("BATON_TRACES", raising=False)
    folder = tmp_path / "traces"
    reasons = set()
    for name in SOURCES:
        with pytest.raises(pytest.skip.Exception) as caught:
            recorded_trace(name, folder)
        reasons.add(str(caught.value))
    assert len(reasons) == 1
    folder.mkdir()
    with pytest.raises(pytest.fail.Exception, match="is missing"):
        recorded_trace(name, folder)
    (folder / name).touch()
    assert recorded_trace(name, folder) == folder / name


def test_conversation_trace_has_published_rows_and_blocks(conversation_trace: Path) -> None:
    rows = list(read_trace(conversation_trace))
    assert len(rows) == 12_031
    assert sum(len(row.block_ids or ()) for row in rows) == 288_500
    assert rows[-1].arrival == pytest.approx(3537, abs=1)
    assert max(row.num_prompt_tokens for row in rows) <= 247 * MOONCAKE_BLOCK_SIZE


def test_code_trace_has_published_rows(code_trace: Path) -> None:
    rows = list(read_trace(code_trace))
    assert len(rows) == 8_819
    assert all(row.block_ids is None for row in rows)
