"""Endpoint picker process: builds its components and serves until a signal."""

from contextlib import AsyncExitStack
from functools import partial

from baton.cluster.index import LocalityIndex
from baton.cluster.prefix import PrefixNamespace
from baton.envoy import external_processor_pb2_grpc
from baton.serving.process import settle
from baton.serving.server import Server
from baton.serving.telemetry.exposition import Exposition
from baton.serving.telemetry.serving import serve_metrics
from baton_router.endpoint_picker.endpoints import Endpoints
from baton_router.endpoint_picker.exchange import Exchange
from baton_router.endpoint_picker.held_bytes import HeldBytes
from baton_router.endpoint_picker.metrics import PickerMetrics
from baton_router.endpoint_picker.picker import EndpointPicker
from baton_router.endpoint_picker.probe import Probe
from baton_router.endpoint_picker.prompt import PromptReader
from baton_router.endpoint_picker.service import SERVICE, ExternalProcessorService
from baton_router.routing.placement.decision import Rules
from baton_router.routing.placement.record.recorder import Recorder
from baton_router.settings import RouterSettings
from baton_router.text.model_card import ModelCard, read_model_card


class EndpointPickerServer:
    """Server of an endpoint picker, with its components. Use: `start`, then `stop`."""

    def __init__(
        self, settings: RouterSettings, rules: Rules, card: ModelCard, recorder: Recorder | None
    ) -> None:
        self.server = Server(settings, health_names=(SERVICE,))
        self.held = HeldBytes(settings.picker_max_held_bytes)
        self.endpoints = Endpoints(
            [name for name in settings.picker_endpoints.split(",") if name.strip()],
            Probe(
                settings.picker_metrics_path,
                settings.picker_waiting_metric,
                settings.picker_kv_metric,
            ),
            settings.picker_probe_s,
            LocalityIndex(settings.max_indexed_hashes),
            block_size=settings.picker_block_size,
            capacity=settings.picker_cache_tokens,
            max_in_flight=settings.picker_max_in_flight,
        )
        # Only hashes of this process are compared: the model servers' own caches have others.
        namespace = PrefixNamespace(b"", card.tokenizer_hash, "", settings.picker_block_size)
        self.picker = EndpointPicker(
            self.endpoints, rules, namespace, settings.picker_max_endpoints, recorder
        )
        self._reader = PromptReader(card, settings.max_prompt_bytes)
        max_body_bytes = settings.picker_max_body_bytes
        self.service = ExternalProcessorService(
            partial(Exchange, self.picker, self._reader, self.held, max_body_bytes),
            settings.picker_max_streams,
            settings.picker_body_timeout_s,
            settings.default_timeout_s,
        )
        self.server.add(
            external_processor_pb2_grpc.add_ExternalProcessorServicer_to_server, self.service
        )

    async def start(self) -> int:
        """Listens, probes the endpoints once and becomes ready; returns the port."""
        port = await self.server.start()
        await self.endpoints.start()
        await self.server.set_ready(True)
        return port

    async def stop(self) -> None:
        await self.server.stop()
        await self.endpoints.stop()
        self._reader.close()


async def serve(
    settings: RouterSettings, rules: Rules, recorder: Recorder | None, stack: AsyncExitStack
) -> None:
    """Serves until a signal. `stack` is to be closed afterwards."""
    ((name, path),) = settings.models.items()
    card = read_model_card(path, name)
    card.warm_up()
    running = EndpointPickerServer(settings, rules, card, recorder)
    stack.push_async_callback(running.stop)
    exposition = Exposition()
    exposition.add(PickerMetrics(running.picker, running.service, running.held))
    await serve_metrics(settings, exposition, running.server, stack)
    await running.start()
    settle()
    await running.server.run_until_signal()
