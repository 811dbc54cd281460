"""TLS options of commands that connect to a cluster."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.options.option_group import takes_options
from baton.errors import InvalidArgumentError

if TYPE_CHECKING:
    from baton.rpc.tls import Tls


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """TLS options of a command line."""

    tls_ca: Annotated[
        Path | None,
        typer.Option(
            envvar="BATON_TLS_CA",
            metavar="FILE",
            help="Use TLS, and trust these certificate authorities (PEM).",
        ),
    ] = None
    tls_cert: Annotated[
        Path | None,
        typer.Option(envvar="BATON_TLS_CERT", metavar="FILE", help="Client certificate (PEM)."),
    ] = None
    tls_key: Annotated[
        Path | None,
        typer.Option(envvar="BATON_TLS_KEY", metavar="FILE", help="Its private key (PEM)."),
    ] = None
    tls_server_name: Annotated[
        str | None,
        typer.Option(
            envvar="BATON_TLS_SERVER_NAME",
            metavar="NAME",
            help="Name that the router's certificate must have; all have baton-router. "
            "Unset: the host of its address.",
        ),
    ] = None

    def tls(self) -> "Tls | None":
        """Returns files; None: plaintext. Raises `InvalidArgumentError` for a certificate alone."""
        from baton.rpc.tls import Tls

        if self.tls_ca is None:
            if self.tls_cert is not None or self.tls_key is not None:
                raise InvalidArgumentError("--tls-ca", "is needed with a certificate")
            return None
        return Tls(self.tls_ca, self.tls_cert, self.tls_key, self.tls_server_name)


takes_tls = takes_options(TlsOptions, "tls")
"""Decorator: gives a command every option of `TlsOptions`, as its parameter `tls`."""
