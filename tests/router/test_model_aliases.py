"""Aliases of models: the file, and the draw of a weighted alias."""

import logging
import os
from collections import Counter
from pathlib import Path

import pytest

from baton.errors import FailedPreconditionError
from baton.rpc.watched_files import INTERVAL_SECONDS, WatchedFiles
from baton_router.served.aliases import drawn, heaviest, read_aliases

MODELS = ("a", "b", "c")
IDS = [f"request-{number}" for number in range(10_000)]


def read(folder: Path, text: str, name: str = "aliases.toml") -> dict[str, dict[str, float]]:
    file = folder / name
    file.write_text(text)
    return {alias: dict(weights) for alias, weights in read_aliases(file, MODELS).items()}


def test_aliases_are_read_from_toml_and_json(tmp_path):
    expected = {"x": {"a": 1.0}, "y": {"a": 90, "b": 10}}
    assert read(tmp_path, 'x = "a"\ny = { a = 90, b = 10 }') == expected
    assert read(tmp_path, 'x = "a"\n[y]\na = 90\nb = 10') == expected
    assert read(tmp_path, '{"x": "a", "y": {"a": 90, "b": 10}}', "aliases.json") == expected
    assert read(tmp_path, "") == {}


BAD = {
    "no TOML": ("x = ", "cannot read the aliases"),
    "an unknown model": ('x = "d"', "names the model 'd'; expected 'a', 'b', 'c'"),
    "an alias of an alias": ('x = "a"\ny = "x"', "names the model 'x'"),
    "a model's own name": ('b = "a"', "b is the name of a model"),
    "no weights": ("x = {}", "expected a model, or weights"),
    "a number": ("x = 1", "expected a model, or weights"),
    "a weight of nothing": ("x = { a = 0 }", "the weight of 'a' is 0; expected a number above 0"),
    "a negative weight": ("x = { a = -1 }", "the weight of 'a' is -1"),
    "an infinite weight": ("x = { a = inf }", "the weight of 'a' is inf"),
    "a weight that is no number": ('x = { a = "1" }', "the weight of 'a' is '1'"),
    "a truth": ("x = { a = true }", "the weight of 'a' is True"),
}


@pytest.mark.parametrize(("text", "problem"), BAD.values(), ids=BAD)
def test_alias_file_is_refused_with_the_reason(tmp_path, text, problem):
    with pytest.raises(FailedPreconditionError) as caught:
        read(tmp_path, text)
    assert problem in str(caught.value)
    assert "aliases.toml" in str(caught.value)


def test_alias_file_is_refused_if_json_is_no_object(tmp_path):
    for text in ("[]", '"a"', "{", "[" * 100_000):
        with pytest.raises(FailedPreconditionError):
            read(tmp_path, text, "aliases.json")
    with pytest.raises(FailedPreconditionError, match="cannot read"):
        read_aliases(tmp_path / "missing.toml", MODELS)


def test_broken_alias_file_keeps_earlier_ones_and_logs_once(tmp_path, caplog):
    file = tmp_path / "aliases.toml"
    file.write_text('x = "a"')
    now = 0.0
    watched = WatchedFiles([file], lambda: read_aliases(file, MODELS), clock=lambda: now)
    caplog.set_level(logging.INFO)
    for number, (text, expected) in enumerate((("x = ", "a"), ('x = "b"', "b")), 1):
        file.write_text(text)
        os.utime(file, ns=(number, number))
        for _ in range(3):
            now += 2 * INTERVAL_SECONDS
            assert watched.current() == {"x": {expected: 1.0}}
    assert caplog.text.count("earlier content is kept") == 1


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        ({"a": 90, "b": 10}, {"a": 8980, "b": 1020}),
        ({"a": 1, "b": 1, "c": 2}, {"a": 2537, "b": 2474, "c": 4989}),
        ({"a": 0.001, "b": 0.999}, {"a": 11, "b": 9989}),
    ],
)
def test_drawn_models_have_their_weights_over_many_ids(weights, counts):
    found = Counter(drawn(weights, "alias", request_id) for request_id in IDS)
    assert dict(found) == counts


def test_drawn_model_depends_on_request_id_and_alias_alone():
    weights = {"a": 1, "b": 1}
    assert [drawn(weights, "x", i) for i in IDS[:8]] == list("bbbabaaa")
    scaled = {"a": 50.0, "b": 50.0}
    assert [drawn(weights, "x", i) for i in IDS] == [drawn(scaled, "x", i) for i in IDS]
    assert [drawn(weights, "x", i) for i in IDS] != [drawn(weights, "y", i) for i in IDS]


def test_growing_canary_takes_requests_and_gives_none_back():
    before = [drawn({"a": 90, "b": 10}, "x", i) for i in IDS]
    after = [drawn({"a": 70, "b": 30}, "x", i) for i in IDS]
    assert all(now == "b" for was, now in zip(before, after, strict=True) if was == "b")


def test_drawn_model_of_any_id_is_one_of_the_alias():
    for request_id in ("", "\0", "\ud800", "é" * 64):
        assert drawn({"a": 1e-300, "b": 1e300}, "x", request_id) in {"a", "b"}


def test_heaviest_model_is_the_first_of_several():
    assert heaviest({"a": 1, "b": 3, "c": 3}) == "b"
