"""Options that several commands share."""

from typing import Annotated, TypeAlias

import typer

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_ADMIN_ADDRESS = "127.0.0.1:50053"

Address: TypeAlias = Annotated[
    str, typer.Option(envvar="BATON_ADDRESS", metavar="HOST:PORT", help="Address of the router.")
]
Admin: TypeAlias = Annotated[
    str,
    typer.Option(
        envvar="BATON_ADMIN_ADDRESS",
        metavar="HOST:PORT",
        help="Address of the router's admin service, on its --admin-port.",
    ),
]
Token: TypeAlias = Annotated[
    str,
    typer.Option(
        envvar="BATON_TOKEN",
        metavar="TOKEN",
        show_default=False,
        help="Bearer token of the tenant; safer in the variable, which other users cannot see.",
    ),
]
ServedModel: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        show_default=False,
        help="Model that answers, of a router that serves several. Unset: its first.",
    ),
]
Timeout: TypeAlias = Annotated[
    float, typer.Option(min=0.0, help="Timeout of the whole call, in seconds.")
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
JsonLines: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print JSON lines: one object a line.")
]
