"""Metrics of real processes, as a monitoring system reads them."""

import re
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from baton.cli.local.local_cluster import LocalCluster
from tests.support.repository import ROOT

_ACCEPT = {"Accept": "application/openmetrics-text; version=1.0.0"}

Labels = frozenset[tuple[str, str]]


@dataclass
class Family:
    """One metric of one process. `samples`: by name and labels."""

    kind: str
    text: str
    samples: dict[tuple[str, Labels], float] = field(default_factory=dict)
    exemplars: list[Mapping[str, str]] = field(default_factory=list)

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples with this name and, among others, these labels."""
        return sum(
            value
            for (sample, at), value in self.samples.items()
            if sample == name and labels.items() <= at
        )


def scrape(endpoint: str) -> dict[str, Family]:
    """The metrics of a process, by name; that of a counter ends in _total."""
    request = urllib.request.Request(f"http://{endpoint}/metrics", headers=_ACCEPT)
    with urllib.request.urlopen(request, timeout=10) as response:
        text = response.read().decode()
    families = {}
    for metric in text_string_to_metric_families(text):
        suffix = "_total" if metric.type == "counter" else ""
        family = families[metric.name + suffix] = Family(metric.type, metric.documentation)
        for sample in metric.samples:
            family.samples[sample.name, frozenset(sample.labels.items())] = sample.value
            if sample.exemplar:
                family.exemplars.append(sample.exemplar.labels)
    return families


def scrape_all(cluster: LocalCluster) -> dict[str, dict[str, Family]]:
    """Returns the metrics of all processes, by the name of each."""
    return {name: scrape(endpoint) for name, endpoint in cluster.metrics_endpoints.items()}


def total(
    scraped: Mapping[str, Mapping[str, Family]], name: str, sample: str = "", **labels: str
) -> float:
    """A metric's sum over all processes that have it."""
    return sum(
        families[name].total(sample or name, **labels)
        for families in scraped.values()
        if name in families
    )


def documented_metrics() -> dict[str, tuple[str, str, set[str], str]]:
    """Metrics by name, as docs/telemetry.md lists them: where each is served, its kind, its labels
    and its text."""
    rows = {}
    for line in (ROOT / "docs" / "telemetry.md").read_text(encoding="utf-8").splitlines():
        row = re.fullmatch(r"\| `(\w+)` \| (\w+) \| (\w+) \| (.*?) \| (\w+) \| (.*) \|", line)
        if row is not None:
            name, where, kind, labels, _unit, text = row.groups()
            rows[name] = where, kind, set(re.findall(r"`(\w+)`", labels)), text
    return rows
