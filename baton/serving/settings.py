"""Settings that every serving process has. Settings of roles subclass them and have more."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from baton.cluster.redis.settings import RedisSettings
from baton.rpc.tls import Tls, TlsFiles
from baton.serving.grpc.access import WORKER_NAME
from baton.serving.grpc.channels import ServerLimits
from baton.serving.listening import is_loopback, without_brackets
from baton.settings.groups import Group, Settings, flag_of, grouped


def _upper(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


Host = Annotated[str, AfterValidator(without_brackets)]
"""Host name or address; an IPv6 address may be given in brackets."""

# Fields made at run time have no static types; those of the groups' classes do.
if TYPE_CHECKING:
    _Groups = Settings
else:
    _Groups = grouped(
        Settings,
        tls=Group(TlsFiles, "tls_"),
        redis=Group(RedisSettings, "redis_"),
        server=Group(ServerLimits),
    )


class ServingSettings(_Groups):
    """Settings that every serving process has."""

    host: Host = Field(
        "127.0.0.1", description="Address to listen on; `::` is any, of IPv6 and of IPv4."
    )
    port: int = Field(0, ge=0, le=65535, description="Port to listen on; 0 takes any free one.")
    admin_host: Host | None = Field(
        None, description="Address to listen on for administration. Unset: --host."
    )
    admin_port: int = Field(
        0, ge=0, le=65535, description="Port for administration; 0 takes any free one."
    )
    advertise_host: Host | None = Field(
        None,
        description="Host at which other processes reach this one; needed if --host is a "
        "wildcard. Unset: --host.",
    )
    insecure: bool = Field(
        False,
        description="Listen without TLS on a --host that other machines reach: every host on that "
        "network can then read and change all traffic, and send requests.",
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

    @model_validator(mode="after")
    def _is_guarded(self) -> Self:
        files = {name: getattr(self, name) for name in self.GROUPS["tls"].names}
        given = [flag_of(name) for name, path in files.items() if path]
        missing = [flag_of(name) for name, path in files.items() if not path]
        if given and missing:
            raise ValueError(f"{' and '.join(given)} also needs {' and '.join(missing)}")
        for name, host in {"host": self.host, "admin_host": self.admin_host or self.host}.items():
            if missing and not self.insecure and not is_loopback(host):
                raise ValueError(
                    f"{flag_of(name)} is {host!r}, which other machines can reach, and there is no "
                    "TLS; give --tls-cert, --tls-key and --tls-ca, or --insecure if every host on "
                    "that network is trusted"
                )
        return self

    @property
    def redis(self) -> RedisSettings:
        return self.group(RedisSettings, "redis")

    @property
    def server(self) -> ServerLimits:
        return self.group(ServerLimits, "server")

    @property
    def tls(self) -> Tls | None:
        """TLS files of this process; None: plaintext."""
        return self.group(TlsFiles, "tls").tls

    @property
    def tls_to_workers(self) -> Tls | None:
        """TLS of connections to workers, verified by `WORKER_NAME`: workers' addresses change."""
        return None if self.tls is None else replace(self.tls, server_name=WORKER_NAME)
