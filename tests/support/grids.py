"""Grids of parameters: any two values meet in the lanes of every commit, all in `make nightly`."""

import enum
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest

Case = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def grid(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test over the product of axes of parameters.

    Few cases, in which any two values of two axes meet, keep their lane; all others are
    nightly's. A value may be a `pytest.param` with marks (`mostly_slow`), which its cases get;
    among themselves the values without marks meet in cases without marks.
    """
    values = {name: [_as_param(value) for value in axis] for name, axis in axes.items()}
    places = {name: range(len(axis)) for name, axis in values.items()}
    quick = {name: [i for i in places[name] if not axis[i].marks] for name, axis in values.items()}
    chosen = pairwise(**quick) if all(quick.values()) else []
    chosen += pairwise(chosen, **places)
    rows = []
    for place in itertools.product(*places.values()):
        case = dict(zip(values, place, strict=True))
        rows.append(_row(values, case, nightly=case not in chosen))
    return pytest.mark.parametrize(tuple(values), rows)


def nightly(values: Iterable[object]) -> list[Any]:
    """Returns parameters whose cases are nightly's."""
    return [pytest.param(value, marks=pytest.mark.nightly) for value in values]


def pairwise(known: Sequence[Case] = (), /, **axes: Sequence[Any]) -> list[Case]:
    """Returns few cases in which any two values of two axes meet that do not in `known` cases."""
    names, dice = list(axes), random.Random(0)
    missing = set(_pairs(axes))
    missing.difference_update(*(_pairs_of(case, names) for case in known))
    cases = []
    while missing:
        case = dict(min(missing, key=repr))
        for name in names:
            if name not in case:
                gains = [(_gain(case, name, v, missing), dice.random()) for v in axes[name]]
                case[name] = axes[name][gains.index(max(gains))]
        missing.difference_update(_pairs_of(case, names))
        cases.append({name: case[name] for name in names})
    return cases


def _pairs(axes: dict[str, Sequence[Any]]) -> Iterator[Pair]:
    for first, second in itertools.combinations(axes, 2):
        for one, other in itertools.product(axes[first], axes[second]):
            yield (first, one), (second, other)


def _pairs_of(case: Case, names: Iterable[str]) -> Iterator[Pair]:
    return itertools.combinations(((name, case[name]) for name in names), 2)


def _gain(case: Case, name: str, value: Any, missing: set[Pair]) -> int:
    """Returns how many missing pairs the value would add to the case."""
    pairs = [((name, value), other) for other in case.items()]
    return sum(pair in missing or pair[::-1] in missing for pair in pairs)


def _as_param(value: Any) -> Any:
    is_param = isinstance(value, type(pytest.param()))
    return value if is_param else pytest.param(value)


def _row(values: dict[str, list[Any]], case: dict[str, int], *, nightly: bool) -> Any:
    params = [values[name][i] for name, i in case.items()]
    marks = [mark for param in params for mark in param.marks]
    if nightly:
        marks.append(pytest.mark.nightly)
    ids = [_id(name, i, values[name][i]) for name, i in case.items()]
    return pytest.param(*(param.values[0] for param in params), marks=marks, id="-".join(ids))


def _id(name: str, place: int, param: Any) -> str:
    """Returns what pytest would call the value: its text, or its axis and place."""
    (value,) = param.values
    plain = isinstance(value, str | int | float | enum.Enum | None)
    return param.id or (str(value) if plain else f"{name}{place}")
