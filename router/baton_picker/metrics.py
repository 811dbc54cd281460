"""Prometheus metrics of an endpoint picker."""

from collections.abc import Iterable

from prometheus_client.core import Metric

from baton.serving.telemetry.families import counter, gauge
from baton_picker.held_bytes import HeldBytes
from baton_picker.picker import RESULTS, EndpointPicker
from baton_picker.service import ExternalProcessorService


class PickerMetrics:
    """Prometheus collector of an endpoint picker."""

    def __init__(
        self, picker: EndpointPicker, service: ExternalProcessorService, held: HeldBytes
    ) -> None:
        self._picker = picker
        self._service = service
        self._held = held

    def collect(self) -> Iterable[Metric]:
        picker, endpoints = self._picker, self._picker.endpoints.all
        yield counter(
            "baton_picks_total",
            "Requests for an endpoint: picked; limited: all model servers were at their limit; or "
            "unavailable: none could take it.",
            {(result,): picker.num_results[result] for result in RESULTS},
            ("result",),
        )
        yield counter(
            "baton_picked_prompt_tokens_total",
            "Prompt tokens of requests for which an endpoint was picked.",
            picker.num_prompt_tokens,
        )
        yield counter(
            "baton_picked_cached_tokens_total",
            "Prompt tokens that the picked endpoint was expected to have cached.",
            picker.num_cached_tokens,
        )
        yield gauge("baton_picker_streams", "HTTP requests in flight.", self._service.num_streams)
        yield gauge(
            "baton_picker_held_bytes",
            "Bytes of request bodies that the picker holds.",
            self._held.num_bytes,
        )
        yield gauge(
            "baton_endpoint_in_flight",
            "Requests in flight at a model server, of this picker.",
            {(one.address,): one.load.num_sequences for one in endpoints},
            ("endpoint",),
        )
        yield gauge(
            "baton_endpoint_up",
            "Whether a model server answers.",
            {(one.address,): one.circuit.is_closed for one in endpoints},
            ("endpoint",),
        )
