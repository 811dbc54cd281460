"""Exit codes and error messages of commands: one sentence in place of a traceback."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import typer

from baton.cli.sampling_options import with_options_named
from baton.errors import BatonError

if TYPE_CHECKING:
    from rich.console import Console

_INTERRUPTED = 130


def finish(command: Callable[[], None]) -> NoReturn:
    """Runs a command and exits: 0, 1 with a sentence on stderr, or 130 when interrupted."""
    code = 0
    try:
        command()
    except BatonError as error:
        print(f"baton: {with_options_named(str(error))}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        code = _INTERRUPTED
    raise typer.Exit(code)


def console() -> "Console":
    """Returns a console on stdout. A pipe has no width to wrap at."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=160)
