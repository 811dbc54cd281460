"""Router settings: flags, environment and YAML file."""

from collections.abc import Callable, Mapping
from ipaddress import ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic_settings import NoDecode

from baton.models import DEFAULT_MODEL, hub_id, name_and_checkpoint, named
from baton.serving.grpc.access import INFERENCE
from baton.serving.grpc.channels import MAX_ENCODER_INPUT_BYTES
from baton.serving.grpc.coalescer import INTERVAL_SECONDS
from baton.serving.grpc.connection_guard import ConnectionLimits
from baton.serving.grpc.large_requests import DEFAULT_BUDGET_BYTES
from baton.serving.settings import Host, ServingSettings
from baton.serving.tenant import Tenants
from baton.settings.groups import Group, grouped
from baton_router.apis.edge.settings import HttpSettings
from baton_router.apis.responses.limits import ResponseLimits
from baton_router.routing.admission.admission_queue import MAX_WAITING
from baton_router.routing.admission.image_budget import MAX_HELD_BYTES
from baton_router.routing.admission.policy import AdmissionName
from baton_router.routing.admission.quotas import DefaultRates, Quotas
from baton_router.routing.admission.readiness import HOLD_SECONDS
from baton_router.routing.placement.policy import PolicyName
from baton_router.routing.placement.record.record_file import RecordFile, RecordLimits
from baton_router.routing.roles.pool_load import Objectives
from baton_router.routing.roles.role_balance import Hysteresis
from baton_router.served.aliases import Weights, no_aliases, watched_aliases
from baton_router.text.images.image_limits import ImageLimits, comma_list
from baton_router.text.model_card import AUTO
from baton_router.text.output_parsing.formats import catalog as formats
from baton_router.text.request_bounds import RequestLimits

_NONE = "none"


def _comma_separated(value: object) -> object:
    return value.split(",") if isinstance(value, str) else value


# Fields made at run time have no static types; those of the groups' classes do.
if TYPE_CHECKING:
    _WithRecord = ServingSettings
else:
    _WithRecord = grouped(ServingSettings, record=Group(RecordLimits, "record_"))


class PlacementSettings(_WithRecord):
    """Settings of a process that places requests."""

    port: int = Field(50051, ge=0, le=65535, description="Port to listen on; 0 takes any free one.")
    default_timeout_s: float = Field(
        600.0, gt=0, description="Timeout in seconds of requests whose client sets no deadline."
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
        return RecordFile(Path(self.record), self.group(RecordLimits, "record"))


if TYPE_CHECKING:
    _RouterGroups = PlacementSettings
else:
    _RouterGroups = grouped(
        PlacementSettings,
        limits=Group(RequestLimits),
        grpc=Group(ConnectionLimits),
        http=Group(HttpSettings, "http_"),
        responses=Group(ResponseLimits, "responses_"),
        images=Group(ImageLimits, "images_"),
        rates=Group(DefaultRates),
        slo=Group(Objectives, "slo_"),
        elastic=Group(Hysteresis, "elastic_"),
    )


class RouterSettings(_RouterGroups):
    """Settings of a router."""

    OLD_NAMES: ClassVar[Mapping[str, str]] = {
        "allowances": "quotas",
        "http_max_tools": "max_tools",
        "max_images": "images_max_per_request",
        "max_clip_frames": "images_max_clip_frames",
        "max_image_bytes": "images_max_bytes",
        "max_image_total_bytes": "images_max_total_bytes",
        "max_image_pixels": "images_max_pixels",
        "image_timeout_s": "images_timeout_s",
        "image_processes": "images_processes",
        "image_cache_bytes": "images_cache_bytes",
        "image_process_memory_bytes": "images_process_memory_bytes",
        "image_url_hosts": "images_url_hosts",
        "image_url_networks": "images_url_networks",
        "image_url_timeout_s": "images_url_timeout_s",
    }

    admin_host: Host | None = Field(
        "127.0.0.1",
        description="Address to listen on for administration. A client that reaches it can "
        "operate the whole cluster.",
    )
    admin_port: int = Field(
        50053, ge=0, le=65535, description="Port for administration; 0 takes any free one."
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
    model: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_comma_separated)] = Field(
        (DEFAULT_MODEL,),
        min_length=1,
        description="Checkpoint whose tokenizer and configuration are used: a folder, a GGUF file, "
        "a hub id (or ID@REVISION, or ID/FILE.gguf), or 'tiny' or 'shapes', which ship with Baton. "
        "Or NAME=CHECKPOINT, where its "
        "workers serve it under that name. Given several times, or several with commas between: "
        "the router serves several models, each by workers of its own, and requests that name none "
        "go to the first.",
    )
    model_aliases: str | None = Field(
        None,
        description="File of other names for models, in TOML, or JSON if it ends in .json: "
        '`alias = "model"`, or several models by weight, as in '
        "`alias = { model-a = 90, model-b = 10 }`. The router reads the file again after a change.",
    )
    chat_template: str | None = Field(
        None,
        description="File of a chat template, in Jinja, that takes the place of the checkpoint's. "
        "Where the router serves several models, `NAME=FILE,NAME=FILE`.",
    )
    sampling_defaults: Literal["model", "api"] = Field(
        "model",
        description="Temperature, top_p, top_k, min_p and repetition penalty of requests that name "
        "none. model: those of the checkpoint's generation_config.json, then those of the API. "
        "api: those of the API alone: temperature 1 over HTTP, 0 over gRPC, nothing else.",
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
    coalesce_ms: float = Field(
        1000 * INTERVAL_SECONDS,
        ge=0,
        le=100,
        description="Coalescing window: minimum milliseconds between two messages of a stream; "
        "tokens in between are sent together. 0: each in a message of its own.",
    )
    access_log: str | None = Field(
        None,
        description="File of the access log: a line of JSON for each call of a client over any "
        "API, with status, reason of a refusal, tenant, numbers of tokens and times, and no text. "
        "-: standard output. Unset: none.",
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
        description="Maximum requests in the admission queue. In a full one the newest request of "
        "the tenant with the most is rejected.",
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
    elastic: bool = Field(
        False,
        description="Change workers' roles, as `baton role` proposes, when one pool stays "
        "overloaded while another one is idle.",
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
    def _templates_are_of_models(self) -> Self:
        names, given = self.models, self._templates()
        files = dict(given)
        if not names.keys() >= files.keys() or len(files) < len(given) or "" in files.values():
            raise ValueError(
                f"--chat-template is {self.chat_template!r}; expected NAME=FILE,NAME=FILE with "
                f"each name once, of {', '.join(names)}"
            )
        return self

    def _templates(self) -> list[tuple[str, str]]:
        """Returns the file of each chat template, and the name of its model."""
        if self.chat_template is None:
            return []
        if len(self.models) == 1:
            (name,) = self.models
            return [(name, self.chat_template.removeprefix(f"{name}="))]
        pairs = (given.partition("=") for given in self.chat_template.split(","))
        return [(name, file) for name, _, file in pairs]

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
        default = self.group(DefaultRates, "rates").quota
        if self.quotas is None:
            return Quotas(default=default)
        return Quotas.read(Path(self.quotas), default)

    @property
    def limits(self) -> RequestLimits:
        return self.group(RequestLimits, "limits")

    @property
    def grpc(self) -> ConnectionLimits:
        return self.group(ConnectionLimits, "grpc")

    @property
    def http(self) -> HttpSettings:
        return self.group(HttpSettings, "http")

    @property
    def responses(self) -> ResponseLimits:
        return self.group(ResponseLimits, "responses")

    @property
    def images(self) -> ImageLimits:
        return self.group(ImageLimits, "images", max_tensor_bytes=self.max_encoder_input_bytes)

    @property
    def hysteresis(self) -> Hysteresis:
        return self.group(Hysteresis, "elastic")

    @property
    def format_names(self) -> tuple[str | None, str | None]:
        """Names of the formats of tool calls and of reasoning; None: none."""
        calls, reasoning = self.tool_call_parser, self.reasoning_parser
        return None if calls == _NONE else calls, None if reasoning == _NONE else reasoning

    @property
    def objectives(self) -> Objectives:
        return self.group(Objectives, "slo")

    @field_validator("images_url_networks")
    @classmethod
    def _are_networks(cls, networks: str | None) -> str | None:
        for network in comma_list(networks):
            ip_network(network)  # raises ValueError
        return networks

    @property
    def models(self) -> dict[str, str]:
        """Folders or hub ids of the models, by the names under which they are served."""
        return dict(map(named, self.model))

    @property
    def names_of_checkpoints(self) -> dict[str, str]:
        """Names of the models, by hub id or folder as given, without slashes at its end and without
        a revision. Of several models of one checkpoint it is the first."""
        pairs = map(name_and_checkpoint, reversed(self.model))
        return {hub_id(checkpoint)[0].rstrip("/"): name for name, checkpoint in pairs}

    @property
    def chat_templates(self) -> dict[str, Path]:
        """Files of chat templates, by the names of the models."""
        return {name: Path(file) for name, file in self._templates()}

    def aliases(self) -> Callable[[], Mapping[str, Weights]]:
        """Reads the aliases. Raises `FailedPreconditionError` if the file is invalid."""
        if self.model_aliases is None:
            return no_aliases
        return watched_aliases(Path(self.model_aliases), self.models)
