"""What makes a process's metrics readable, if its settings say so."""

import logging
from contextlib import AsyncExitStack

from baton.serving.settings import ServingSettings
from baton.serving.telemetry.exposition import Exposition
from baton.serving.telemetry.scrape_server import PATH, ScrapeServer

logger = logging.getLogger(__name__)


async def serve_metrics(
    settings: ServingSettings, exposition: Exposition, stack: AsyncExitStack
) -> ScrapeServer | None:
    """Serves them until the stack is closed; None where they are turned off.

    Raises `FailedPreconditionError` where it cannot listen.
    """
    if not settings.metrics:
        return None
    server = ScrapeServer(exposition.render, settings.host, settings.metrics_port)
    await server.start()
    stack.push_async_callback(server.stop)
    logger.info("metrics are at http://%s%s", server.endpoint, PATH)
    return server
