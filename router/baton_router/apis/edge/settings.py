"""Settings of the HTTP API."""

from dataclasses import dataclass
from typing import Literal

from baton.settings import setting

# Scheme, host and port, as browsers send them.
_ORIGIN = r"https?://[^/\s,*]+"
_ORIGINS = rf"^(\*|{_ORIGIN}(\s*,\s*{_ORIGIN})*)$"


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Limits of the connections of one HTTP server."""

    max_connections: int = setting(
        1024,
        "Maximum HTTP connections. Beyond it the router closes one that waits for its client, for "
        "a request or the rest of a body: the longest waiting one of the address with the most. If "
        "none waits, it answers a new one with 503. As many TLS handshakes may be in progress "
        "beside them; beyond that the oldest is dropped.",
        ge=1,
    )
    max_header_bytes: int = setting(
        16 * 2**10, "Maximum bytes of the head of an HTTP request.", ge=1024
    )
    head_timeout_s: float = setting(
        20.0,
        "Timeout in seconds for the head of an HTTP request to arrive, and before that for a TLS "
        "handshake.",
        gt=0,
    )


@dataclass(frozen=True, kw_only=True)
class BodyLimits:
    """Limits of the body of one HTTP request."""

    max_body_bytes: int = setting(
        8 * 2**20, "Maximum bytes of the body of an HTTP request.", ge=1024
    )
    max_body_elements: int = setting(
        65_536,
        "Maximum elements of the body of an HTTP request outside its prompt: strings, lists, "
        "objects and commas.",
        ge=1024,
    )
    max_prompt_ids: int = setting(
        262_144,
        "Maximum token ids of all prompts of one HTTP request; a model that is longer takes one "
        "prompt of its length.",
        ge=1,
    )


@dataclass(frozen=True, kw_only=True)
class HttpSettings(ConnectionLimits, BodyLimits):
    """Settings of the HTTP API."""

    port: int | None = setting(
        None,
        "Port for OpenAI's API, a page to try it and metrics, on --host; 0 takes any free one. "
        "Needs the extra http. Unset: gRPC alone.",
        ge=0,
        le=65535,
    )
    allowed_hosts: str | None = setting(
        None,
        "Names that the Host header of an HTTP request may have, separated by commas and without "
        "ports, as in `baton.example.org,*.baton.example.org`; `*` is any. Others are rejected "
        "with 403. Unset: `localhost,127.0.0.1,::1` if --host is a loopback address, so that no "
        "web page reaches the router by DNS rebinding; else any.",
    )
    allowed_origins: str | None = setting(
        None,
        "Origins of web pages that may call the HTTP API from a browser (CORS), separated by "
        "commas, as in `https://chat.example.org,http://localhost:3000`; `*` is any, without "
        "credentials of the browser. Unset: none but the router's own page.",
        pattern=_ORIGINS,
    )
    unknown_fields: Literal["ignore", "refuse"] = setting(
        "ignore",
        "Unknown fields of HTTP requests and their messages. ignore: they are named in the header "
        "x-baton-ignored of the answer and counted. refuse: 400. Unsupported ones that would "
        "change the answer are always refused.",
    )
    excess_max_tokens: Literal["clamp", "refuse"] = setting(
        "clamp",
        "Bounds of an answer over HTTP beyond what the prompt leaves of the model's length. clamp: "
        "they are lowered to that, and the header x-baton-clamped of the answer tells to what. "
        "refuse: 400; not of /v1/messages, which clamps as Anthropic's API does.",
    )
    reasoning_field: Literal["both", "reasoning", "reasoning_content"] = setting(
        "both",
        "Field of chat completions that has the reasoning: reasoning_content, as most clients read "
        "it, reasoning, as newer ones do, or both.",
    )
