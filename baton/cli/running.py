"""Exit codes and error messages of commands: one sentence in place of a traceback."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from baton.cli.options.sampling import with_options_named
from baton.errors import BatonError

if TYPE_CHECKING:
    from rich.console import Console

_INTERRUPTED = 130


@contextmanager
def finishing() -> Iterator[None]:
    """Exits with 1 and a sentence on stderr after a `BatonError`, with 130 when interrupted."""
    try:
        yield
    except BatonError as error:
        print(f"baton: {with_options_named(str(error))}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None


def console() -> "Console":
    """Returns a console on stdout. A pipe has no width to wrap at."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=160)
