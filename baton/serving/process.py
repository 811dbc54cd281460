"""Process start and end: settings, logging, event loop, errors as sentences."""

import asyncio
import gc
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from baton.errors import BatonError, InvalidArgumentError
from baton.serving.logs import configure_logging
from baton.serving.settings import ServingSettings
from baton.serving.telemetry.tracing import tracing
from baton.settings.loading import load

_Settings = TypeVar("_Settings", bound=ServingSettings)


def main(
    settings_class: type[_Settings],
    role: str,
    serve: Callable[[_Settings], Awaitable[None]],
    *,
    prepare: Callable[[_Settings], None] = lambda _settings: None,
    new_loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
    arguments: Sequence[str] | None = None,
    program: str | None = None,
) -> None:
    """Runs one process until a signal.

    A `BatonError` ends it with code 1 and its sentence on stderr, without a traceback.

    Args:
        prepare: called with the settings before there are threads and an event loop.
        new_loop: makes the event loop; None: asyncio's own.
        arguments: of the command line, after `program`; None: both as in `sys.argv`.
    """
    settings = load(settings_class, arguments, program)
    configure_logging(settings.log_level, settings.log_format, role)
    try:
        prepare(settings)
        with tracing(role), asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(_run(serve, settings))
    except BatonError as error:
        sys.exit(f"{role}: {_in_flags(error, settings_class)}")


def _in_flags(error: BatonError, settings_class: type[ServingSettings]) -> str:
    """Returns the sentence of an error; a setting is named as its flag."""
    if isinstance(error, InvalidArgumentError) and error.field in settings_class.model_fields:
        return f"--{error.field.replace('_', '-')}: {error.problem}"
    return str(error)


def settle() -> None:
    """Excludes all loaded objects from garbage collection; call it once all is loaded.

    Each full collection would scan them for a tenth of a second, in which nothing else runs.
    """
    gc.collect()
    gc.freeze()


async def _run(serve: Callable[[_Settings], Awaitable[None]], settings: _Settings) -> None:
    await serve(settings)
