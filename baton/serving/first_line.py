"""First log line of a process, before the imports that take seconds.

Looks at the two settings of logs alone; what is wrong with them, or with others, is reported when
all settings are read (`baton.settings.loading`).
"""

import logging
import os
from argparse import ArgumentParser
from collections.abc import Sequence

from baton.serving.logs import configure_logging
from baton.version import version

logger = logging.getLogger(__name__)

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def log_first_line(role: str, arguments: Sequence[str]) -> None:
    """Configures logging by flags and environment, and logs that the process starts.

    `--help` logs nothing. A `--config` file is read later, with all settings.
    """
    if "--help" in arguments or "-h" in arguments:
        return
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--log-level", default=os.environ.get("BATON_LOG_LEVEL"), nargs="?")
    parser.add_argument("--log-format", default=os.environ.get("BATON_LOG_FORMAT"), nargs="?")
    given, _ = parser.parse_known_args(arguments)
    level = (given.log_level or "").upper()
    is_json = given.log_format == "json"
    configure_logging(level if level in _LEVELS else "INFO", "json" if is_json else "human", role)
    logger.info("baton %s starts, process %d", version(), os.getpid())
