"""Findings: the results of checks."""

import enum
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
