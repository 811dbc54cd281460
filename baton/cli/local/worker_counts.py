"""Workers of each model that a local cluster starts, by role, from the options of `baton up`."""

from collections.abc import Mapping
from dataclasses import dataclass

from baton.errors import InvalidArgumentError

# Settings of the router that `--workers` implies, each with its reason.
_IMPLIED: Mapping[str, tuple[bool, str]] = {
    "conditional_disaggregation": (True, "without prefill workers decode workers compute prompts"),
    "elastic": (False, "there are no pools to balance"),
}


@dataclass(frozen=True, slots=True)
class WorkerCounts:
    """Number of workers of each model, by role. Without prefill workers decode workers compute
    prompts themselves."""

    encode: int
    prefill: int
    decode: int

    def check_settings(self, of_role: Mapping[str, Mapping[str, object]]) -> None:
        """Raises `InvalidArgumentError` for a setting of a role that has no workers. `of_role`:
        settings by role and field."""
        idle = [role for role in of_role if of_role[role] and not getattr(self, role)]
        for role in idle:
            name, value = next(iter(of_role[role].items()))
            flag = name.replace("_", "-")
            instead = "start one with --encode 1" if role == "encode" else "leave --workers out"
            raise InvalidArgumentError(
                f"--{role}.{flag}",
                f"is {value}, and no {role} worker is started; {instead}, or give --{flag} to all "
                "workers",
            )


def worker_counts(
    encode: int, prefill: int | None, decode: int | None, workers: int | None
) -> WorkerCounts:
    """Returns the counts that these options ask for; None: one is not given. `workers`: of workers
    that compute prompts and write answers. Raises `InvalidArgumentError` for a count below 1, and
    for `workers` beside the others."""
    given = {"--workers": workers, "--prefill": prefill, "--decode": decode}
    for option, count in given.items():
        if count is not None and count < 1:
            raise InvalidArgumentError(
                option,
                f"is {count}; must be at least 1 (--workers 1 starts one worker for prompts and "
                "answers, --prefill 1 --decode 1 one for each)",
            )
    if workers is None:
        return WorkerCounts(encode, prefill or 1, decode or 1)
    for option in ("--prefill", "--decode"):
        if given[option] is not None:
            raise InvalidArgumentError(
                "--workers",
                f"is {workers} beside {option} {given[option]}; each of its workers computes "
                "prompts and writes answers. Leave one of the two out",
            )
    return WorkerCounts(encode, 0, workers)


def router_settings(given: Mapping[str, object], workers: int | None) -> dict[str, object]:
    """Returns the router's settings by field, with those that `workers`, of `--workers`, imply.
    Raises `InvalidArgumentError` for one that contradicts them."""
    if workers is None:
        return dict(given)
    for name, (value, why) in _IMPLIED.items():
        if given.get(name, value) is not value:
            flag = name.replace("_", "-")
            raise InvalidArgumentError(
                "--workers",
                f"is {workers} beside {flag}={str(given[name]).lower()} of the router; {why}. "
                "Leave one of the two out",
            )
    return {**given, **{name: value for name, (value, _) in _IMPLIED.items()}}
