"""Dashboard of workers."""

from grafana import Board, Panel, Query, Row
from promql import rate, ratio

_HERE = 'instance=~"$instance"'
_RUNNING = 'state="running"'
_NAME = "{{instance}}"


def _now(gauge: str, where: str = "") -> str:
    """A gauge of the chosen workers."""
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
    "Baton: what each worker does",
    "Batches, steps, memory and preemptions of the chosen workers.",
    [
        Row(
            "Workers",
            [
                Panel(
                    "As routers see them",
                    [Query("max by (role, state) (baton_workers)", "{{role}} {{state}}")],
                    is_stacked=True,
                ),
                Panel(
                    "Sequences",
                    [Query(_now("baton_sequences"), f"{_NAME} {{{{state}}}}")],
                    text="awaiting_kv: their KV is on its way here. kept: it waits to be fetched.",
                    is_stacked=True,
                ),
                Panel(
                    "Taking work",
                    [Query(f"sum by (role) ({_now('baton_worker_ready')})", "{{role}}")],
                ),
            ],
        ),
        Row(
            "Steps",
            [
                Panel("Steps", [Query(_by_worker("baton_steps_total"), _NAME)], "ops"),
                Panel(
                    "Time of a step",
                    [
                        Query(
                            _per_step("baton_step_seconds_total", "phase"), f"{_NAME} {{{{phase}}}}"
                        )
                    ],
                    "s",
                    "On a GPU forward is what it takes to launch a step and to wait for it.",
                    is_stacked=True,
                ),
                Panel(
                    "Tokens of a step",
                    [Query(_per_step("baton_step_tokens_total", "kind"), f"{_NAME} {{{{kind}}}}")],
                    text="The batch: prompt tokens, and a token of each sequence that decodes.",
                    is_stacked=True,
                ),
                Panel(
                    "Budget of a step in use",
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
                ),
                Panel(
                    "Seats in use",
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
                    "Sequences that run, of those that may run at once.",
                    most=1,
                ),
                Panel(
                    "Tokens computed",
                    [Query(_by_worker("baton_step_tokens_total", "kind"), f"{_NAME} {{{{kind}}}}")],
                    "cps",
                    is_stacked=True,
                ),
            ],
        ),
        Row(
            "Memory",
            [
                Panel(
                    "KV blocks",
                    [Query(_now("baton_kv_blocks"), f"{_NAME} {{{{state}}}}")],
                    text="held: in use by sequences or leases. cached: not in use.",
                    is_stacked=True,
                ),
                Panel(
                    "KV blocks promised to requests",
                    [Query(_now("baton_promised_kv_blocks"), _NAME)],
                ),
                Panel(
                    "Made room",
                    [Query(_by_worker("baton_preemptions_total", "mode"), f"{_NAME} {{{{mode}}}}")],
                    "ops",
                    "Sequences that had to go, and what became of their KV.",
                    is_stacked=True,
                ),
                Panel(
                    "Tokens guessed ahead",
                    [
                        Query(_by_worker("baton_drafted_tokens_total"), f"{_NAME} guessed"),
                        Query(_by_worker("baton_accepted_tokens_total"), f"{_NAME} right"),
                    ],
                    "cps",
                    "Nothing, unless workers have max_drafts.",
                ),
                Panel(
                    "Memory of the process",
                    [Query(_now("process_resident_memory_bytes"), _NAME)],
                    "bytes",
                ),
                Panel(
                    "Cores in use",
                    [Query(_by_worker("process_cpu_seconds_total"), _NAME)],
                ),
            ],
        ),
    ],
    variables=[("instance", "baton_worker_info")],
)
