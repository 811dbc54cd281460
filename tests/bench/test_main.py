"""`python -m bench`: repeats, and aims that are missed."""

import logging
from functools import partial

import pytest

from bench.__main__ import main
from bench.report import Row

MISSED = Row("a case", 4.0, "tokens/s", "the other", 2.0, 2.0, 2.5)
WITHOUT_AIM = Row("another case", 4.0, "tokens/s", "the other", 2.0, 2.0, None)


@pytest.fixture(autouse=True)
def _warnings_again():
    yield
    logging.disable(logging.NOTSET)  # main() disables warnings for good


@pytest.mark.parametrize(
    ("options", "repeats"), [(["engine"], 5), (["all"], 3), (["all", "--repeats", "2"], 2)]
)
def test_bench_repeats_less_when_all_run(capsys, options, repeats):
    found = []

    def run(given):
        found.append(given)
        return [WITHOUT_AIM]

    main(options, names=("engine",), benchmark=lambda _name: run)
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
def test_bench_fails_on_missed_aims_when_strict(capsys, rows, options, status):
    run = partial(main, ["engine", *options], benchmark=lambda _name: lambda _repeats: rows)
    if status is None:
        run()
        return
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == status
    assert "missed: a case is 2.00; expected 2.5" in capsys.readouterr().err
