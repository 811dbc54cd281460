"""Dashboard of images and of the encode pool."""

from grafana import Board, Panel, Query, Row
from promql import MODEL, of_model, quantiles, rate

_ENDS = ("0.5", "0.99")


def _of_model(metric: str, where: str = "") -> str:
    """Returns a router's gauge for the selected models."""
    return f"{metric}{{{of_model(metric, where)}}}"


def _of_router(histogram: str) -> list[Query]:
    return quantiles(histogram, of=_ENDS, where=of_model(histogram))


_INPUTS, _WORKERS = "baton_encoder_inputs_total", "baton_workers"
_ENCODE = 'role="encode"'

BOARD = Board(
    "baton-encode-pool",
    "Baton: encode pool",
    "Images of requests, where they are encoded, and how their outputs reach prefill workers.",
    [
        Row(
            "Encoding",
            [
                Panel(
                    "Where images are encoded",
                    [Query(rate(_INPUTS, "source", where=of_model(_INPUTS)), "{{source}}")],
                    "ops",
                    "local: by the worker of the prompt. encode: by another one. cached_remote: "
                    "another one had it cached. failed: by the first after the other had failed.",
                    is_stacked=True,
                ),
                Panel(
                    "Encode time",
                    _of_router("baton_encode_seconds"),
                    "s",
                    "At another worker than that of the prompt, with its queue.",
                ),
                Panel(
                    "Pool pressure",
                    [
                        Query(
                            f"max by (model, role) ({_of_model('baton_pool_pressure')})",
                            "{{model}} {{role}}",
                        )
                    ],
                    text="Above 1: overloaded. No encode workers: that of one with all images.",
                ),
                Panel(
                    "Encoded tokens",
                    [Query(rate("baton_encoded_tokens_total", "role"), "{{role}}")],
                    text="Tokens of images a second, by the role of the worker that encoded them.",
                    is_stacked=True,
                ),
                Panel(
                    "Queue of encode workers",
                    [Query("sum by (role) (baton_waiting_encoder_tokens)", "{{role}}")],
                    text="Tokens of images that wait to be encoded for other workers.",
                ),
                Panel(
                    "Encoder cache",
                    [Query("sum by (role, state) (baton_encoder_blocks)", "{{role}} {{state}}")],
                    text="Blocks of outputs. Few free and many held: outputs may be encoded twice; "
                    "raise --encoder-cache-tokens.",
                    is_stacked=True,
                ),
                Panel(
                    "Encode workers by state",
                    [
                        Query(
                            f"max by (model, state) ({_of_model(_WORKERS, _ENCODE)})",
                            "{{model}} {{state}}",
                        )
                    ],
                    is_stacked=True,
                    text="As routers see them.",
                ),
                Panel(
                    "Leases on encoder outputs",
                    [Query("sum by (role) (baton_encoder_leases)", "{{role}}")],
                    text="That other workers are to fetch.",
                ),
                Panel(
                    "Oldest lease on encoder outputs",
                    [Query("max by (role) (baton_oldest_encoder_lease_age_seconds)", "{{role}}")],
                    "s",
                    "Age. One that grows: a worker does not fetch what is kept for it.",
                ),
            ],
        ),
        Row(
            "Transfers",
            [
                Panel(
                    "Throughput of encoder outputs",
                    [
                        Query(
                            rate("baton_encoder_transfer_bytes_total", "connector"), "{{connector}}"
                        )
                    ],
                    "Bps",
                    "Bytes of outputs received from other workers.",
                    is_stacked=True,
                ),
                Panel(
                    "Exposed transfer time",
                    quantiles("baton_encoder_transfer_exposed_seconds", "connector", of=_ENDS),
                    "s",
                    "The part after the output was computed.",
                ),
                Panel(
                    "Transfer time",
                    quantiles("baton_encoder_transfer_seconds", "connector", of=_ENDS),
                    "s",
                    "From the claim on, with the computation of the output.",
                ),
                Panel(
                    "Failed transfers",
                    [Query(rate("baton_encoder_transfer_failures_total", "reason"), "{{reason}}")],
                    "ops",
                    "The worker of the prompt encodes the image itself.",
                    is_stacked=True,
                ),
            ],
        ),
        Row(
            "Images at routers",
            [
                Panel(
                    "Preprocessing time",
                    _of_router("baton_image_preprocessing_seconds"),
                    "s",
                    "Of a process that decodes, without waiting for it.",
                ),
                Panel(
                    "Images that wait",
                    [Query(f"sum by (model) ({_of_model('baton_images_waiting')})", "{{model}}")],
                    text="For a process to decode them (--images-processes).",
                ),
                Panel(
                    "Image budget",
                    [
                        Query("sum by (instance) (baton_image_bytes)", "{{instance}}"),
                        Query(
                            "max by (instance) (baton_image_budget_bytes)", "{{instance}} maximum"
                        ),
                    ],
                    "bytes",
                    "Bytes of images held for requests in flight.",
                ),
            ],
        ),
    ],
    [MODEL],
)
