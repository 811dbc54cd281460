"""Settings: one field is one flag, one environment variable and one key of the configuration file.

`max_message_bytes` is `--max-message-bytes`, `BATON_MAX_MESSAGE_BYTES` and `max_message_bytes:`.
Precedence: flag, environment variable, file, default. Independent of roles: these subclass
`ServingSettings` and give each field a description.
"""

import argparse
import dataclasses
import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Self, TypeVar

import yaml
from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from baton.serving.access import WORKER_NAME
from baton.serving.channels import MAX_MESSAGE_BYTES
from baton.serving.listening import is_loopback
from baton.tls import Tls

ENV_PREFIX = "BATON_"


def _split(value: object) -> object:
    if not isinstance(value, str):
        return value
    return [part.strip() for part in value.split(",") if part.strip()]


def _upper(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


CommaSeparated = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
"""Field of several strings: "a,b" as flag and variable, also a list in the file."""


class ServingSettings(BaseSettings):
    """Settings that every serving process has.

    The constructor uses its arguments and defaults alone; `load` reads flags, environment and
    file.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True
    )

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
        description="Host by which others reach this process; needed where --host is a wildcard. "
        "Unset: --host.",
    )
    tls_cert: str | None = Field(
        None,
        description="PEM file of this process's certificate, with which it serves and connects to "
        "others, and of what leads to the authority that signed it. Unset: no TLS.",
    )
    tls_key: str | None = Field(None, description="PEM file of the private key of --tls-cert.")
    tls_ca: str | None = Field(
        None,
        description="PEM file of the authorities whose certificates are believed, from others and "
        "from this process.",
    )
    insecure: bool = Field(
        False,
        description="Listen without TLS where other machines reach --host: every host on that "
        "network can then read and change all traffic, and send requests.",
    )
    redis_url: str | None = Field(
        None,
        description="Redis to share state over, such as redis://127.0.0.1:6379/0; also "
        "redis+sentinel://host,host/service, redis+cluster://host,host, rediss (TLS) for redis in "
        "each, and unix:///path. ?prefix=NAME behind it keeps several Batons on one Redis apart. "
        "With a password in it, better BATON_REDIS_URL than a flag.",
    )
    drain_timeout_s: float = Field(
        30.0, ge=0, description="Seconds that requests in flight may take to end when stopping."
    )
    reflection: bool = Field(False, description="Let clients ask which services are offered.")
    metrics: bool = Field(True, description="Serve metrics over HTTP, at /metrics.")
    metrics_port: int = Field(
        0, ge=0, le=65535, description="Port for metrics, on --host; 0 takes any free one."
    )
    log_level: Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], BeforeValidator(_upper)] = (
        Field("INFO", description="Least severe lines to log.")
    )
    log_format: Literal["human", "json"] = Field(
        "human", description="Log lines for people or as JSON."
    )
    max_message_bytes: int = Field(
        MAX_MESSAGE_BYTES, ge=4096, le=2**31 - 1, description="Largest gRPC message, both ways."
    )
    max_header_bytes: int = Field(
        16 * 2**10, ge=8192, description="Largest headers (metadata) of a gRPC call."
    )
    max_concurrent_streams: int = Field(
        1024,
        ge=1,
        description="Calls at once on one gRPC connection; more wait at the client for their turn.",
    )
    max_connection_idle_s: float = Field(
        3600.0,
        gt=0,
        description="Seconds after which a gRPC connection without calls is closed. Its client "
        "connects again by itself.",
    )

    @model_validator(mode="after")
    def _is_guarded(self) -> Self:
        files = {"tls_cert": self.tls_cert, "tls_key": self.tls_key, "tls_ca": self.tls_ca}
        given = [_flag(name) for name, path in files.items() if path]
        missing = [_flag(name) for name, path in files.items() if not path]
        if given and missing:
            raise ValueError(f"{' and '.join(given)} cannot do without {' and '.join(missing)}")
        for name, host in {"host": self.host, "admin_host": self.admin_host or self.host}.items():
            if missing and not self.insecure and not is_loopback(host):
                raise ValueError(
                    f"{_flag(name)} is {host!r}, where others than this machine may connect, and "
                    "there is no TLS; give --tls-cert, --tls-key and --tls-ca, or --insecure where "
                    "every host on that network is trusted"
                )
        return self

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
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
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
    parser = _parser(settings_class, program or Path(sys.argv[0]).name)
    flags, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(_unknown("flag", unknown[0].split("=")[0], _flags_of(settings_class)))
    given = vars(flags)
    try:
        environment = EnvSettingsSource(settings_class)()
        path = given.pop("config", None) or _env("config")
        file = _read_file(Path(path), settings_class) if path else {}
        return settings_class.model_validate({**file, **environment, **given})
    except SettingsError as error:
        parser.error(str(error))
    except ValidationError as error:
        named = _Naming(flags=given, environment=environment)
        parser.error("; ".join(named.sentence(details) for details in error.errors()))


class _Naming:
    """Error sentences that name the source of a bad value: flag, variable or file."""

    def __init__(self, *, flags: _Values, environment: _Values) -> None:
        self._flags = flags
        self._environment = environment

    def sentence(self, details: ErrorDetails) -> str:
        problem = details["msg"].removeprefix("Value error, ")
        if not details["loc"]:  # an error of several fields, which names them itself
            return problem
        field = str(details["loc"][0])
        problem = problem.replace("Input should", "must", 1)
        if details["type"] == "missing":
            return f"{_flag(field)} is needed (or {_variable(field)}, or {field} in the file)"
        value = self._flags.get(field, self._environment.get(field, details["input"]))
        return f"{self._source(field)} is {value!r}; {problem[:1].lower() + problem[1:]}"

    def _source(self, field: str) -> str:
        if field in self._flags:
            return _flag(field)
        return _variable(field) if field in self._environment else f"{field} in the file"


class _Parser(argparse.ArgumentParser):
    """Argument parser that ends with one sentence instead of the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ')}\n")


def _parser(settings_class: type[ServingSettings], program: str) -> _Parser:
    parser = _Parser(
        prog=program,
        description=(settings_class.__doc__ or "").split("\n\n")[0],
        epilog="A flag goes before the environment, the environment before the file.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", metavar="FILE", help=f"YAML file of settings. [env: {_variable('config')}]"
    )
    for name, field in settings_class.model_fields.items():
        if field.annotation is bool:
            action: Any = argparse.BooleanOptionalAction
            parser.add_argument(_flag(name), dest=name, action=action, help=_help(name, field))
        else:
            parser.add_argument(
                _flag(name), dest=name, metavar=_metavar(field), help=_help(name, field)
            )
    return parser


def _help(name: str, field: FieldInfo) -> str:
    default = "none" if field.default is None else field.get_default(call_default_factory=True)
    shown = "needed" if field.default is PydanticUndefined else f"default: {default}"
    text = f"{field.description or ''} [{shown}; env: {_variable(name)}]"
    return text.strip().replace("%", "%%")


def _metavar(field: FieldInfo) -> str:
    """Returns the placeholder of the flag's value: the choices, or the kind of value."""
    if getattr(field.annotation, "__origin__", None) is Literal:
        return "{" + ",".join(map(str, field.annotation.__args__)) + "}"  # type: ignore[union-attr]
    kinds: dict[Any, str] = {int: "N", float: "X", tuple[str, ...]: "A,B", Path: "PATH"}
    return kinds.get(field.annotation, "TEXT")


def _read_file(path: Path, settings_class: type[ServingSettings]) -> _Values:
    """Returns the file's keys and values. Raises `SettingsError`: no file, no YAML, unknown key."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"{path} must hold keys and values, such as `port: 50051`")
    for key in content:
        if key not in settings_class.model_fields:
            raise SettingsError(_unknown(f"{path}: key", str(key), settings_class.model_fields))
    return content


def _unknown(kind: str, given: str, known: Sequence[str] | Any) -> str:
    close = difflib.get_close_matches(given, list(known), n=1)
    hint = f"did you mean {close[0]}?" if close else "--help lists what there is"
    return f"{kind} {given} is unknown; {hint}"


def _flags_of(settings_class: type[ServingSettings]) -> list[str]:
    return ["--config", *map(_flag, settings_class.model_fields)]


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def _variable(field: str) -> str:
    return ENV_PREFIX + field.upper()


def _env(field: str) -> str | None:
    return os.environ.get(_variable(field)) or None
