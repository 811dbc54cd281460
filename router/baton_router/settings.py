"""Router settings: flags, environment and YAML file."""

from collections.abc import Callable, Mapping
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic_settings import NoDecode

from baton.models import DEFAULT_MODEL, named
from baton.serving.access import INFERENCE
from baton.serving.channels import MAX_ENCODER_INPUT_BYTES
from baton.serving.coalescer import INTERVAL_SECONDS
from baton.serving.connection_guard import ConnectionLimits
from baton.serving.large_requests import DEFAULT_BUDGET_BYTES
from baton.serving.settings import ServingSettings
from baton.serving.tenant import Tenants
from baton_router.routing.admission.admission_queue import MAX_WAITING
from baton_router.routing.admission.image_budget import MAX_HELD_BYTES
from baton_router.routing.admission.policy import AdmissionName
from baton_router.routing.admission.quotas import Quota, Quotas
from baton_router.routing.admission.readiness import HOLD_SECONDS
from baton_router.routing.placement.policy import PolicyName
from baton_router.routing.placement.record.record_file import RecordFile
from baton_router.routing.roles.pool_load import Objectives
from baton_router.routing.roles.role_balance import Hysteresis
from baton_router.served.aliases import Weights, no_aliases, watched_aliases
from baton_router.text.images.image_limits import (
    DEFAULT_CACHE_BYTES,
    DEFAULT_FETCH_SECONDS,
    DEFAULT_MAX_CLIP_FRAMES,
    DEFAULT_MAX_IMAGE_BYTES,
    DEFAULT_MAX_IMAGES,
    DEFAULT_MAX_PIXELS,
    DEFAULT_MAX_TOTAL_BYTES,
    DEFAULT_MEMORY_BYTES,
    DEFAULT_NUM_PROCESSES,
    DEFAULT_TIMEOUT_SECONDS,
    ImageLimits,
)
from baton_router.text.model_card import AUTO
from baton_router.text.output_parsing.formats import catalog as formats
from baton_router.text.request_bounds import (
    DEFAULT_MAX_ELEMENTS,
    DEFAULT_MAX_INPUT_TOKENS,
    DEFAULT_MAX_INPUTS,
    DEFAULT_MAX_MESSAGES,
    DEFAULT_MAX_PROMPT_IDS,
    DEFAULT_MAX_TOOLS,
)

_NONE = "none"
# Scheme, host and port, as browsers send them.
_ORIGIN = r"https?://[^/\s,*]+"
_ORIGINS = rf"^(\*|{_ORIGIN}(\s*,\s*{_ORIGIN})*)$"


def _comma_list(given: str | None) -> list[str]:
    return [item.strip() for item in (given or "").split(",") if item.strip()]


def _comma_separated(value: object) -> object:
    return value.split(",") if isinstance(value, str) else value


class PlacementSettings(ServingSettings):
    """Settings of a process that places requests."""

    port: int = Field(50051, ge=0, le=65535, description="Port to listen on; 0 takes any free one.")
    default_timeout_s: float = Field(
        600.0, gt=0, description="Timeout in seconds of requests whose client sets no deadline."
    )
    max_prompt_bytes: int = Field(
        2**20, ge=1, description="Maximum bytes of a prompt's text, before it is tokenized."
    )
    placement: PolicyName = Field(
        "baton",
        description="Placement policy. baton: lowest expected cost, of cached prefixes, load and "
        "transfers together. prefix-only: longest cached prefix. least-loaded: least load. "
        "round-robin: in rotation.",
    )
    record: str | None = Field(
        None,
        description="File of each request's placement and its inputs, for `baton replay`: lengths, "
        "chain hashes and the state of the workers, never texts or tokens.",
    )
    record_max_bytes: int = Field(
        64 * 2**20,
        ge=2**16,
        description="Maximum bytes of --record; a full file is rotated to FILE.1, FILE.2 and so "
        "on.",
    )
    record_files: int = Field(
        4, ge=1, description="Maximum files of --record, including the current one."
    )
    max_indexed_hashes: int = Field(
        2_000_000,
        ge=1,
        description="Maximum hashes in the locality index, of the KV blocks and encoder outputs "
        "that all workers together have cached: about 110 bytes each. Beyond it the least recently "
        "used are evicted.",
    )

    @property
    def record_file(self) -> RecordFile | None:
        """File of the placements that are recorded; None: none are."""
        if self.record is None:
            return None
        return RecordFile(Path(self.record), self.record_max_bytes, self.record_files)


class RouterSettings(PlacementSettings):
    """Settings of a router."""

    OLD_NAMES: ClassVar[Mapping[str, str]] = {"allowances": "quotas"}

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
        description="Port for OpenAI's API, a page to try it and metrics, on --host; 0 takes any "
        "free one. Needs the extra http. Unset: gRPC alone.",
    )
    http_max_body_bytes: int = Field(
        8 * 2**20, ge=1024, description="Maximum bytes of the body of an HTTP request."
    )
    http_max_body_elements: int = Field(
        DEFAULT_MAX_ELEMENTS,
        ge=1024,
        description="Maximum elements of the body of an HTTP request outside its prompt: strings, "
        "lists, objects and commas.",
    )
    http_max_prompt_ids: int = Field(
        DEFAULT_MAX_PROMPT_IDS,
        ge=1,
        description="Maximum token ids of all prompts of one HTTP request; a model that is longer "
        "takes one prompt of its length.",
    )
    http_max_tools: int = Field(
        DEFAULT_MAX_TOOLS, ge=1, description="Maximum tools of a request, over HTTP or gRPC."
    )
    max_messages: int = Field(
        DEFAULT_MAX_MESSAGES,
        ge=1,
        description="Maximum messages of a conversation; at most the model's length.",
    )
    max_inputs: int = Field(
        DEFAULT_MAX_INPUTS,
        ge=1,
        description="Maximum inputs of one request for embeddings, and pairs of one for scores.",
    )
    max_input_tokens: int = Field(
        DEFAULT_MAX_INPUT_TOKENS, ge=1, description="Maximum tokens of these inputs together."
    )
    large_request_budget_bytes: int = Field(
        DEFAULT_BUDGET_BYTES,
        ge=2**20,
        description="Maximum bytes of HTTP bodies and gRPC messages above 64 KiB that are read and "
        "parsed at once. Further ones wait for up to 10 s, then are rejected.",
    )
    max_encoder_input_bytes: int = Field(
        MAX_ENCODER_INPUT_BYTES,
        ge=0,
        le=2**30,
        description="Maximum bytes of the preprocessed images of a request. Give routers and "
        "workers one value.",
    )
    encoder_input_budget_bytes: int = Field(
        MAX_HELD_BYTES,
        ge=0,
        description="Maximum bytes of the preprocessed images of all requests in flight, which the "
        "router holds to send them again if a worker is lost. Further requests with images are "
        "rejected.",
    )
    http_max_header_bytes: int = Field(
        16 * 2**10, ge=1024, description="Maximum bytes of the head of an HTTP request."
    )
    http_head_timeout_s: float = Field(
        20.0,
        gt=0,
        description="Timeout in seconds for the head of an HTTP request to arrive, and before that "
        "for a TLS handshake.",
    )
    http_max_connections: int = Field(
        1024,
        ge=1,
        description="Maximum HTTP connections. Beyond it the router closes the longest idle one, "
        "or, if none is idle, answers a new one with 503. As many TLS handshakes may be in "
        "progress beside them; beyond that the oldest is dropped.",
    )
    http_allowed_hosts: str | None = Field(
        None,
        description="Names that the Host header of an HTTP request may have, separated by commas "
        "and without ports, as in `baton.example.org,*.baton.example.org`; `*` is any. Others are "
        "rejected with 403. Unset: `localhost,127.0.0.1,::1` if --host is a loopback address, so "
        "that no web page reaches the router by DNS rebinding; else any.",
    )
    responses_ttl_s: float = Field(
        3600.0,
        ge=0,
        le=30 * 86_400,
        description="Seconds for which responses of /v1/responses are kept in Redis, with their "
        "conversation, for previous_response_id. 0: none are stored.",
    )
    responses_max_bytes: int = Field(
        512 * 2**10,
        ge=1024,
        le=16 * 2**20,
        description="Maximum bytes of a stored response with its conversation. A larger one is "
        "answered and not stored.",
    )
    responses_per_tenant: int = Field(
        200,
        ge=1,
        le=10_000,
        description="Maximum stored responses of a tenant. Beyond it the oldest are dropped; none "
        "is stored while Redis' memory is half full.",
    )
    http_allowed_origins: str | None = Field(
        None,
        pattern=_ORIGINS,
        description="Origins of web pages that may call the HTTP API from a browser (CORS), "
        "separated by commas, as in `https://chat.example.org,http://localhost:3000`; `*` is any, "
        "without credentials of the browser. Unset: none but the router's own page.",
    )
    http_unknown_fields: Literal["ignore", "refuse"] = Field(
        "ignore",
        description="Unknown fields of HTTP requests and their messages. ignore: they are named in "
        "the header x-baton-ignored of the answer and counted. refuse: 400. Unsupported ones that "
        "would change the answer are always refused.",
    )
    model: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_comma_separated)] = Field(
        (DEFAULT_MODEL,),
        min_length=1,
        description="Checkpoint whose tokenizer and configuration are used: a folder, a hub id, or "
        "'tiny' or 'shapes', which ship with Baton. Or NAME=CHECKPOINT, where its workers serve it "
        "under that name. Given several times, or several with commas between: the router serves "
        "several models, each by workers of its own, and requests that name none go to the first.",
    )
    model_aliases: str | None = Field(
        None,
        description="File of other names for models, in TOML, or JSON if it ends in .json: "
        '`alias = "model"`, or several models by weight, as in '
        "`alias = { model-a = 90, model-b = 10 }`. The router reads the file again after a change.",
    )
    max_images: int = Field(
        DEFAULT_MAX_IMAGES,
        ge=1,
        description="Maximum images of one request, frames of clips included.",
    )
    max_clip_frames: int = Field(
        DEFAULT_MAX_CLIP_FRAMES,
        ge=1,
        description="Maximum frames that are taken of one clip, evenly spaced.",
    )
    max_image_bytes: int = Field(
        DEFAULT_MAX_IMAGE_BYTES,
        ge=1024,
        description="Maximum bytes of one image, as an encoded file. In HTTP requests images are "
        "base64, of 4/3 the bytes: --http-max-body-bytes bounds them, too.",
    )
    max_image_total_bytes: int = Field(
        DEFAULT_MAX_TOTAL_BYTES,
        ge=1024,
        description="Maximum bytes of all images of one request together.",
    )
    max_image_pixels: int = Field(
        DEFAULT_MAX_PIXELS,
        ge=1,
        description="Maximum pixels of one image: its width times its height, and times all frames "
        "of a clip.",
    )
    image_timeout_s: float = Field(
        DEFAULT_TIMEOUT_SECONDS,
        gt=0,
        description="Timeout in seconds to decode and preprocess one image or clip.",
    )
    image_processes: int = Field(
        DEFAULT_NUM_PROCESSES,
        ge=1,
        description="Maximum processes of the router that decode images, for each model that takes "
        "some. The first starts with the router, others when they are needed.",
    )
    image_cache_bytes: int = Field(
        DEFAULT_CACHE_BYTES,
        ge=0,
        description="Maximum bytes of preprocessed images that the router caches, for each model "
        "that takes some, so that a conversation does not decode its images again in each turn. 0: "
        "none.",
    )
    image_process_memory_bytes: int = Field(
        DEFAULT_MEMORY_BYTES,
        ge=512 * 2**20,
        description="Maximum bytes of address space of each of these processes. An image that "
        "needs more is refused.",
    )
    image_url_hosts: str | None = Field(
        None,
        description="Hosts from which the router fetches images that requests give by http or "
        "https URL, separated by commas, as in `images.example.org,*.example.com`; `*` is any. "
        "Only public addresses are connected to. Unset: none; requests may have data URLs.",
    )
    image_url_networks: str | None = Field(
        None,
        description="Networks that are not public, of which --image-url-hosts may have addresses "
        "nevertheless, separated by commas, as in `10.1.0.0/16`. Unset: none.",
    )
    image_url_timeout_s: float = Field(
        DEFAULT_FETCH_SECONDS,
        gt=0,
        description="Timeout in seconds to fetch one image, redirects included.",
    )
    tool_call_parser: str = Field(
        AUTO,
        description="Format in which the model writes tool calls: "
        f"{', '.join(formats.tool_format_names())}, {AUTO} or {_NONE}. auto: the one that its chat "
        "template and model type tell. none: requests with tools are rejected.",
    )
    reasoning_parser: str = Field(
        AUTO,
        description="Format in which the model writes reasoning before its answer: "
        f"{', '.join(formats.reasoning_format_names())}, {AUTO} or {_NONE}, as --tool-call-parser. "
        "none: reasoning is text.",
    )
    allow_special_tokens_in_chat: bool = Field(
        False,
        description="Let special tokens of the model that are written in messages of a chat, such "
        "as `<|im_end|>`, act as such. Off: they are text. Prompts of completions may always have "
        "them.",
    )
    max_new_streams_per_s: int = Field(
        2000,
        ge=1,
        description="Maximum calls that one gRPC connection opens in a second: more than a router "
        "serves. A connection beyond it is dropped.",
    )
    max_resets_per_s: int = Field(
        200,
        ge=1,
        description="Maximum calls that one gRPC connection opens and resets in a second, since "
        "thousands of them delay all other clients. A connection beyond it is dropped. A client "
        "may still cancel all that it has in flight at once.",
    )
    coalesce_ms: float = Field(
        1000 * INTERVAL_SECONDS,
        ge=0,
        le=100,
        description="Coalescing window: minimum milliseconds between two messages of a stream; "
        "tokens in between are sent together. 0: each in a message of its own.",
    )
    capture_content: bool = Field(
        False,
        description="Include prompts and answers in traces.",
    )
    tenants_file: str | None = Field(
        None,
        description="File of tenants' tokens: lines of a token's SHA-256 in hex and the tenant's "
        "name, as `baton token` makes them. Calls without a token of the file are rejected. The "
        "router reads the file again after a change.",
    )
    allow_anonymous: bool = Field(
        False,
        description="With --tenants-file, treat a call without a token as one of the tenant "
        "'default' instead of rejecting it.",
    )
    client_auth: Literal["certificate", "token"] = Field(
        "certificate",
        description="Authentication of clients over TLS. certificate: one of the role client, "
        "signed by --tls-ca. token: one of --tenants-file, without a certificate.",
    )
    share_prefixes: bool = Field(False, description="Share cached prefixes between tenants.")

    conditional_disaggregation: bool = Field(
        True,
        description="Let a decode worker compute a prompt itself if little of it is uncached there "
        "and that is expected to take less time than a KV transfer (--placement baton only). Off: "
        "it does so only while an upgrade leaves no two workers of one version.",
    )
    admission: AdmissionName = Field(
        "predicted",
        description="Admission policy when decode workers are full. predicted: admit requests for "
        "which there will be room once their prompt is computed. naive: admit those for which "
        "there is room now. none: admit all, even when prefill workers are saturated.",
    )
    max_waiting: int = Field(
        MAX_WAITING,
        ge=1,
        description="Maximum requests in the admission queue; more are rejected.",
    )
    ready_without_workers: bool = Field(
        False,
        description="Report readiness without workers, for routers in front of several pools. "
        "Off: a router is ready once a request could be placed.",
    )
    unready_after_s: float = Field(
        HOLD_SECONDS,
        ge=0,
        description="Seconds without a placeable request after which a ready router reports that "
        "it is not ready any more.",
    )
    quotas: str | None = Field(
        None,
        description="File of lines `TENANT weight=1 max_concurrent=8 tokens_per_second=1000 "
        "requests_per_minute=60 tokens_per_minute=60000 bytes_per_minute=1000000`: each tenant's "
        "weight in the admission queue, its quota and its rate limits; `*` is for all others. "
        "Requests beyond a limit per minute are rejected, beyond another one they wait.",
    )
    requests_per_minute: int = Field(
        60_000,
        ge=0,
        description="Rate limit of each router: requests per tenant and minute, for tenants to "
        "which --quotas gives no other. 0: no limit. The default, a thousand a second, is "
        "about what one router serves: it refuses floods only.",
    )
    tokens_per_minute: int = Field(
        60_000_000,
        ge=0,
        description="Rate limit of each router: tokens of prompts and answers per tenant and "
        "minute, as --requests-per-minute. A request in flight counts with its maximum answer. The "
        "default, a million a second, is more than one router tokenizes.",
    )
    bytes_per_minute: int = Field(
        256 * 2**20,
        ge=0,
        description="Rate limit of each router: bytes of requests per tenant and minute, valid or "
        "not, as --requests-per-minute. The default is 32 of the largest HTTP bodies, or the text "
        "of --tokens-per-minute.",
    )
    elastic: bool = Field(
        False,
        description="Change workers' roles, as `baton role` proposes, when one pool stays "
        "overloaded while another one is idle.",
    )
    slo_ttft_ms: float = Field(
        2000.0,
        gt=0,
        description="TTFT objective in milliseconds: the load of prefill workers relative to it "
        "decides about changes of roles; workers with --policy deadline are told when each first "
        "token is due by it.",
    )
    slo_itl_ms: float = Field(
        50.0,
        gt=0,
        description="Inter-token latency objective in milliseconds: as --slo-ttft-ms, for decode "
        "workers.",
    )
    elastic_dwell_s: float = Field(
        10.0, ge=0, description="Seconds of imbalance between the pools before a role changes."
    )
    elastic_cooldown_s: float = Field(
        60.0, ge=0, description="Minimum seconds between two changes of roles, of any workers."
    )
    elastic_min_encode_workers: int = Field(
        1,
        ge=0,
        description="Encode workers that changes of roles leave. With 0 a pool without images is "
        "given up, and begins again once prefill workers are overloaded with images.",
    )
    max_workers: int = Field(
        1024,
        ge=1,
        description="Maximum workers that the router takes from the registry in Redis. More are "
        "ignored, with a warning.",
    )

    @field_validator("tool_call_parser", "reasoning_parser")
    @classmethod
    def _is_known(cls, name: str, info: ValidationInfo) -> str:
        is_of_tools = info.field_name == "tool_call_parser"
        names = formats.tool_format_names() if is_of_tools else formats.reasoning_format_names()
        known = (*names, AUTO, _NONE)
        if name not in known:
            raise ValueError(f"expected one of {', '.join(known)}")
        return name

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [named(model)[0] for model in self.model]
        if len(set(names)) < len(names):
            raise ValueError(
                f"--model names {', '.join(names)}; expected different names. Give NAME=CHECKPOINT"
            )
        return self

    @model_validator(mode="after")
    def _can_tell_clients(self) -> Self:
        if self.client_auth == "token" and (self.tls is None or self.tenants_file is None):
            raise ValueError("--client-auth token also needs --tls-cert and --tenants-file")
        if self.client_auth == "token" and self.allow_anonymous:
            raise ValueError("--client-auth token and --allow-anonymous contradict each other")
        return self

    @property
    def by_token(self) -> tuple[str, ...]:
        """Services whose clients authenticate by token instead of certificate."""
        return (INFERENCE,) if self.client_auth == "token" else ()

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
            requests_per_minute=self.requests_per_minute or None,
            tokens_per_minute=self.tokens_per_minute or None,
            bytes_per_minute=self.bytes_per_minute or None,
        )
        if self.quotas is None:
            return Quotas(default=default)
        return Quotas.read(Path(self.quotas), default)

    def connection_limits(self) -> ConnectionLimits:
        return ConnectionLimits(self.max_new_streams_per_s, self.max_resets_per_s)

    @property
    def format_names(self) -> tuple[str | None, str | None]:
        """Names of the formats of tool calls and of reasoning; None: none."""
        calls, reasoning = self.tool_call_parser, self.reasoning_parser
        return None if calls == _NONE else calls, None if reasoning == _NONE else reasoning

    def objectives(self) -> Objectives:
        return Objectives(self.slo_ttft_ms / 1000, self.slo_itl_ms / 1000)

    def hysteresis(self) -> Hysteresis:
        return Hysteresis(
            dwell_seconds=self.elastic_dwell_s,
            cooldown_seconds=self.elastic_cooldown_s,
            min_encode_workers=self.elastic_min_encode_workers,
        )

    def image_limits(self) -> ImageLimits:
        return ImageLimits(
            self.max_images,
            self.max_image_bytes,
            self.max_image_total_bytes,
            self.max_image_pixels,
            self.image_process_memory_bytes,
            self.image_timeout_s,
            self.image_url_timeout_s,
            self.max_clip_frames,
            self.max_encoder_input_bytes,
            self.image_cache_bytes,
        )

    @field_validator("image_url_networks")
    @classmethod
    def _are_networks(cls, networks: str | None) -> str | None:
        for network in _comma_list(networks):
            ip_network(network)  # raises ValueError
        return networks

    @property
    def image_hosts(self) -> tuple[list[str], list[str]]:
        """Hosts from which images are fetched, and networks that they may be in."""
        return _comma_list(self.image_url_hosts), _comma_list(self.image_url_networks)

    @property
    def models(self) -> dict[str, str]:
        """Folders or hub ids of the models, by the names under which they are served."""
        return dict(map(named, self.model))

    def aliases(self) -> Callable[[], Mapping[str, Weights]]:
        """Reads the aliases. Raises `FailedPreconditionError` if the file is invalid."""
        if self.model_aliases is None:
            return no_aliases
        return watched_aliases(Path(self.model_aliases), self.models)
