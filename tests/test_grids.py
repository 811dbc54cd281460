"""Grids of parameters: pairs per commit, the product in `make nightly`."""

import itertools

import pytest

from tests.support.engine.engines import mostly_slow
from tests.support.grids import grid

AXES = {"size": [1, 2, 3, 4], "kind": ["a", "b", "c"], "changes": [{}, {"x": 1}], "on": [0, None]}


def cases_of(mark: pytest.MarkDecorator) -> dict[str, tuple[tuple[object, ...], set[str]]]:
    """Returns the values and marks of each case by its id."""
    _, params = mark.args
    return {param.id: (param.values, {m.name for m in param.marks}) for param in params}


def pairs_of(cases: list[tuple[object, ...]]) -> set[str]:
    return {str(pair) for case in cases for pair in itertools.combinations(enumerate(case), 2)}


def test_grid_has_the_product_and_any_pair_outside_nightly():
    cases = cases_of(grid(**AXES))
    product = list(itertools.product(*AXES.values()))
    assert [values for values, _ in cases.values()] == product
    daily = [values for values, marks in cases.values() if "nightly" not in marks]
    assert pairs_of(daily) == pairs_of(product)
    assert len(daily) <= 14 < len(product)
    assert list(cases)[:3] == ["1-a-changes0-0", "1-a-changes0-None", "1-a-changes1-0"]
    assert cases == cases_of(grid(**AXES))


def test_grid_makes_quick_values_meet_in_quick_cases():
    slow = {"size": mostly_slow([1, 2, 3, 4], 2, 3), "kind": mostly_slow(["a", "b", "c"], "a")}
    cases = cases_of(grid(**AXES | slow)).values()
    quick = [values for values, marks in cases if not marks]
    assert pairs_of(quick) == pairs_of(itertools.product([2, 3], "a", *list(AXES.values())[2:]))
    assert all("slow" in m for values, m in cases if values[0] in (1, 4) or values[1] != "a")


def test_grid_leaves_no_quick_case_where_an_axis_is_slow():
    cases = cases_of(grid(size=[1, 2], kind=mostly_slow(["a", "b"]))).values()
    assert [marks for _, marks in cases] == [{"slow"}] * 4
