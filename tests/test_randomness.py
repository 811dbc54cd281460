"""Seeds of random tests."""

import os
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import core, given, settings

from tests.support.randomness import (
    VARIABLE,
    header,
    hypothesis_settings,
    repeat_hint,
    rng_of,
    seed_in,
    seed_of,
)
from tests.support.repository import ROOT

WITHOUT_PLUGINS = {"BATON_LANE_REPORT": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
FAILING = """
def test_draws(rng):
    assert rng.random() == "drawn"
"""


@pytest.mark.parametrize(
    ("environment", "chosen"),
    [({}, None), ({VARIABLE: ""}, None), ({VARIABLE: "0"}, 0), ({VARIABLE: "123"}, 123)],
)
def test_seed_is_read_from_the_environment(environment: dict[str, str], chosen: int | None):
    assert seed_in(environment) == chosen


def test_rng_draws_by_seed_and_test():
    assert rng_of("a", 1).random() == rng_of("a", 1).random()
    assert len({rng_of(node, chosen).random() for node in "ab" for chosen in (0, 1, 12)}) == 6


def test_fixtures_draw_from_seed_of_their_test(request, seed, rng):
    assert seed == seed_of(request.node.nodeid)
    assert rng.random() == rng_of(request.node.nodeid).random()


@pytest.mark.parametrize("chosen", [None, 1, 2])
def test_property_draws_again_what_its_seed_drew(chosen, monkeypatch):
    assert _drawn(chosen, monkeypatch) == _drawn(chosen, monkeypatch)


def test_property_draws_otherwise_for_another_seed(monkeypatch):
    first, second, third = (_drawn(chosen, monkeypatch) for chosen in (None, 1, 2))
    assert first != second != third != first


def _drawn(chosen: int | None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the examples of a property in a session of this seed."""
    monkeypatch.setattr(core, "global_force_seed", chosen)
    examples = []

    @settings(**hypothesis_settings(chosen), max_examples=10)
    @given(st.integers())
    def draw(number: int) -> None:
        examples.append(number)

    draw()
    return examples


def test_header_names_the_command_that_repeats():
    assert "BATON_TEST_SEED=123 make nightly" in header(123)
    assert "derandomised" in header(None)


def test_failure_shows_the_seed_that_repeats_it(tmp_path: Path):
    (tmp_path / "test_it.py").write_text(FAILING)

    options = ["-p", "tests.conftest", "-p", "no:cacheprovider", "-c", os.devnull]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--rootdir", tmp_path, tmp_path],
        cwd=ROOT,
        env={**os.environ, VARIABLE: "123", **WITHOUT_PLUGINS},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == 1, done.stdout + done.stderr
    assert header(123) in done.stdout
    assert repeat_hint("test_it.py::test_draws", 123) in done.stdout
    assert str(rng_of("test_it.py::test_draws", 123).random()) in done.stdout
