"""Settings from flags, environment variables and a configuration file.

`max_message_bytes` is `--max-message-bytes`, `BATON_MAX_MESSAGE_BYTES` and `max_message_bytes:`.
Precedence: flag, environment variable, file, default.
"""

import difflib
import os
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import (
    CliSettingsSource,
    EnvSettingsSource,
    SettingsError,
    YamlConfigSettingsSource,
)
from yaml import YAMLError

from baton.settings.groups import Settings, flag_of, variable_of
from baton.settings.other_servers import advice_on

_Settings = TypeVar("_Settings", bound=Settings)
_Values = dict[str, Any]


def load(
    settings_class: type[_Settings],
    argv: Sequence[str] | None = None,
    program: str | None = None,
) -> _Settings:
    """Returns the settings from flags, environment and file.

    `argv`: the arguments after `program`; None: both as in `sys.argv`.

    Invalid settings end the process with code 2 and a sentence on stderr; `--help` with code 0.
    """
    program = program or Path(sys.argv[0]).name
    try:
        return parse(settings_class, sys.argv[1:] if argv is None else argv, program)
    except SettingsError as error:
        print(f"{program}: {error}", file=sys.stderr)
        sys.exit(2)


def parse(
    settings_class: type[_Settings],
    argv: Sequence[str],
    program: str,
    ignored: Collection[str] = (),
) -> _Settings:
    """Returns the settings as `load` does, without the environment variables in `ignored`.

    Raises `SettingsError` with a sentence about each that is invalid.
    """
    command_line = CliSettingsSource[ArgumentParser](
        settings_class, cli_prog_name=program, parse_args_method=_parse_args
    )
    _group_help(settings_class, command_line.root_parser)
    command_line.root_parser.epilog = (
        f"Example: {program} --redis-url redis://127.0.0.1:6379/0 --model tiny"
    )
    command_line.root_parser.add_argument(
        "--config",
        metavar="FILE",
        default=SUPPRESS,
        help="YAML file of settings; flags and environment variables override it. "
        f"[env: {variable_of('config')}]",
    )
    old_names = _OldNames(settings_class.OLD_NAMES, program)
    flags = command_line(args=old_names.in_flags(argv))()
    environment = {
        field: value
        for field, value in (
            old_names.in_environment() | EnvSettingsSource(settings_class, env_ignore_empty=True)()
        ).items()
        if variable_of(field) not in ignored
    }
    path = command_line.env_vars.get("config") or os.environ.get(variable_of("config"))
    file = _from_file(settings_class, Path(path), old_names) if path else {}
    try:
        return settings_class.model_validate({**file, **environment, **flags})
    except ValidationError as error:
        sentences = [_sentence(details, flags, environment) for details in error.errors()]
        raise SettingsError("; ".join(sentences)) from error


def _ungrouped(settings_class: type[Settings], path: Path, values: _Values) -> _Values:
    """Returns the values of a file with those of groups under their own names."""
    flat: _Values = {}
    for key, value in values.items():
        group = settings_class.GROUPS.get(key)
        if group is None or not isinstance(value, dict):
            flat[key] = value
            continue
        known = {field.name: name for name, field in group.names.items()}
        for inner, given in value.items():
            if inner not in known:
                raise SettingsError(_unknown(f"{path}: key {key}.", str(inner), known))
            flat[known[inner]] = given
    return flat


class _OldNames:
    """Replaces old names of settings by the present ones, with a line on stderr for each."""

    def __init__(self, names: Mapping[str, str], program: str) -> None:
        self._names = names
        self._program = program

    def in_flags(self, argv: Sequence[str]) -> list[str]:
        present = {flag_of(old): flag_of(new) for old, new in self._names.items()}
        return [
            self._replaced(name, present[name]) + equals + value if name in present else argument
            for argument in argv
            for name, equals, value in [argument.partition("=")]
        ]

    def in_environment(self) -> _Values:
        return {
            new: os.environ[variable]
            for old, new in self._names.items()
            if os.environ.get(variable := variable_of(old))
            and self._replaced(variable, variable_of(new))
        }

    def in_file(self, values: _Values) -> _Values:
        return {
            self._replaced(key, self._names[key]) if key in self._names else key: value
            for key, value in values.items()
        }

    def _replaced(self, old: str, new: str) -> str:
        sentence = f"{old} is now {new}; use that name before the next release"
        print(f"{self._program}: {sentence}", file=sys.stderr)
        return new


def _parse_args(parser: ArgumentParser, argv: Sequence[str]) -> Namespace:
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        known = parser._option_string_actions
        raise SettingsError(_unknown("flag", unknown[0].partition("=")[0], known))
    return given


def _group_help(settings_class: type[Settings], parser: ArgumentParser) -> None:
    """Puts the flags of each group under a heading of their own."""
    others = parser._optionals._group_actions
    for name, group in settings_class.GROUPS.items():
        flags = {flag_of(setting) for setting in group.names}
        section = parser.add_argument_group(name)
        section._group_actions += [a for a in others if flags & set(a.option_strings)]
    for section in parser._action_groups[2:]:
        others[:] = [action for action in others if action not in section._group_actions]


def _from_file(settings_class: type[Settings], path: Path, old_names: "_OldNames") -> _Values:
    """Returns the file's keys and values. Raises `SettingsError`: no file, no YAML, unknown key."""
    if not path.is_file():  # the source would take it for an empty one
        raise SettingsError(f"cannot read {path}: no such file")
    try:
        values = YamlConfigSettingsSource(settings_class, path)()
    # The source takes the content for a mapping with strings as keys, unchecked.
    except (OSError, YAMLError, AttributeError, TypeError, ValueError) as error:
        problem = " ".join(str(error).split())
        raise SettingsError(f"cannot read {path} as YAML like `port: 50051`: {problem}") from error
    values = old_names.in_file(_ungrouped(settings_class, path, values))
    for key in values:
        if key not in settings_class.model_fields:
            raise SettingsError(_unknown(f"{path}: key", key, settings_class.model_fields))
    return values


def _sentence(details: ErrorDetails, flags: _Values, environment: _Values) -> str:
    """Returns an error that names its source: flag, environment variable or key of the file."""
    problem = details["msg"].removeprefix("Value error, ").replace("Input should", "must", 1)
    problem = problem.removeprefix(f"is {details['input']!r}; ")  # said below
    if not details["loc"]:  # an error of several fields, which names them itself
        return problem
    field = str(details["loc"][0])
    flag, variable, key = flag_of(field), variable_of(field), f"{field} in the file"
    if details["type"] == "missing":
        return f"{flag} is needed (or {variable}, or {key})"
    source = flag if field in flags else variable if field in environment else key
    value = flags.get(field, environment.get(field, details["input"]))
    return f"{source} is {value!r}; {problem[:1].lower() + problem[1:]}"


def _unknown(kind: str, given: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(given, known, n=1)
    hint = advice_on(given)
    if not hint:
        hint = f"did you mean {close[0]}?" if close else "--help lists what there is"
    space = "" if kind.endswith(".") else " "
    return f"{kind}{space}{given} is unknown; {hint}"
