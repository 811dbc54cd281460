"""Options of `baton up` that are settings of its workers, of all of them or of those of a role.

`--max-num-seqs 32` is every worker's, `--prefill.max-num-seqs 32` that of the prefill workers.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import islice
from typing import Any, cast

from typer.core import TyperCommand

from baton.rpc.worker_role import ROLES
from baton.settings.other_servers import advice_on

DECIDED_BY_UP = frozenset({
    "model", "worker_id", "host", "port", "admin_host", "admin_port", "advertise_host", "kv_port",
    "metrics_port", "redis_url", "redis_password", "tls_cert", "tls_key", "tls_ca", "insecure",
})  # fmt: skip
"""Settings that `baton up` decides for each process itself."""
SWITCHES = (bool, bool | None)
"""Types of settings whose flags take no value."""


@dataclass(slots=True)
class WorkerFlags:
    """Settings of workers by field, as `LocalCluster` takes them.

    Attributes:
        common: those of all workers.
        of_role: those of one role's, by role.
    """

    common: dict[str, object] = field(default_factory=dict)
    of_role: dict[str, dict[str, object]] = field(
        default_factory=lambda: {role: {} for role in ROLES}
    )


class TakesWorkerSettings(TyperCommand):
    """Command that takes workers' settings as options, which its help does not list. They are its
    context's `obj`, `WorkerFlags`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses what is no setting of a worker as every command does. Fails for an unknown option,
        with advice for what other servers call so."""
        own = {
            name: getattr(each, "is_flag", False)
            for each in self.get_params(ctx)
            for name in (*each.opts, *each.secondary_opts)
        }
        ctx.obj = WorkerFlags()
        if any(_name(arg) not in own for arg in args if arg.startswith("--")):
            args = _Reader(ctx, own).take(args)  # workers' settings take a while to import
        return super().parse_args(ctx, args)


class _Reader:
    """Reader of a command line. `own`: the command's own options, and whether each is a flag."""

    def __init__(self, ctx: Any, own: Mapping[str, bool]) -> None:
        from baton.worker.roles import settings_class

        fields = settings_class().model_fields.items()
        self._ctx = ctx
        self._own = own
        self._settings = {
            flag: (name, value)
            for name, about in fields
            if name not in DECIDED_BY_UP
            for flag, value in _flags_of(name, is_switch=about.annotation in SWITCHES).items()
        }

    def take(self, args: list[str]) -> list[str]:
        """Returns the arguments that are no settings of workers; the context gets those."""
        left: list[str] = []
        coming = iter(args)
        for arg in coming:
            if arg == "--":
                return [*left, arg, *coming]
            role, flag = _role_and_flag(_name(arg))
            setting = self._settings.get(flag)
            if not arg.startswith("--"):
                left.append(arg)
            elif _name(arg) in self._own:
                has_value = "=" in arg or self._own[_name(arg)]
                left += [arg, *islice(coming, 0 if has_value else 1)]
            elif setting is None:
                self._fail(_name(arg), flag)
            else:
                name, meant = setting
                flags: WorkerFlags = self._ctx.obj
                values = flags.of_role[role] if role else flags.common
                values[name] = self._value(arg, coming) if meant is None else meant
        return left

    def _value(self, arg: str, following: Iterator[str]) -> str:
        flag, equals, value = arg.partition("=")
        found = value if equals else next(following, None)
        if found is None:
            self._ctx.fail(f"Option {flag!r} requires an argument.")
        return cast("str", found)  # `fail` does not return

    def _fail(self, name: str, flag: str) -> None:
        if advice := advice_on(flag):
            self._ctx.fail(f"No such option: {name}; {advice}.")
        close = get_close_matches(flag, [*self._own, *self._settings], n=1)
        hint = f"did you mean {close[0]}?" if close else "--help lists what there is."
        self._ctx.fail(f"No such option: {name}; {hint}")


def _name(arg: str) -> str:
    return arg.partition("=")[0]


def _role_and_flag(name: str) -> tuple[str, str]:
    """Returns the role before the dot, "" if there is none, and the flag without it."""
    prefix, _, rest = name.removeprefix("--").partition(".")
    return (prefix, f"--{rest}") if prefix in ROLES and rest else ("", name)


def _flags_of(field_name: str, *, is_switch: bool) -> dict[str, bool | None]:
    """Returns the flags of a setting, each with the value that it means; None: the one after it."""
    flag = field_name.replace("_", "-")
    return {f"--{flag}": True, f"--no-{flag}": False} if is_switch else {f"--{flag}": None}
