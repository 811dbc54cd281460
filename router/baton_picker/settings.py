"""Endpoint picker settings: flags, environment and YAML file."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from baton.models import DEFAULT_MODEL, named
from baton.settings.groups import Group, grouped
from baton_router.settings import PlacementSettings
from baton_router.text.request_bounds import PromptLimits

if TYPE_CHECKING:
    _WithLimits = PlacementSettings
else:
    _WithLimits = grouped(PlacementSettings, limits=Group(PromptLimits))


class PickerSettings(_WithLimits):
    """Settings of an endpoint picker."""

    OLD_NAMES: ClassVar[Mapping[str, str]] = {
        "picker_endpoints": "endpoints",
        "picker_probe_s": "probe_interval_s",
        "picker_metrics_path": "endpoint_metrics_path",
        "picker_waiting_metric": "waiting_metric",
        "picker_kv_metric": "kv_metric",
        "picker_block_size": "block_size",
        "picker_cache_tokens": "cache_tokens",
        "picker_max_endpoints": "max_endpoints",
        "picker_max_in_flight": "max_in_flight",
        "picker_max_streams": "max_streams",
        "picker_max_body_bytes": "max_body_bytes",
        "picker_max_held_bytes": "max_held_bytes",
        "picker_body_timeout_s": "body_timeout_s",
    }

    model: str = Field(
        DEFAULT_MODEL,
        description="Checkpoint whose tokenizer and chat template are used: a folder, a GGUF file, "
        "a hub id (or ID@REVISION, or ID/FILE.gguf), or 'tiny' or 'shapes', which ship with Baton.",
    )
    chat_template: str | None = Field(
        None,
        description="File of the chat template that the model servers use, in Jinja, where it is "
        "not the checkpoint's.",
    )
    endpoints: str = Field(
        "",
        description="Model servers as HOST:PORT,HOST:PORT. A DNS name stands for all its "
        "addresses, and is resolved again every --probe-interval-s. Unset: those in the subset "
        "hint of each request.",
    )
    probe_interval_s: float = Field(
        1.0, gt=0, description="Seconds between two probes of a model server."
    )
    endpoint_metrics_path: str = Field(
        "/metrics",
        description="Path of the model servers' metrics, read by each probe. Empty: a probe "
        "connects and reads nothing.",
    )
    waiting_metric: str = Field(
        "vllm:num_requests_waiting",
        description="Name of the model servers' gauge of queued requests.",
    )
    kv_metric: str = Field(
        "vllm:kv_cache_usage_perc",
        description="Name of the model servers' gauge of KV cache usage, from 0 to 1.",
    )
    block_size: int = Field(
        16, ge=1, description="Tokens per block of the prefixes that the picker remembers."
    )
    cache_tokens: int = Field(
        500_000,
        ge=1,
        description="KV capacity in tokens that each model server is assumed to have. The picker "
        "remembers the prefixes of that many tokens per server, the most recent ones.",
    )
    max_endpoints: int = Field(
        1,
        ge=1,
        description="Maximum endpoints in an answer: the best one, then those to retry on. Above 1 "
        "only with a gateway that reads lists, such as by Envoy's policy override_host.",
    )
    max_in_flight: int | None = Field(
        None,
        ge=1,
        description="Maximum requests in flight at one model server. Where all are at it, a "
        "request is rejected with 429. Unset: no limit.",
    )
    max_streams: int = Field(
        4096,
        ge=1,
        description="Maximum requests in flight at this picker. Beyond it a request is rejected "
        "with 429.",
    )
    max_body_bytes: int = Field(
        8 * 2**20,
        ge=1024,
        description="Maximum bytes of a request body. A larger one is rejected with 413.",
    )
    max_held_bytes: int = Field(
        256 * 2**20,
        ge=1024,
        description="Maximum bytes of all request bodies that the picker holds at once. Beyond it "
        "a request is rejected with 429.",
    )
    body_timeout_s: float = Field(
        20.0,
        gt=0,
        description="Timeout in seconds for a request body to arrive, after which it is rejected "
        "with 408.",
    )

    @property
    def limits(self) -> PromptLimits:
        return self.group(PromptLimits, "limits")

    @property
    def served(self) -> tuple[str, str]:
        """Name of the model, and its folder or hub id."""
        return named(self.model)
