"""Whatever arrives in place of a message: no crash, and no memory for a length it only claims."""

import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fuzz_targets import TARGETS, Target, check
from tests.support.repository import ROOT

NUM_RUNS = 10_000
MOST_SECONDS = 10
MOST_BYTES = 2**20

# The largest numbers, which a careless reader would take for a size.
NUMBERS = (b"\xff" * 9 + b"\x01", b"\xff\xff\xff\xff\x0f", b"\xff\xff\xff\x7f", b"\x00")


@st.composite
def damaged(draw: st.DrawFn, target: Target) -> bytes:
    """A valid input with some bytes changed, left out, doubled or put in, or its end cut off."""
    content = bytearray(draw(st.sampled_from(target.seeds)))
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(content)))
        end = min(len(content), place + draw(st.integers(1, 8)))
        match draw(st.integers(0, 4)):
            case 0:
                content[place:end] = draw(st.binary(min_size=end - place, max_size=end - place))
            case 1:
                content[place:place] = draw(st.binary(max_size=8))
            case 2:
                content[place:place] = draw(st.sampled_from(NUMBERS))
            case 3:
                content[place:place] = content[place:end]
            case 4:
                del content[place:end]
    return bytes(content[: draw(st.integers(0, len(content)))] if draw(st.booleans()) else content)


@pytest.mark.parametrize("name", TARGETS)
def test_fuzz_target_reads_its_seeds(name):
    for seed in TARGETS[name].seeds:
        TARGETS[name].read(seed)


@pytest.mark.parametrize("name", TARGETS)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_fuzz_target_reads_or_rejects_a_damaged_message(name, data):
    content = data.draw(damaged(TARGETS[name]))
    tracemalloc.start()
    try:
        check(TARGETS[name], content)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MOST_BYTES


@pytest.mark.parametrize("name", TARGETS)
@given(content=st.binary(max_size=200))
@settings(deadline=None, max_examples=40)
def test_fuzz_target_reads_or_rejects_any_bytes(name, content):
    check(TARGETS[name], content)


@pytest.mark.nightly
@pytest.mark.parametrize("name", TARGETS)
def test_fuzz_target_survives_atheris(name, tmp_path: Path):
    """In a process of its own; where atheris is missing, that is the failure."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i, seed in enumerate(TARGETS[name].seeds):
        (corpus / str(i)).write_bytes(seed)
    done = subprocess.run(
        [
            *[sys.executable, "-m", "tests.fuzz.atheris_run", name, str(corpus)],
            *[f"-runs={NUM_RUNS}", f"-max_total_time={MOST_SECONDS}", "-timeout=10"],
            *["-rss_limit_mb=4096", f"-artifact_prefix={tmp_path}/", "-seed=1", "-max_len=4096"],
        ],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = re.search(r"Done (\d+) runs", done.stderr)
    assert found, done.stderr[-4000:]
    assert int(found[1]) > 100, "it has hardly run"
