"""Dashboards as Grafana reads them, with only what differs from its defaults said.

Knows nothing of Baton.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

SCHEMA_VERSION = 39  # Grafana 10.4 and later read it
_COLUMNS = 24

METRICS: Json = {"type": "prometheus", "uid": "${metrics}"}
TRACES: Json = {"type": "tempo", "uid": "${traces}"}


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression.

    Attributes:
        legend: what its series are called, in Grafana's way: "{{role}}".
        has_exemplars: those of its histogram are shown, and lead to their traces.
    """

    expression: str
    legend: str = ""
    has_exemplars: bool = False

    def to_json(self, name: str, kind: str) -> Json:
        is_heatmap = kind == "heatmap"
        query: Json = {
            "refId": name,
            "datasource": METRICS,
            "expr": self.expression,
            "legendFormat": "{{le}}" if is_heatmap else self.legend or "__auto",
            "exemplar": self.has_exemplars,
        }
        if is_heatmap:
            query["format"] = "heatmap"
        if kind in ("stat", "bargauge"):
            query["instant"] = True
        return query


@dataclass(frozen=True, slots=True)
class TraceQuery:
    """One TraceQL expression: spans that match, or numbers made of them over time."""

    expression: str
    num_traces: int = 20

    def to_json(self, name: str, kind: str) -> Json:
        query: Json = {
            "refId": name,
            "datasource": TRACES,
            "queryType": "traceql",
            "query": self.expression,
            "filters": [],
        }
        if kind == "table":
            query |= {"limit": self.num_traces, "tableType": "spans"}
        return query


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture.

    Attributes:
        unit: of its numbers, as Grafana names it: "s", "Bps", "percentunit", "short".
        text: what a viewer should know to read it.
        width, height: in columns of 24, and rows of 30 pixels.
        is_stacked: the series add up to a whole.
        most: the end of the scale, where it is known.
    """

    title: str
    queries: Sequence[Query | TraceQuery]
    unit: str = "short"
    text: str = ""
    kind: str = "timeseries"
    width: int = 8
    height: int = 8
    is_stacked: bool = False
    most: float | None = None

    def to_json(self, number: int, x: int, y: int) -> Json:
        is_traced = isinstance(self.queries[0], TraceQuery)
        defaults: Json = {"unit": self.unit}
        if self.kind in ("timeseries", "bargauge"):
            defaults["min"] = 0
        if self.most is not None:
            defaults["max"] = self.most
        if self.kind == "timeseries":
            defaults["custom"] = {"fillOpacity": 10, "showPoints": "never"}
        if self.is_stacked:
            defaults["custom"] |= {"fillOpacity": 40, "stacking": {"mode": "normal", "group": "A"}}
        panel: Json = {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.text,
            "datasource": TRACES if is_traced else METRICS,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "fieldConfig": {"defaults": defaults, "overrides": []},
            "targets": [
                query.to_json(chr(ord("A") + place), self.kind)
                for place, query in enumerate(self.queries)
            ],
        }
        if self.kind == "timeseries":
            panel["options"] = _TIMESERIES
        elif self.kind == "stat":
            panel["options"] = _STAT
        elif self.kind == "heatmap":
            panel["options"] = _HEATMAP | {"yAxis": {"axisPlacement": "left", "unit": self.unit}}
        return panel


@dataclass(frozen=True, slots=True)
class Row:
    """A headline, with the panels below it."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard.

    Attributes:
        uid: its name in links.
        variables: beside the data sources; each a label of a metric to choose values of.
    """

    uid: str
    title: str
    text: str
    rows: Sequence[Row]
    variables: Sequence[tuple[str, str]] = ()

    def to_json(self) -> Json:
        panels, y, number = [], 0, 1
        for row in self.rows:
            panels.append(_headline(row.title, number, y))
            number, y, x, tallest = number + 1, y + 1, 0, 0
            for panel in row.panels:
                if x + panel.width > _COLUMNS:
                    x, y, tallest = 0, y + tallest, 0
                panels.append(panel.to_json(number, x, y))
                number, x, tallest = number + 1, x + panel.width, max(tallest, panel.height)
            y += tallest
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.text,
            "tags": ["baton"],
            "schemaVersion": SCHEMA_VERSION,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "10s",
            "time": {"from": "now-30m", "to": "now"},
            "templating": {"list": [*_SOURCES, *(_variable(*v) for v in self.variables)]},
            "annotations": {"list": []},
            "links": [_LINK],
            "panels": panels,
        }


_TIMESERIES: Json = {
    "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
    "tooltip": {"mode": "multi", "sort": "desc"},
}
_STAT: Json = {
    "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    "colorMode": "value",
    "graphMode": "area",
    "justifyMode": "auto",
    "textMode": "auto",
    "orientation": "auto",
    "wideLayout": True,
    "showPercentChange": False,
    "percentChangeColorMode": "standard",
}
_HEATMAP: Json = {
    "calculate": False,
    "color": {
        "mode": "scheme",
        "scheme": "Oranges",
        "fill": "dark-orange",
        "exponent": 0.5,
        "steps": 64,
        "reverse": False,
    },
    "cellGap": 1,
    "filterValues": {"le": 1e-9},
    "exemplars": {"color": "rgba(255,0,255,0.7)"},
    "legend": {"show": True},
    "tooltip": {"mode": "single", "yHistogram": True, "showColorScale": False},
    "showValue": "auto",
}
_SOURCES = [
    {
        "name": name,
        "label": label,
        "type": "datasource",
        "query": kind,
        "hide": 0,
        "includeAll": False,
        "multi": False,
    }
    for name, label, kind in (
        ("metrics", "Metrics", "prometheus"),
        ("traces", "Traces", "tempo"),
    )
]
_LINK: Json = {
    "title": "Baton",
    "type": "dashboards",
    "tags": ["baton"],
    "asDropdown": True,
    "includeVars": True,
    "keepTime": True,
    "targetBlank": False,
    "icon": "external link",
    "tooltip": "",
}


def _headline(title: str, number: int, y: int) -> Json:
    return {
        "id": number,
        "type": "row",
        "title": title,
        "collapsed": False,
        "gridPos": {"x": 0, "y": y, "w": _COLUMNS, "h": 1},
        "panels": [],
    }


def _variable(label: str, metric: str) -> Json:
    return {
        "name": label,
        "type": "query",
        "datasource": METRICS,
        "query": f"label_values({metric}, {label})",
        "refresh": 2,
        "sort": 1,
        "hide": 0,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
    }
