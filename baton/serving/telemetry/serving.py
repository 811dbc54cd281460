"""What makes a process's metrics readable, if its settings say so."""

import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack

from baton.serving.listening import host_and_port
from baton.serving.settings import ServingSettings
from baton.serving.telemetry.exposition import Exposition
from baton.serving.telemetry.scrape_server import Render, ScrapeServer

PATH = "/metrics"

logger = logging.getLogger(__name__)


async def serve_metrics(
    settings: ServingSettings,
    exposition: Exposition,
    stack: AsyncExitStack,
    pages: Mapping[str, Render] | None = None,
) -> str:
    """Serves them until the stack is closed, and other `pages` beside them. Returns where others
    reach them, "host:port"; empty where they are turned off.

    Raises `FailedPreconditionError` where it cannot listen.
    """
    if not settings.metrics:
        return ""
    every = {PATH: exposition.render, **(pages or {})}
    server = ScrapeServer(every, settings.host, settings.metrics_port)
    await server.start()
    stack.push_async_callback(server.stop)
    endpoint = host_and_port(settings.advertise_host or settings.host, server.port)
    logger.info("metrics are at http://%s%s", endpoint, PATH)
    return endpoint
