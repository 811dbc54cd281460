"""Names in the README: targets, commands, extras."""

import re
import tomllib

from tests.support.documents import OUTPUTS, README
from tests.support.repository import ROOT

METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_every_target_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = re.findall(r"`make ([a-z-]+)`", README)
    assert set(named) >= {"test", "dist", "images"}
    assert not set(named) - set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert "make demo" in dict(OUTPUTS["README.md"])
    assert re.search(r"^demo:.*\n\t\$\(BIN\)/baton demo$", makefile, re.MULTILINE)


def test_outputs_are_those_of_commands_that_tests_run():
    """By tests/e2e/test_documents.py, tests/cli/test_demo.py and tests/cli/test_up.py."""
    shown = [(page, command) for page, found in OUTPUTS.items() for command, _ in found]
    assert [
        (page, command)
        for page, command in shown
        if command != "make demo" and not re.search(r"(^|[/ ])baton ", command)
    ] == [], "no test runs these: show no output, and leave out the $"


def test_every_command_exists():
    named = set(re.findall(r"`baton ([a-z][a-z-]*)", README))
    assert named >= {"up", "generate", "explain", "simulate"}
    assert not named - METADATA["entry-points"]["baton.commands"].keys()


def test_every_extra_is_listed():
    extras = METADATA["optional-dependencies"].keys() - {"test", "dev"}
    assert set(re.findall(r"`\[([\w-]+)\]`", README)) == extras
    wheel = f"{METADATA['name'].replace('-', '_')}-{METADATA['version']}-py3-none-any.whl"
    assert f"pip install 'dist/{wheel}[local]'" in README
