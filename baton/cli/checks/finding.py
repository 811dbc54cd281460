"""Result of one check."""

import enum
from dataclasses import dataclass


class Level(enum.StrEnum):
    """Severity of a finding. A `NOTE` is worth knowing, and may be intended."""

    OK = "ok"
    NOTE = "note"
    FAULT = "fault"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        subject: what was looked at, such as "Redis".
        text: how it is.
        advice: what to do; empty where there is nothing to be done.
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
