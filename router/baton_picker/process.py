"""Endpoint picker process: builds its components and serves until a signal."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from baton.cluster.index import LocalityIndex
from baton.cluster.prefix import PrefixNamespace
from baton.envoy import external_processor_pb2_grpc
from baton.serving.grpc.access import ROUTER_NAME
from baton.serving.grpc.certificates import check_role
from baton.serving.process import main, settle
from baton.serving.server import Server
from baton.serving.telemetry.exposition import Exposition
from baton.serving.telemetry.serving import serve_metrics
from baton_picker.endpoints import Endpoints
from baton_picker.envoy_call import EnvoyCall
from baton_picker.held_bytes import HeldBytes
from baton_picker.metrics import PickerMetrics
from baton_picker.picker import EndpointPicker
from baton_picker.probe import Probe
from baton_picker.prompt import PromptReader
from baton_picker.service import SERVICE, ExternalProcessorService
from baton_picker.settings import PickerSettings
from baton_router.event_loop import EventLoop
from baton_router.routing.placement.decision import Rules
from baton_router.routing.placement.record.recorder import Recorder, recording
from baton_router.text.model_card import ModelCard, read_model_card

# By which the probes of an InferencePool ask.
_HEALTH_NAME = "inference-extension"


class EndpointPickerServer:
    """Server of an endpoint picker, with its components. Use: `start`, then `stop`."""

    def __init__(
        self, settings: PickerSettings, rules: Rules, card: ModelCard, recorder: Recorder | None
    ) -> None:
        self.server = Server(settings, health_names=(SERVICE, _HEALTH_NAME))
        self.held = HeldBytes(settings.max_held_bytes)
        self.endpoints = Endpoints(
            [name for name in settings.endpoints.split(",") if name.strip()],
            Probe(
                settings.endpoint_metrics_path,
                settings.waiting_metric,
                settings.kv_metric,
            ),
            settings.probe_interval_s,
            LocalityIndex(settings.max_indexed_hashes),
            block_size=settings.block_size,
            capacity=settings.cache_tokens,
            max_in_flight=settings.max_in_flight,
        )
        # Only hashes of this process are compared: the model servers' own caches have others.
        namespace = PrefixNamespace(b"", card.tokenizer_hash, "", settings.block_size)
        self.picker = EndpointPicker(
            self.endpoints, rules, namespace, settings.max_endpoints, recorder
        )
        self._reader = PromptReader(card, settings.limits)
        max_body_bytes = settings.max_body_bytes
        self.service = ExternalProcessorService(
            partial(EnvoyCall, self.picker, self._reader, self.held, max_body_bytes),
            settings.max_streams,
            settings.body_timeout_s,
            settings.default_timeout_s,
        )
        self.server.add(
            external_processor_pb2_grpc.add_ExternalProcessorServicer_to_server, self.service
        )
        self.server.on_drain(self.server.release_connections)

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


async def serve(settings: PickerSettings) -> None:
    """Serves until a signal."""
    check_role(settings.tls, ("router",), ROUTER_NAME)
    name, path = settings.served
    template = settings.chat_template
    card = read_model_card(path, name, chat_template=Path(template) if template else None)
    card.warm_up()
    rules = Rules(settings.placement, no_handoff=True)
    async with AsyncExitStack() as stack:
        recorder = await stack.enter_async_context(recording(settings.record_file, rules))
        running = EndpointPickerServer(settings, rules, card, recorder)
        stack.push_async_callback(running.stop)
        exposition = Exposition()
        exposition.add(PickerMetrics(running.picker, running.service, running.held))
        await serve_metrics(settings, exposition, running.server, stack)
        await running.start()
        settle()
        await running.server.run_until_signal()


def run(arguments: Sequence[str], program: str) -> None:
    """Runs an endpoint picker until a signal. `arguments` follow `program` on the command line."""
    main(
        PickerSettings,
        "endpoint-picker",
        serve,
        new_loop=EventLoop,
        arguments=arguments,
        program=program,
    )
