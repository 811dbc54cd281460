"""Router settings: flags, environment and YAML file."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from baton.models import DEFAULT_MODEL, locate
from baton.serving.coalescer import INTERVAL_SECONDS
from baton.serving.settings import ServingSettings
from baton.serving.tenant import Tenants
from baton.v1 import inference_pb2
from baton_router.admission.admission_queue import MAX_WAITING
from baton_router.admission.policy import AdmissionName
from baton_router.admission.quotas import Quota, Quotas
from baton_router.placement.policy import PolicyName
from baton_router.roles.pool_load import Objectives
from baton_router.roles.role_balance import Hysteresis

_INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name


class RouterSettings(ServingSettings):
    """Settings of a router."""

    port: int = Field(50051, ge=0, le=65535, description="Port to listen on; 0 takes any free one.")
    admin_host: str | None = Field(
        "127.0.0.1",
        description="Address to listen on for administration. A client that reaches it can "
        "operate the whole cluster.",
    )
    admin_port: int = Field(
        50053, ge=0, le=65535, description="Port for administration; 0 takes any free one."
    )
    http_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port to serve OpenAI's API, a page to try it and metrics on, at --host; 0 "
        "takes any free one. Needs `pip install 'baton-serve[http]'`. Unset: gRPC alone.",
    )
    http_max_body_bytes: int = Field(
        8 * 2**20, ge=1024, description="Largest body of a request over HTTP."
    )
    http_max_header_bytes: int = Field(
        16 * 2**10, ge=1024, description="Largest head of a request over HTTP."
    )
    http_head_timeout_s: float = Field(
        20.0, gt=0, description="Seconds in which the head of a request over HTTP must have come."
    )
    http_max_connections: int = Field(
        1024,
        ge=1,
        description="HTTP connections at once. Beyond, the longest idle one is closed; where none "
        "is idle, a new one is told to come again.",
    )
    model: str = Field(
        DEFAULT_MODEL,
        description="Checkpoint whose tokenizer and configuration are used: a folder, a hub id, or "
        "'tiny', which ships with Baton.",
    )
    default_timeout_s: float = Field(
        600.0, gt=0, description="Seconds a request may take when its client sets no deadline."
    )
    max_prompt_bytes: int = Field(
        2**20, ge=1, description="Largest prompt text in bytes, before it is tokenized."
    )
    coalesce_ms: float = Field(
        1000 * INTERVAL_SECONDS,
        ge=0,
        le=100,
        description="Tokens that come within so many milliseconds of a stream's last message go "
        "out together. 0: each by itself.",
    )
    capture_content: bool = Field(
        False,
        description="Let traces have prompts and answers in them. They never have otherwise.",
    )
    tenants_file: str | None = Field(
        None,
        description="File of who bears which token: lines of a token's SHA-256 in hex and a "
        "tenant's name, as `baton token` makes them. A call without a token, or with one that is "
        "not in the file, is refused. Read again when it changes.",
    )
    allow_anonymous: bool = Field(
        False,
        description="With --tenants-file, take a call without a token for one of the tenant "
        "'default' in place of refusing it.",
    )
    client_auth: Literal["certificate", "token"] = Field(
        "certificate",
        description="How clients show over TLS who they are. certificate: with one of the role "
        "client, signed by --tls-ca. token: with one of --tenants-file, and no certificate.",
    )
    share_prefixes: bool = Field(
        False, description="Let each tenant's prompts use what is cached for the others."
    )
    placement: PolicyName = Field(
        "baton",
        description="How workers are chosen: by all that is known to cost time, by the prefix they "
        "hold alone, by their load alone, or in turn.",
    )

    conditional_disaggregation: bool = Field(
        True,
        description="Let a decode worker compute a prompt itself where little of it is uncached "
        "there and that is expected to take less than handing it over (policy baton alone). Off, "
        "it does so only while an upgrade leaves no two workers of one version.",
    )
    admission: AdmissionName = Field(
        "predicted",
        description="Admission when decode workers are full. predicted: requests that will find "
        "room once their prompt is computed. naive: requests that find room now. none: all, also "
        "when prefill workers are saturated.",
    )
    max_waiting: int = Field(
        MAX_WAITING,
        ge=1,
        description="Requests that may wait at the router for room; more are refused.",
    )
    allowances: str | None = Field(
        None,
        description="File of lines `TENANT weight=1 max_concurrent=8 tokens_per_second=1000 "
        "requests_per_minute=60 tokens_per_minute=60000`: each tenant's share of what is served, "
        "and its bounds; `*` is for all others. Beyond those of a minute requests are refused, "
        "beyond the others they wait.",
    )
    requests_per_minute: int | None = Field(
        None,
        ge=1,
        description="Requests of one tenant that each router lets in, in a minute; of tenants for "
        "which --allowances says nothing else. Unset: any number.",
    )
    tokens_per_minute: int | None = Field(
        None,
        ge=1,
        description="The same of their tokens, of prompts and answers; one counts with the longest "
        "answer that it may get, until it has ended.",
    )
    elastic: bool = Field(
        False,
        description="Have workers change their roles, as `baton role` proposes it, where one pool "
        "is pressed for long while the other one idles.",
    )
    slo_ttft_ms: float = Field(
        2000.0,
        gt=0,
        description="Within how long a first token should come: the time that prompts wait for "
        "prefill workers is measured by it where roles are balanced.",
    )
    slo_itl_ms: float = Field(
        50.0, gt=0, description="How far apart tokens should be: the same for decode workers."
    )
    elastic_dwell_s: float = Field(
        10.0, ge=0, description="Seconds that pools must be out of balance before a role changes."
    )
    elastic_cooldown_s: float = Field(
        60.0, ge=0, description="Seconds between two changes of roles, of whichever workers."
    )
    record: str | None = Field(
        None,
        description="File that says of each request where it was placed and why, for `baton "
        "replay`: lengths, chain hashes and what was known of the workers, never texts or tokens.",
    )
    record_max_bytes: int = Field(
        64 * 2**20,
        ge=2**16,
        description="Size of --record at most; a full one is kept as FILE.1, FILE.2 and so on.",
    )
    record_files: int = Field(
        4, ge=1, description="Files of --record that are kept, the current one among them."
    )
    max_indexed_blocks: int = Field(
        2_000_000,
        ge=1,
        description="Blocks, of all workers together, whose places are remembered: about 110 bytes "
        "each. Beyond, those go that were asked for longest ago.",
    )

    @model_validator(mode="after")
    def _can_tell_clients(self) -> Self:
        if self.client_auth == "token" and (self.tls is None or self.tenants_file is None):
            raise ValueError("--client-auth token cannot do without --tls-cert and --tenants-file")
        if self.client_auth == "token" and self.allow_anonymous:
            raise ValueError("--client-auth token and --allow-anonymous contradict each other")
        return self

    @property
    def by_token(self) -> tuple[str, ...]:
        """Services whose clients authenticate by token instead of certificate."""
        return (_INFERENCE,) if self.client_auth == "token" else ()

    def tenants(self) -> Tenants:
        """Reads the tenants. Raises `FailedPreconditionError` if the file cannot be read."""
        if self.tenants_file is None:
            return Tenants(share_prefixes=self.share_prefixes)
        return Tenants.read(
            Path(self.tenants_file),
            share_prefixes=self.share_prefixes,
            needs_token=not self.allow_anonymous,
        )

    def all_quotas(self) -> Quotas:
        """Reads the quotas. Raises `FailedPreconditionError` if the file cannot be read."""
        default = Quota(
            requests_per_minute=self.requests_per_minute, tokens_per_minute=self.tokens_per_minute
        )
        if self.allowances is None:
            return Quotas(default=default)
        return Quotas.read(Path(self.allowances), default)

    def objectives(self) -> Objectives:
        return Objectives(self.slo_ttft_ms / 1000, self.slo_itl_ms / 1000)

    def hysteresis(self) -> Hysteresis:
        return Hysteresis(
            dwell_seconds=self.elastic_dwell_s, cooldown_seconds=self.elastic_cooldown_s
        )

    @property
    def model_path(self) -> str:
        return locate(self.model)
