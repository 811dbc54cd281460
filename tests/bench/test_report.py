"""Reports of benchmarks."""

import json
from itertools import count

from bench.report import Row, interleaved, show

ROW = Row("case", 6.0, "tokens/s", "the other", 2.0, 3.0, 2.5)


def test_row_holds_when_its_ratio_reaches_the_aim():
    assert ROW.holds is True
    assert Row("case", 4.0, "tokens/s", "the other", 2.0, 2.0, 2.5).holds is False
    assert Row("case", 4.0, "tokens/s", "the other", 2.0, 2.0, None).holds is None


def test_show_prints_one_json_object_per_row(capsys):
    show([ROW, ROW], as_json=True)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 2
    assert list(lines[0]) == [
        "case", "value", "unit", "against", "reference", "ratio", "aim", "holds",
    ]  # fmt: skip


def test_interleaved_alternates_contenders_and_takes_medians():
    clock = count()
    order: list[str] = []

    def contender(name: str) -> float:
        order.append(name)
        return float(next(clock))

    medians = interleaved({"a": lambda: contender("a"), "b": lambda: contender("b")}, 3)
    assert order == ["a", "b"] * 3
    assert medians == {"a": 2.0, "b": 3.0}
