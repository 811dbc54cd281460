"""Meanings of the terms that `baton explain`, `baton top`, the web page and the dashboards show.

`docs/glossary.md` has the same sentences. Each one completes "the term is ...".
"""

from collections.abc import Mapping

TERMS: Mapping[str, str] = {
    "uncached": "computing the prompt tokens that are not cached or fetched",
    "queue": "computing the prompts and images that are queued before",
    "congestion": "delay of later requests by the uncached tokens and images",
    "fetch": "fetching a prefix from another worker",
    "copy": "recomputing the KV that a fetched prefix evicts",
    "encode": "encoding the prompt's images, or waiting for their outputs",
    "load": "a small part of the tokens assigned recently; decides ties",
    "handoff": "fixed cost of moving a request to its decode worker",
    "transfer": "moving the prompt's KV that the decode worker lacks",
    "interference": "decode steps of the sequences that run there",
    "memory": "recomputing the KV that no longer fits in the pool",
    "stall": "delay of other sequences by what another worker could compute",
    "sequences": "policy least-loaded: sequences that run there",
    "last request": "policy round-robin: number of its last request",
    "cached": "prompt tokens whose KV the worker has",
    "cost": "sum of the terms; the cheapest choice wins",
}
"""Columns of `baton explain`: cost terms of a placement, in seconds under the default policy."""

TIMINGS: Mapping[str, str] = {
    "admission": "time from arrival until all workers first admitted the request",
    "prefill_queue": "time from the call to the worker that computes the prompt to its first step",
    "prefill_started": "time from arrival to the first step for the prompt",
    "time_to_first_token": "time from arrival to the first token (TTFT)",
    "exposed_transfer": "part of the KV transfer for which the second token had to wait",
    "handed_over": "time from arrival until the decode worker had confirmed all blocks",
    "total": "time from arrival to the last token",
}
"""Durations of a request, as its `Timings` and its timeline name them."""

LOAD: Mapping[str, str] = {
    "ms/step": "milliseconds of a recent step; red: slower than peers",
    "running": "sequences in the worker's batch",
    "waiting": "requests that wait for room in the batch or in the KV pool",
    "KV in use": "share of the KV pool's blocks that requests or leases hold",
    "cached": "blocks that no request holds, kept for prompts that begin alike",
    "to encode": "image tokens that wait for the encoder, for other workers",
    "encoder use": "share of encoder blocks that requests or encode jobs hold",
    "leases": "promises to keep blocks until another worker has fetched them",
    "tokens/s": "tokens computed, of prompts and of outputs",
    "KV in/s": "bytes of KV received from other workers",
    "preempted/s": "sequences that lost their slot to others and resume later",
    "pressure": "wait, KV use or token latency as a fraction of its objective",
    "tenant": "tenant of the request",
    "ms/token": "milliseconds per output token after the first, of all sequences",
    "migrations": "times that the request has resumed on another worker",
}
"""Columns of `baton top`, and the pressure in its headline."""
