"""`python -m bench --strict`: aims that are missed."""

import logging
import sys

import pytest

from bench import __main__, engine
from bench.report import Row

MISSED = Row("a case", 4.0, "tokens/s", "the other", 2.0, 2.0, 2.5)
WITHOUT_AIM = Row("another case", 4.0, "tokens/s", "the other", 2.0, 2.0, None)


@pytest.mark.parametrize(
    ("rows", "options", "status"),
    [
        ([MISSED, WITHOUT_AIM], ["--strict"], 2),
        ([MISSED], [], None),
        ([WITHOUT_AIM], ["--strict"], None),
    ],
)
def test_bench_fails_on_missed_aims_when_strict(monkeypatch, capsys, rows, options, status):
    monkeypatch.setattr(logging.root.manager, "disable", 0)  # main() disables warnings for good
    monkeypatch.setattr(engine, "run", lambda _repeats: rows)
    monkeypatch.setattr(sys, "argv", ["bench", "engine", *options])
    if status is None:
        __main__.main()
        return
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == status
    assert "missed: a case is 2.00; expected 2.5" in capsys.readouterr().err
