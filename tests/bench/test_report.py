"""What benchmarks print."""

import json
from itertools import count

from bench.report import Row, interleaved, show

ROW = Row("case", 6.0, "tokens/s", "the other", 2.0, 3.0, 2.5)


def test_a_row_holds_when_its_ratio_reaches_the_aim():
    assert ROW.holds is True
    assert Row("case", 4.0, "tokens/s", "the other", 2.0, 2.0, 2.5).holds is False
    assert Row("case", 4.0, "tokens/s", "the other", 2.0, 2.0, None).holds is None


def test_json_has_one_object_a_line_with_the_tables_columns(capsys):
    show([ROW, ROW], as_json=True)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 2
    assert list(lines[0]) == [
        "case", "value", "unit", "against", "reference", "ratio", "aim", "holds",
    ]  # fmt: skip


def test_contenders_take_turns_and_the_median_counts():
    clock = count()
    order: list[str] = []

    def contender(name: str) -> float:
        order.append(name)
        return float(next(clock))

    medians = interleaved({"a": lambda: contender("a"), "b": lambda: contender("b")}, 3)
    assert order == ["a", "b"] * 3
    assert medians == {"a": 2.0, "b": 3.0}
