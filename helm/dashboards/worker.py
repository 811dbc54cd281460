"""Dashboard of workers."""

from grafana import Board, Panel, Query, Row
from promql import rate, ratio

_HERE = 'instance=~"$instance"'
_RUNNING = 'state="running"'
_NAME = "{{instance}}"


def _now(gauge: str, where: str = "") -> str:
    """Returns a gauge of the selected workers."""
    return f"{gauge}{{{', '.join(filter(None, (_HERE, where)))}}}"


def _by_worker(counter: str, *by: str) -> str:
    return rate(counter, "instance", *by, where=_HERE)


def _per_step(counter: str, label: str) -> str:
    """Returns a counter's growth per engine step, by one of its labels."""
    part = _by_worker(counter, label)
    whole = _by_worker("baton_steps_total")
    return f"({part}) / on (instance) group_left () ({whole})"


BOARD = Board(
    "baton-worker",
    "Baton: workers",
    "Batches, steps, memory and preemptions of the selected workers.",
    [
        Row(
            "Workers",
            [
                Panel(
                    "Workers by state",
                    [
                        Query(
                            "max by (model, role, state) (baton_workers)",
                            "{{model}} {{role}} {{state}}",
                        )
                    ],
                    is_stacked=True,
                    text="As routers see them.",
                ),
                Panel(
                    "Sequences",
                    [Query(_now("baton_sequences"), f"{_NAME} {{{{state}}}}")],
                    text="awaiting_kv: their KV is in transfer. kept: it is leased out.",
                    is_stacked=True,
                ),
                Panel(
                    "Ready workers",
                    [Query(f"sum by (role) ({_now('baton_worker_ready')})", "{{role}}")],
                    text="They take requests.",
                ),
                Panel(
                    "Paused workers",
                    [Query(f"sum by (role) ({_now('baton_worker_paused')})", "{{role}}")],
                    text="They start no new request until `baton resume --admin`.",
                ),
            ],
        ),
        Row(
            "Steps",
            [
                Panel(
                    "Steps",
                    [Query(_by_worker("baton_steps_total"), _NAME)],
                    "ops",
                    text="Batches that the model has computed.",
                ),
                Panel(
                    "Step time",
                    [
                        Query(
                            _per_step("baton_step_seconds_total", "phase"), f"{_NAME} {{{{phase}}}}"
                        )
                    ],
                    "s",
                    "On a GPU forward is the time to launch a step and to wait for it.",
                    is_stacked=True,
                ),
                Panel(
                    "Batch size",
                    [Query(_per_step("baton_step_tokens_total", "kind"), f"{_NAME} {{{{kind}}}}")],
                    text="Tokens per step: prompt tokens, and one token per decoding sequence.",
                    is_stacked=True,
                ),
                Panel(
                    "Token budget utilization",
                    [
                        Query(
                            ratio(
                                ratio(
                                    _by_worker("baton_step_tokens_total"),
                                    _by_worker("baton_steps_total"),
                                ),
                                f"max by (instance) ({_now('baton_step_token_budget')})",
                            ),
                            _NAME,
                        )
                    ],
                    "percentunit",
                    most=1,
                    text="Tokens per step, relative to the maximum.",
                ),
                Panel(
                    "Batch slot utilization",
                    [
                        Query(
                            ratio(
                                f"sum by (instance) ({_now('baton_sequences', _RUNNING)})",
                                f"max by (instance) ({_now('baton_sequence_budget')})",
                            ),
                            _NAME,
                        )
                    ],
                    "percentunit",
                    "Running sequences, relative to the maximum.",
                    most=1,
                ),
                Panel(
                    "Late kernel compilations",
                    [Query(_now("baton_kernel_compilations_total"), _NAME)],
                    text="Kernels that the warm-up did not launch, since the worker began: 0.",
                ),
                Panel(
                    "Token throughput",
                    [Query(_by_worker("baton_step_tokens_total", "kind"), f"{_NAME} {{{{kind}}}}")],
                    "cps",
                    is_stacked=True,
                    text="Tokens computed, of prompts and of outputs.",
                ),
            ],
        ),
        Row(
            "Memory",
            [
                Panel(
                    "KV blocks",
                    [Query(_now("baton_kv_blocks"), f"{_NAME} {{{{state}}}}")],
                    text="held: by sequences or leases. cached: and not held. They add up.",
                    is_stacked=True,
                ),
                Panel(
                    "Promised and reserved KV blocks",
                    [
                        Query(_now("baton_promised_kv_blocks"), f"{_NAME} promised"),
                        Query(_now("baton_reserved_kv_blocks"), f"{_NAME} reserved"),
                    ],
                    text="promised: to handoffs. reserved: for prompts that have begun.",
                ),
                Panel(
                    "Host KV blocks",
                    [Query(_now("baton_host_kv_blocks"), f"{_NAME} {{{{state}}}}")],
                    text="held: by swapped sequences. None without swap_bytes.",
                    is_stacked=True,
                ),
                Panel(
                    "Swapped KV blocks",
                    [
                        Query(
                            _by_worker("baton_swapped_kv_blocks_total", "direction"),
                            f"{_NAME} {{{{direction}}}}",
                        )
                    ],
                    "ops",
                    "Blocks copied to host memory (out) and back (in).",
                ),
                Panel(
                    "Preemptions",
                    [Query(_by_worker("baton_preemptions_total", "mode"), f"{_NAME} {{{{mode}}}}")],
                    "ops",
                    "Sequences that were recomputed, swapped or returned to the router.",
                    is_stacked=True,
                ),
                Panel(
                    "Speculative decoding",
                    [
                        Query(_by_worker("baton_drafted_tokens_total"), f"{_NAME} drafted"),
                        Query(_by_worker("baton_accepted_tokens_total"), f"{_NAME} accepted"),
                    ],
                    "cps",
                    "0 unless workers have max_drafts set.",
                ),
                Panel(
                    "Resident memory",
                    [Query(_now("process_resident_memory_bytes"), _NAME)],
                    "bytes",
                    text="Memory of the process, without that of a GPU.",
                ),
                Panel(
                    "CPU cores in use",
                    [Query(_by_worker("process_cpu_seconds_total"), _NAME)],
                    text="Mean over the interval.",
                ),
            ],
        ),
    ],
    variables=[("instance", "baton_worker_info")],
)
