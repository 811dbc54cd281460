"""`python -m bench`: repeats, and aims that are missed."""

import logging
import sys

import pytest

from bench import __main__, engine
from bench.report import Row

MISSED = Row("a case", 4.0, "tokens/s", "the other", 2.0, 2.0, 2.5)
WITHOUT_AIM = Row("another case", 4.0, "tokens/s", "the other", 2.0, 2.0, None)


@pytest.fixture(autouse=True)
def _warnings_again(monkeypatch):
    monkeypatch.setattr(logging.root.manager, "disable", 0)  # main() disables warnings for good


@pytest.mark.parametrize(
    ("options", "repeats"), [(["engine"], 5), (["all"], 3), (["all", "--repeats", "2"], 2)]
)
def test_bench_repeats_less_when_all_run(monkeypatch, capsys, options, repeats):
    found = []

    def run(given):
        found.append(given)
        return [WITHOUT_AIM]

    monkeypatch.setattr(__main__, "NAMES", ("engine",))
    monkeypatch.setattr(engine, "run", run)
    monkeypatch.setattr(sys, "argv", ["bench", *options])
    __main__.main()
    assert found == [repeats]
    assert "bench engine: 0 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "options", "status"),
    [
        ([MISSED, WITHOUT_AIM], ["--strict"], 2),
        ([MISSED], [], None),
        ([WITHOUT_AIM], ["--strict"], None),
    ],
)
def test_bench_fails_on_missed_aims_when_strict(monkeypatch, capsys, rows, options, status):
    monkeypatch.setattr(engine, "run", lambda _repeats: rows)
    monkeypatch.setattr(sys, "argv", ["bench", "engine", *options])
    if status is None:
        __main__.main()
        return
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == status
    assert "missed: a case is 2.00; expected 2.5" in capsys.readouterr().err
