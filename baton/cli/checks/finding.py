"""Findings: the results of checks."""

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass


class Level(enum.StrEnum):
    """Severity of a finding. A `NOTE` is worth knowing, and may be intended."""

    OK = "ok"
    NOTE = "note"
    FAULT = "fault"


@dataclass(frozen=True, slots=True)
class Finding:
    """Finding of one check: a line of the report.

    Attributes:
        subject: what was checked, such as "Redis".
        text: its state.
        advice: what to do; empty if there is nothing to be done.
    """

    level: Level
    subject: str
    text: str
    advice: str = ""


def ok(subject: str, text: str) -> Finding:
    return Finding(Level.OK, subject, text)


def note(subject: str, text: str, advice: str = "") -> Finding:
    return Finding(Level.NOTE, subject, text, advice)


def fault(subject: str, text: str, advice: str) -> Finding:
    return Finding(Level.FAULT, subject, text, advice)


def differences(values: Mapping[str, str]) -> str:
    """Returns the most common value, and the names that differ from it."""
    ((most_common, _),) = Counter(values.values()).most_common(1)
    others = ", ".join(f"{name}: {value}" for name, value in values.items() if value != most_common)
    return f"{most_common}, but {others}"
