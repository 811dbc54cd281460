"""The report of a study: one HTML file that needs nothing else."""

from collections.abc import Mapping, Sequence
from html import escape

from baton_simulator.outcome import Outcome
from baton_simulator.setup import Setup
from baton_simulator.study import Study
from baton_simulator.svg import Points, line_chart
from baton_simulator.table import COLUMNS, row_of

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1180px; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 1rem; }
figure { margin: 0; } figure > svg { width: 100%; }
svg text { font-size: 11px; fill: currentColor; } figure > svg > line { stroke: #8884; }
svg polyline, figcaption line { stroke-width: 2; }
figcaption svg { width: 24px; height: 8px; }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #161616; } }
"""


def report(study: Study, outcomes: Sequence[Outcome], trace: str) -> str:
    """All figures as a table and as charts."""
    cases = list(dict.fromkeys(outcome.case for outcome in outcomes))
    of_case = {case: [o for o in outcomes if o.case == case] for case in cases}
    by_rate = [
        ("Goodput", "requests/s that meet both", {c: _goodputs(of_case[c]) for c in cases}),
        ("Time to first token, 90%", "seconds", {c: _first_tokens(of_case[c]) for c in cases}),
    ]
    charts = [
        _chart(title, line_chart(lines, "times the trace's rate", unit))
        for title, unit, lines in by_rate
    ]
    for rate in study.rates:
        here = [o for o in outcomes if o.rate == rate]
        charts += [
            _chart(
                f"Time to first token at {rate:g} times the rate",
                _distribution({o.case: o.ttfts for o in here}, "requests"),
            ),
            _chart(
                f"Time between tokens at {rate:g} times the rate",
                _distribution({o.case: o.itls for o in here}, "tokens"),
            ),
        ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>baton simulate: {escape(trace)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(trace)}</h1><p>{escape(description(study))}</p>{_table(outcomes)}"
        f'<div class="charts">{"".join(charts)}</div></body></html>\n'
    )


def description(study: Study) -> str:
    """Returns the simulated setup in a few sentences."""
    setup, objectives = study.setup, study.objectives
    machine = setup.machine
    return (
        f"{_workers(setup)}; as many colocated ones as all together. "
        f"Each holds {setup.num_blocks:,} blocks of {setup.block_size} "
        f"tokens, runs {machine.max_num_seqs} sequences at once and computes "
        f"{machine.max_num_batched_tokens:,} tokens a step. Steps: {machine.steps}. "
        f"Admission: {setup.admission}"
        f"{'' if setup.ttft_deadline is None else ', and late requests are refused'}. "
        f"Goodput counts requests whose first token comes within {objectives.ttft * 1e3:g} ms and "
        f"whose tokens are {objectives.itl * 1e3:g} ms apart in the mean at most."
    )


def _workers(setup: Setup) -> str:
    encode = f"{setup.num_encode} encode, " if setup.num_encode else ""
    return f"{encode}{setup.num_prefill} prefill and {setup.num_decode} decode workers"


def _goodputs(outcomes: Sequence[Outcome]) -> Points:
    return [(o.rate, o.goodput) for o in outcomes]


def _first_tokens(outcomes: Sequence[Outcome]) -> Points:
    return [(o.rate, o.ttft[1]) for o in outcomes]


def _distribution(values: Mapping[str, tuple[float, ...]], unit: str) -> str:
    lines = {
        case: [(value, i / len(of_case)) for i, value in enumerate(of_case, 1)]
        for case, of_case in values.items()
    }
    return line_chart(lines, "seconds, at most", f"part of all {unit}", log_x=True)


def _chart(title: str, chart: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{chart}</section>"


def _table(outcomes: Sequence[Outcome]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in COLUMNS)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row_of(o)) + "</tr>"
        for o in outcomes
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
