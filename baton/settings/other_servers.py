"""Flags of other servers (vLLM, SGLang, llama.cpp), and what does here what they do there."""

from collections.abc import Mapping
from typing import Final

_DEVICES = "a worker computes on one device; `baton up --prefill N --decode N` runs more workers"
_PLAIN = (
    "weights are read in the format of the checkpoint, quantized ones too, and served as --dtype "
    "says; --quantization quantizes plain ones, --kv-cache-dtype makes the cache smaller"
)
_CHECKPOINT = "it is read from the checkpoint"
_CACHED = "prefixes are cached unless --no-prefix-caching is given"
_APART = (
    "prefill and decode have workers of their own, unless `baton up --workers N` starts workers of "
    "both; --kv-connector moves blocks"
)

ADVICE: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        (
            "--tensor-parallel-size", "--tp", "--tp-size", "--pipeline-parallel-size", "--pp-size",
            "--data-parallel-size", "--dp", "--dp-size", "--enable-expert-parallel", "--ep-size",
            "--split-mode", "--tensor-split",
        ),
        _DEVICES,
    ),
    **dict.fromkeys(("--load-format", "--weight-dtype"), _PLAIN),
    **dict.fromkeys(
        ("--tokenizer", "--tokenizer-path", "--jinja", "--hf-config-path"),
        _CHECKPOINT,
    ),
    **dict.fromkeys(("--enable-prefix-caching", "--disable-radix-cache"), _CACHED),
    **dict.fromkeys(("--disaggregation-mode", "--kv-transfer-config"), _APART),
    **dict.fromkeys(("--context-length", "--ctx-size"), "--max-model-len is its length"),
    **dict.fromkeys(
        ("--max-running-requests", "--parallel", "--n-parallel"),
        "--max-num-seqs is how many sequences run at once",
    ),
    **dict.fromkeys(
        ("--chunked-prefill-size", "--max-prefill-tokens", "--batch-size", "--ubatch-size"),
        "--max-num-batched-tokens is how many tokens a step computes",
    ),
    **dict.fromkeys(
        ("--enable-chunked-prefill", "--no-enable-chunked-prefill"),
        "prompts are always computed in chunks, of --max-num-batched-tokens",
    ),
    **dict.fromkeys(
        ("--enforce-eager", "--disable-cuda-graph"), "--no-cuda-graphs runs steps without graphs"
    ),
    **dict.fromkeys(
        ("--n-gpu-layers", "--gpu-layers"), "--device cuda serves all layers on a GPU, cpu none"
    ),
    **dict.fromkeys(
        ("--schedule-policy", "--scheduling-policy"), "--policy orders the requests that wait"
    ),
    **dict.fromkeys(
        ("--speculative-config", "--speculative-algorithm", "--draft-model", "--model-draft"),
        "--speculate drafts tokens by --drafter",
    ),
    **dict.fromkeys(
        ("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs"),
        "TLS is --tls-cert, --tls-key and --tls-ca; `baton up --tls DIR` takes a folder",
    ),
    **dict.fromkeys(
        ("--tool-call-parser", "--reasoning-parser"),
        "it is a setting of the router: `baton up --router-arg tool-call-parser=NAME`",
    ),
    "--chat-template": "it is a setting of the router: `baton up --chat-template FILE`",
    "--mem-fraction-static": "--gpu-memory-utilization is the share of a GPU's memory",
    "--page-size": "--block-size is the tokens of a KV block",
    "--swap-space": "--swap-bytes is the memory of sequences that wait, in bytes",
    "--threads": "--num-threads is the threads of a worker on CPUs",
    "--served-model-name": "--model NAME=CHECKPOINT serves a checkpoint under a name",
    "--model-path": "it is --model",
    "--api-key": "the router's --tenants-file has tokens, which `baton token` makes",
    "--trust-remote-code": "code of a checkpoint is never run",
    "--enable-auto-tool-choice": "tools need no switch; the router's --tool-call-parser is auto",
    "--uvicorn-log-level": "it is --log-level",
}  # fmt: skip
"""Advice by flag."""


def advice_on(flag: str) -> str:
    """Returns what replaces a flag of another server; "" for a flag that none is known to have."""
    return ADVICE.get(flag, "")
