"""Format of placement records: one JSON object per line, never a text or a token id.

    {"baton_record": 1, "rules": {...}}                                     the first line of a file
    {"at", "id", "tokens", "hashes", "workers", "gone", "broken", "needs_prefill", "prefill",
     "decode"}                                                              a decision
    {"ended", "at", "output_tokens"}                                            a request has ended

`at` is in seconds of the wall clock, `hashes` the chain hashes of the prompt's full blocks (base64,
16 bytes each). `workers` has what has changed of each candidate since the decision before in the
same file, all of it where the worker was not among its candidates; `gone` names those that are
candidates no more. Empty fields are left out. So every file can be read by itself. Knows nothing of
files.
"""

import base64
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.cluster.prefix import HASH_BYTES, BlockHash
from baton.errors import InvalidArgumentError
from baton_router.fleet.candidate import Candidate
from baton_router.fleet.cost_rates import Rates
from baton_router.placement.decision import Decision, Question, Rules

VERSION = 1

_VERSION_KEY = "baton_record"
_NEVER_LEFT_OUT = ("at", "id", "tokens")
_FIELDS = tuple(field.name for field in dataclasses.fields(Candidate) if field.name != "worker")

Workers = Mapping[str, Candidate]


@dataclass(frozen=True, slots=True)
class Recorded:
    """One decision as it was recorded.

    Attributes:
        at: when, in seconds of the wall clock.
        hashes: the chain hashes of the prompt's full blocks.
        prefill, decode: who was chosen. An empty `prefill`: the decode worker alone; both empty:
            nobody.
    """

    at: float
    rules: Rules
    question: Question
    hashes: tuple[BlockHash, ...]
    prefill: str
    decode: str


def header_line(rules: Rules) -> bytes:
    return _line({_VERSION_KEY: VERSION, "rules": dataclasses.asdict(rules)})


def decision_line(at: float, decision: Decision, hashes: list[BlockHash], before: Workers) -> bytes:
    """`before`: the candidates of the decision before in the same file, by worker."""
    question, placement = decision.question, decision.placement
    now = {c.worker: c for c in question.candidates}
    entry = {
        "at": at,
        "id": question.request_id,
        "tokens": question.num_tokens,
        "hashes": base64.b64encode(b"".join(hashes)).decode(),
        "workers": {w: change for w, c in now.items() if (change := _change(before.get(w), c))},
        "gone": [worker for worker in before if worker not in now],
        "broken": sorted(question.broken),
        "needs_prefill": question.needs_prefill,
        "prefill": placement.prefill if placement else "",
        "decode": placement.decode if placement else "",
    }
    return _line({key: value for key, value in entry.items() if value or key in _NEVER_LEFT_OUT})


def ended_line(at: float, request_id: str, num_output_tokens: int) -> bytes:
    return _line({"ended": request_id, "at": at, "output_tokens": num_output_tokens})


class RecordReader:
    """Reads the lines of one file, in order."""

    def __init__(self) -> None:
        self._rules: Rules | None = None
        self._workers: dict[str, Candidate] = {}

    def read(self, line: bytes) -> Recorded | None:
        """The decision on this line; None: it is of something else. Raises `InvalidArgumentError`
        for what no router of this version has written."""
        try:
            entry = json.loads(line)
            if self._rules is None:
                self._rules = _rules_of(entry)
                return None
            return None if "ended" in entry else self._decision(entry, self._rules)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidArgumentError("record", f"has a line that is none: {error}") from error

    def _decision(self, entry: dict[str, Any], rules: Rules) -> Recorded:
        for worker in entry.get("gone", ()):
            del self._workers[worker]
        for worker, change in entry.get("workers", {}).items():
            self._workers[worker] = _changed(worker, self._workers.get(worker), change)
        hashes = base64.b64decode(entry.get("hashes", ""), validate=True)
        question = Question(
            entry["id"],
            entry["tokens"],
            tuple(self._workers.values()),
            frozenset((prefill, decode) for prefill, decode in entry.get("broken", ())),
            entry.get("needs_prefill", False),
        )
        return Recorded(
            at=entry["at"],
            rules=rules,
            question=question,
            hashes=tuple(hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES)),
            prefill=entry.get("prefill", ""),
            decode=entry.get("decode", ""),
        )


def _rules_of(entry: dict[str, Any]) -> Rules:
    version = entry.get(_VERSION_KEY)
    if version != VERSION:
        raise InvalidArgumentError(
            "record", f"is of version {version}; this is read by version {VERSION}"
        )
    return Rules(**entry["rules"])


def _change(before: Candidate | None, now: Candidate) -> dict[str, Any]:
    """The fields in which a candidate differs from what it was, as JSON has them."""
    if now is before:
        return {}
    return {
        name: _plain(getattr(now, name))
        for name in _FIELDS
        if before is None or getattr(now, name) != getattr(before, name)
    }


def _changed(worker: str, before: Candidate | None, change: dict[str, Any]) -> Candidate:
    if "pairing" in change:
        change["pairing"] = base64.b64decode(change["pairing"], validate=True)
    if change.get("rates") is not None:
        change["rates"] = Rates(**change["rates"])
    if before is None:
        return Candidate(worker=worker, **change)
    return dataclasses.replace(before, **change)


def _plain(value: Any) -> Any:
    if isinstance(value, Rates):
        return dataclasses.asdict(value)
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


def _line(entry: dict[str, Any]) -> bytes:
    return json.dumps(entry, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"
