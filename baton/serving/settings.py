"""Settings: one field is one flag, one environment variable and one key of the configuration file.

`max_message_bytes` is `--max-message-bytes`, `BATON_MAX_MESSAGE_BYTES` and `max_message_bytes:`.
Precedence: flag, environment variable, file, default. Independent of roles: these subclass
`ServingSettings` and give each field a description.
"""

import dataclasses
import difflib
import os
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, create_model, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    YamlConfigSettingsSource,
)
from yaml import YAMLError

from baton.rpc.tls import Tls
from baton.serving.grpc.access import WORKER_NAME
from baton.serving.grpc.channels import MAX_MESSAGE_BYTES
from baton.serving.listening import is_loopback
from baton.serving.other_servers import advice_on

ENV_PREFIX = "BATON_"


def _upper(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Group of settings: the fields of a frozen dataclass that `baton.setting.setting` made.

    With the prefix `images_` the field `max_bytes` is `--images-max-bytes`,
    `BATON_IMAGES_MAX_BYTES`, and in a file either `images_max_bytes: 1000` or
    `images: {max_bytes: 1000}`.
    """

    of: type
    prefix: str = ""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Defaults other than those of the dataclass, by field."""

    @property
    def names(self) -> dict[str, dataclasses.Field[Any]]:
        """Fields by the names of their settings."""
        return {self.prefix + f.name: f for f in dataclasses.fields(self.of) if f.metadata}

    def values(self, settings: "ServingSettings") -> dict[str, Any]:
        """Returns the values of the fields."""
        return {field.name: getattr(settings, name) for name, field in self.names.items()}


def grouped(base: "type[ServingSettings]", **groups: Group) -> Any:
    """Returns settings that have those of the groups, too."""
    fields: Any = {
        name: (field.type, Field(group.defaults.get(field.name, field.default), **field.metadata))
        for group in groups.values()
        for name, field in group.names.items()
    }
    made: Any = create_model(base.__name__, __base__=base, **fields)
    made.GROUPS = {**base.GROUPS, **groups}
    return made


class ServingSettings(BaseSettings):
    """Settings that every serving process has.

    The constructor uses its arguments and defaults alone; `load` reads flags, environment and
    file.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        extra="forbid",
        frozen=True,
        cli_exit_on_error=False,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_kebab_case=True,
        cli_show_env_vars=True,
    )

    GROUPS: ClassVar[Mapping[str, "Group"]] = {}
    OLD_NAMES: ClassVar[Mapping[str, str]] = {}
    """Fields by the names that they had in the release before; these still work, with a warning."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(0, ge=0, le=65535, description="Port to listen on; 0 takes any free one.")
    admin_host: str | None = Field(
        None, description="Address to listen on for administration. Unset: --host."
    )
    admin_port: int = Field(
        0, ge=0, le=65535, description="Port for administration; 0 takes any free one."
    )
    advertise_host: str | None = Field(
        None,
        description="Host at which other processes reach this one; needed if --host is a "
        "wildcard. Unset: --host.",
    )
    tls_cert: str | None = Field(
        None,
        description="PEM file of this process's certificate chain, for connections in both "
        "directions. Unset: no TLS.",
    )
    tls_key: str | None = Field(None, description="PEM file of the private key of --tls-cert.")
    tls_ca: str | None = Field(
        None,
        description="PEM file of the trusted certificate authorities, for clients and servers.",
    )
    insecure: bool = Field(
        False,
        description="Listen without TLS on a --host that other machines reach: every host on that "
        "network can then read and change all traffic, and send requests.",
    )
    redis_url: str | None = Field(
        None,
        description="Redis for shared state, such as redis://127.0.0.1:6379/0; also "
        "redis+sentinel://host,host/service, redis+cluster://host,host, rediss (TLS) for redis in "
        "each, and unix:///path. Append ?prefix=NAME to keep several clusters on one Redis apart. "
        "Give a URL with a password as BATON_REDIS_URL, not as a flag.",
    )
    redis_password: str | None = Field(
        None,
        repr=False,
        description="Password of --redis-url, as it is: nothing in it is escaped. Give it as "
        "BATON_REDIS_PASSWORD, not as a flag. Unset: the one in the URL.",
    )
    redis_signing_key_file: str | None = Field(
        None,
        description="File of keys that sign what this process writes to Redis: one of 32 "
        "characters or more a line, as `openssl rand -hex 32` makes them. The first one signs, all "
        "of them verify; records, events and gossip that none has signed are ignored. Give all "
        "routers and workers one file. Unset: nothing is signed or verified.",
    )
    drain_timeout_s: float = Field(
        30.0,
        ge=0,
        description="Timeout of a graceful shutdown: seconds for requests in flight to end.",
    )
    reflection: bool = Field(False, description="Serve gRPC server reflection.")
    metrics: bool = Field(True, description="Serve metrics over HTTP, at /metrics.")
    metrics_port: int = Field(
        0, ge=0, le=65535, description="Port for metrics, on --host; 0 takes any free one."
    )
    log_level: Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], BeforeValidator(_upper)] = (
        Field("INFO", description="Lowest severity of log lines.")
    )
    log_format: Literal["human", "json"] = Field(
        "human", description="Format of log lines: plain text or JSON."
    )
    max_message_bytes: int = Field(
        MAX_MESSAGE_BYTES,
        ge=4096,
        le=2**31 - 1,
        description="Maximum bytes of a gRPC message, in both directions.",
    )
    max_header_bytes: int = Field(
        16 * 2**10, ge=8192, description="Maximum bytes of a gRPC call's metadata."
    )
    max_connections: int = Field(
        1024,
        ge=1,
        description="Maximum gRPC connections of each port; further ones are closed at once.",
    )
    max_concurrent_streams: int = Field(
        1024,
        ge=1,
        description="Maximum concurrent calls of one gRPC connection; more wait at the client.",
    )
    max_connection_idle_s: float = Field(
        3600.0,
        gt=0,
        description="Idle timeout of a gRPC connection in seconds. Its client reconnects for the "
        "next call.",
    )

    handshake_timeout_s: float = Field(
        20.0,
        gt=0,
        description="Timeout in seconds for the handshake of a gRPC connection, from its first "
        "byte to the client's settings.",
    )

    @model_validator(mode="after")
    def _is_guarded(self) -> Self:
        files = {"tls_cert": self.tls_cert, "tls_key": self.tls_key, "tls_ca": self.tls_ca}
        given = [_flag(name) for name, path in files.items() if path]
        missing = [_flag(name) for name, path in files.items() if not path]
        if given and missing:
            raise ValueError(f"{' and '.join(given)} also needs {' and '.join(missing)}")
        for name, host in {"host": self.host, "admin_host": self.admin_host or self.host}.items():
            if missing and not self.insecure and not is_loopback(host):
                raise ValueError(
                    f"{_flag(name)} is {host!r}, which other machines can reach, and there is no "
                    "TLS; give --tls-cert, --tls-key and --tls-ca, or --insecure if every host on "
                    "that network is trusted"
                )
        return self

    def group(self, of: type[_T], name: str, **others: object) -> _T:
        """Returns the settings of a group as its dataclass. `others`: fields that are no settings
        of the group."""
        return of(**self.GROUPS[name].values(self), **others)

    @property
    def tls(self) -> Tls | None:
        """TLS files of this process; None: plaintext."""
        if not (self.tls_ca and self.tls_cert and self.tls_key):
            return None
        return Tls(self.tls_ca, self.tls_cert, self.tls_key)

    @property
    def tls_to_workers(self) -> Tls | None:
        """TLS of connections to workers, verified by `WORKER_NAME`: workers' addresses change."""
        return None if self.tls is None else dataclasses.replace(self.tls, server_name=WORKER_NAME)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003
        init_settings: PydanticBaseSettingsSource,
        *_: PydanticBaseSettingsSource,
        **__: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


_Settings = TypeVar("_Settings", bound=ServingSettings)
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
        f"[env: {_variable('config')}]",
    )
    old_names = _OldNames(settings_class.OLD_NAMES, program)
    flags = command_line(args=old_names.in_flags(argv))()
    environment = {
        field: value
        for field, value in (
            old_names.in_environment() | EnvSettingsSource(settings_class, env_ignore_empty=True)()
        ).items()
        if _variable(field) not in ignored
    }
    path = command_line.env_vars.get("config") or os.environ.get(_variable("config"))
    file = _from_file(settings_class, Path(path), old_names) if path else {}
    try:
        return settings_class.model_validate({**file, **environment, **flags})
    except ValidationError as error:
        sentences = [_sentence(details, flags, environment) for details in error.errors()]
        raise SettingsError("; ".join(sentences)) from error


def _ungrouped(settings_class: type[ServingSettings], path: Path, values: _Values) -> _Values:
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
        present = {_flag(old): _flag(new) for old, new in self._names.items()}
        return [
            self._replaced(name, present[name]) + equals + value if name in present else argument
            for argument in argv
            for name, equals, value in [argument.partition("=")]
        ]

    def in_environment(self) -> _Values:
        return {
            new: os.environ[variable]
            for old, new in self._names.items()
            if os.environ.get(variable := _variable(old))
            and self._replaced(variable, _variable(new))
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


def _group_help(settings_class: type[ServingSettings], parser: ArgumentParser) -> None:
    """Puts the flags of each group under a heading of their own."""
    others = parser._optionals._group_actions
    for name, group in settings_class.GROUPS.items():
        flags = {_flag(setting) for setting in group.names}
        section = parser.add_argument_group(name)
        section._group_actions += [a for a in others if flags & set(a.option_strings)]
    for section in parser._action_groups[2:]:
        others[:] = [action for action in others if action not in section._group_actions]


def _from_file(
    settings_class: type[ServingSettings], path: Path, old_names: "_OldNames"
) -> _Values:
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
    flag, variable, key = _flag(field), _variable(field), f"{field} in the file"
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


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def _variable(field: str) -> str:
    return ENV_PREFIX + field.upper()
