"""Format of placement records: one JSON object per line, without prompt text or token ids.

    {"baton_record": 1, "rules": {...}}                                     the first line of a file
    {"at", "id", "tokens", "demand", "images", "hashes", "workers", "gone", "broken",
     "needs_prefill", "prefill_alone", "prefill", "decode", "encoders"}     a decision
    {"ended", "at", "output_tokens"}                                            a request has ended

`at` is in seconds of the wall clock, `hashes` the chain hashes of the prompt's full blocks (base64,
16 bytes each). `demand` has the upper bounds of the request's demand. `images` has the start, the
end and the content hash (base64) of each encoder input, `encoders` the source of each output that
was needed, by index of the input. `workers` has the changed fields of each candidate since the
previous decision in the same file, or all fields of a worker that was no candidate of it; `gone`
lists the workers that are no longer candidates. Empty fields are omitted. So every file can be read
by itself.
"""

import base64
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.cluster.prefix import HASH_BYTES, BlockHash
from baton.errors import InvalidArgumentError
from baton_router.call.request import Demand
from baton_router.routing.fleet.candidate import Candidate, WorkerLimits
from baton_router.routing.fleet.cost_rates import Rates
from baton_router.routing.placement.decision import Decision, PlacementInputs, Rules
from baton_router.routing.placement.placement import Placement

VERSION = 1

_VERSION_KEY = "baton_record"
_NEVER_LEFT_OUT = ("at", "id", "tokens")
_FIELDS = tuple(name for name in Candidate._fields if name != "worker")

Workers = Mapping[str, Candidate]
Encoders = Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Recorded:
    """Recorded placement decision.

    Attributes:
        at: time of the decision, in seconds of the wall clock.
        hashes: chain hashes of the prompt's full blocks.
        prefill, decode: chosen workers. One of them empty: the other alone; both empty: no worker
            could take the request.
        encoders: chosen source of each encoder output that was needed, by index of the input.
    """

    at: float
    rules: Rules
    inputs: PlacementInputs
    hashes: tuple[BlockHash, ...]
    prefill: str
    decode: str
    encoders: Encoders


def encoders_of(placement: Placement | None) -> Encoders:
    """Returns the sources of a placement's encoder outputs as a record has them."""
    return {choice.input: choice.worker for choice in placement.encoders} if placement else {}


def header_line(rules: Rules) -> bytes:
    return _line({_VERSION_KEY: VERSION, "rules": dataclasses.asdict(rules)})


def decision_line(at: float, decision: Decision, hashes: list[BlockHash], before: Workers) -> bytes:
    """Returns a decision's line. `before`: the file's previous decision's candidates, by worker."""
    inputs, placement = decision.inputs, decision.placement
    now = {c.worker: c for c in inputs.candidates}
    entry = {
        "at": at,
        "id": inputs.request_id,
        "tokens": inputs.num_tokens,
        "demand": dataclasses.asdict(inputs.demand) if inputs.demand else None,
        "images": [(start, end, _text(content)) for start, end, content in inputs.images],
        "hashes": _text(b"".join(hashes)),
        "workers": {w: change for w, c in now.items() if (change := _change(before.get(w), c))},
        "gone": [worker for worker in before if worker not in now],
        "broken": sorted(inputs.broken),
        "needs_prefill": inputs.needs_prefill,
        "prefill_alone": inputs.prefill_alone,
        "prefill": placement.prefill if placement else "",
        "decode": placement.decode if placement else "",
        "encoders": encoders_of(placement),
    }
    return _line({key: value for key, value in entry.items() if value or key in _NEVER_LEFT_OUT})


def ended_line(at: float, request_id: str, num_output_tokens: int) -> bytes:
    return _line({"ended": request_id, "at": at, "output_tokens": num_output_tokens})


class RecordReader:
    """Record reader for the lines of one file, in order."""

    def __init__(self) -> None:
        self._rules: Rules | None = None
        self._workers: dict[str, Candidate] = {}

    def read(self, line: bytes) -> Recorded | None:
        """Returns the decision on this line; None for a line of another kind. Raises
        `InvalidArgumentError` for a line that no router of this version has written."""
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
        hashes = _bytes(entry.get("hashes", ""))
        inputs = PlacementInputs(
            entry["id"],
            entry["tokens"],
            tuple(self._workers.values()),
            frozenset((prefill, decode) for prefill, decode in entry.get("broken", ())),
            entry.get("needs_prefill", False),
            entry.get("prefill_alone", False),
            tuple((start, end, _bytes(content)) for start, end, content in entry.get("images", ())),
            Demand(**entry["demand"]) if "demand" in entry else None,
        )
        return Recorded(
            at=entry["at"],
            rules=rules,
            inputs=inputs,
            hashes=tuple(hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES)),
            prefill=entry.get("prefill", ""),
            decode=entry.get("decode", ""),
            encoders={int(index): source for index, source in entry.get("encoders", {}).items()},
        )


def _rules_of(entry: dict[str, Any]) -> Rules:
    version = entry.get(_VERSION_KEY)
    if version != VERSION:
        raise InvalidArgumentError(
            "record", f"is of version {version}; this is read by version {VERSION}"
        )
    return Rules(**entry["rules"])


def _change(before: Candidate | None, now: Candidate) -> dict[str, Any]:
    """Returns the fields in which a candidate differs from `before`, as JSON values."""
    if now is before:
        return {}
    return {
        name: _plain(getattr(now, name))
        for name in _FIELDS
        if before is None or getattr(now, name) != getattr(before, name)
    }


def _changed(worker: str, before: Candidate | None, change: dict[str, Any]) -> Candidate:
    if "pairing" in change:
        change["pairing"] = _bytes(change["pairing"])
    for name in ("cached_inputs", "pending_inputs"):
        if name in change:
            change[name] = tuple(change[name])
    for name, kind in (("rates", Rates), ("limits", WorkerLimits)):
        if change.get(name) is not None:
            change[name] = kind(**change[name])
    if before is None:
        return Candidate(worker=worker, **change)
    return before._replace(**change)


def _plain(value: Any) -> Any:
    if isinstance(value, Rates | WorkerLimits):
        return dataclasses.asdict(value)
    return _text(value) if isinstance(value, bytes) else value


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _line(entry: dict[str, Any]) -> bytes:
    return json.dumps(entry, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"
