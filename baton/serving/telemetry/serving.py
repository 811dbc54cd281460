"""HTTP endpoint of a process's metrics and health checks, if its settings enable metrics.

gRPC health is on every gRPC port; HTTP is for probes that have no certificate to show there, such
as Kubernetes'. The paths are those of Kubernetes' own components.
"""

import logging
from collections.abc import Callable, Mapping
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
    pages_of: Callable[[str], Mapping[str, Render]] = lambda _endpoint: {},
) -> str:
    """Serves metrics and the health of `server` over HTTP until `stack` is closed. Returns the
    address for other hosts, "host:port"; empty if metrics are turned off.

    Args:
        pages_of: returns further pages by path, given that address.

    Raises `FailedPreconditionError` if it cannot listen.
    """
    if not settings.metrics:
        return ""
    checks = {path: partial(server.is_serving, name) for path, name in CHECKS.items()}
    scraped = ScrapeServer(
        {PATH: exposition.render}, settings.host, settings.metrics_port, checks=checks
    )
    await scraped.start()
    stack.push_async_callback(scraped.stop)
    endpoint = host_and_port(settings.advertise_host or settings.host, scraped.port)
    scraped.add(pages_of(endpoint))
    logger.info("metrics are at http://%s%s", endpoint, PATH)
    return endpoint
