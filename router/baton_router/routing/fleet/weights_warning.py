"""Warning of different weights under one model's name.

Knows nothing of requests: `lifecycle/` keeps each of them on the weights that it began with.
"""

from collections.abc import Mapping, Sequence

from baton.cluster.throttled_log import ThrottledLog
from baton_router.routing.fleet.candidate import ONE_DTYPE


class WeightsWarning:
    """Warning of the workers of one model, once for each kind of weights that they are mixed with:
    not for each worker of a rollout, and again for the next one."""

    def __init__(self, log: ThrottledLog) -> None:
        self._log = log
        self._told: frozenset[bytes] = frozenset()

    def update(
        self,
        model: str,
        contents: Mapping[bytes, Sequence[str]],
        dtypes: Mapping[str, Sequence[str]],
    ) -> None:
        """Takes the workers that are there now, by the hash of their weights and by KV dtype."""
        if len(contents) <= 1:
            self._told = frozenset()
        elif contents.keys() - self._told:
            self._told |= contents.keys()
            self._warn(model, contents, dtypes)

    def _warn(
        self,
        model: str,
        contents: Mapping[bytes, Sequence[str]],
        dtypes: Mapping[str, Sequence[str]],
    ) -> None:
        kind, advice = "weights", "Finish the rollout, or give the workers one model"
        if len(dtypes) > 1:
            kind, advice = "dtypes", f"Their KV dtypes differ ({_listed(dtypes)}): {ONE_DTYPE}"
        self._log.warning(
            "workers of model %r serve different weights (%s): answers come from either, and "
            "none continues on the other. %s",
            model,
            _listed({content.hex()[:12]: workers for content, workers in contents.items()}),
            advice,
            kind=kind,
        )


def _listed(workers: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{kind}: {', '.join(of)}" for kind, of in workers.items())
