"""Endpoint picker settings, for a router with `--endpoint-picker`."""

from pydantic import Field

from baton.serving.settings import ServingSettings


class PickerSettings(ServingSettings):
    """Settings of an endpoint picker."""

    endpoint_picker: bool = Field(
        False,
        description="Serve an endpoint picker of the Gateway API inference extension on --port, in "
        "place of Baton's own API: over ext_proc, Envoy asks it which model server a request goes "
        "to. Needs neither Redis nor workers.",
    )
    picker_endpoints: str = Field(
        "",
        description="Model servers as HOST:PORT,HOST:PORT. A DNS name stands for all its "
        "addresses, and is resolved again every --picker-probe-s. Unset: those in the subset hint "
        "of each request.",
    )
    picker_probe_s: float = Field(
        1.0, gt=0, description="Seconds between two probes of a model server."
    )
    picker_metrics_path: str = Field(
        "/metrics",
        description="Path of the model servers' metrics, read by each probe. Empty: a probe "
        "connects and reads nothing.",
    )
    picker_waiting_metric: str = Field(
        "vllm:num_requests_waiting",
        description="Name of the model servers' gauge of queued requests.",
    )
    picker_kv_metric: str = Field(
        "vllm:kv_cache_usage_perc",
        description="Name of the model servers' gauge of KV cache usage, from 0 to 1.",
    )
    picker_block_size: int = Field(
        16, ge=1, description="Tokens per block of the prefixes that the picker remembers."
    )
    picker_cache_tokens: int = Field(
        500_000,
        ge=1,
        description="KV capacity in tokens that each model server is assumed to have. The picker "
        "remembers the prefixes of that many tokens per server, the most recent ones.",
    )
    picker_max_endpoints: int = Field(
        1,
        ge=1,
        description="Maximum endpoints in an answer: the best one, then those to retry on. Above 1 "
        "only with a gateway that reads lists, such as by Envoy's policy override_host.",
    )
    picker_max_in_flight: int | None = Field(
        None,
        ge=1,
        description="Maximum requests in flight at one model server. Where all are at it, a "
        "request is rejected with 429. Unset: no limit.",
    )
    picker_max_streams: int = Field(
        4096,
        ge=1,
        description="Maximum requests in flight at this picker. Beyond it a request is rejected "
        "with 429.",
    )
    picker_max_body_bytes: int = Field(
        8 * 2**20,
        ge=1024,
        description="Maximum bytes of a request body. A larger one is rejected with 413.",
    )
    picker_max_held_bytes: int = Field(
        256 * 2**20,
        ge=1024,
        description="Maximum bytes of all request bodies that the picker holds at once. Beyond it "
        "a request is rejected with 429.",
    )
    picker_body_timeout_s: float = Field(
        20.0,
        gt=0,
        description="Timeout in seconds for a request body to arrive, after which it is rejected "
        "with 408.",
    )
