"""What makes a process's metrics readable, if its settings say so, and its health beside them.

Health is gRPC's own on every gRPC port; over HTTP it is for those who have no certificate to show
there, such as Kubernetes' probes. The paths are those of Kubernetes' own components.
"""

import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial

from baton.serving.listening import host_and_port
from baton.serving.server import LIVENESS, READINESS, Server
from baton.serving.settings import ServingSettings
from baton.serving.telemetry.exposition import Exposition
from baton.serving.telemetry.scrape_server import Render, ScrapeServer

PATH = "/metrics"
CHECKS = {"/livez": LIVENESS, "/readyz": READINESS}

logger = logging.getLogger(__name__)


async def serve_metrics(
    settings: ServingSettings,
    exposition: Exposition,
    server: Server,
    stack: AsyncExitStack,
    pages: Mapping[str, Render] | None = None,
) -> str:
    """Serves them until the stack is closed, and beside them the health of `server` and other
    `pages`. Returns where others reach them, "host:port"; empty where they are turned off.

    Raises `FailedPreconditionError` where it cannot listen.
    """
    if not settings.metrics:
        return ""
    every = {PATH: exposition.render, **(pages or {})}
    checks = {path: partial(server.is_serving, name) for path, name in CHECKS.items()}
    scraped = ScrapeServer(every, settings.host, settings.metrics_port, checks=checks)
    await scraped.start()
    stack.push_async_callback(scraped.stop)
    endpoint = host_and_port(settings.advertise_host or settings.host, scraped.port)
    logger.info("metrics are at http://%s%s", endpoint, PATH)
    return endpoint
