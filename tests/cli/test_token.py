"""`baton token`, and a router that is told of what it makes."""

import json
from pathlib import Path

from typer.testing import CliRunner

from baton.cli.main import app
from baton.serving.tokens import owner_of, read_tokens


def said(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["token", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_token_prints_a_token_and_its_line_for_the_token_file(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    shown = json.loads(said("acme", "--json"))
    path.write_text(f"{shown['line']}\n")
    assert owner_of(shown["token"], read_tokens(path)) == "acme"
    lines = said("acme").splitlines()
    path.write_text(f"{lines[-1]}\n")
    assert owner_of(lines[2].strip(), read_tokens(path)) == "acme"


def test_token_rejects_a_name_that_the_token_file_cannot_hold() -> None:
    result = CliRunner().invoke(app, ["token", "two words"])
    assert result.exit_code == 1
    assert "must be 1 to 64 characters" in result.output
