"""Scheduling policies and drafters by name: those of Baton, and those that other packages add.

A package declares them as entry points in its metadata; a setting then names them:

    [project.entry-points."baton.scheduling_policies"]
    by-tenant = "my_package:BY_TENANT"

    [project.entry-points."baton.drafters"]
    small-model = "my_package:SmallModelDrafter"

A policy is a `Policy`, a drafter a `DrafterFactory`. Plug-ins run in the engine's thread: an error
in one ends the engine.
"""

from collections.abc import Mapping
from typing import Protocol, cast

from baton.engine.scheduler.scheduling.policy import POLICIES, Policy
from baton.engine.scheduler.sequences.prompt_lookup import Drafter, NgramDrafter
from baton.plugins import plugin_named

POLICY_GROUP = "baton.scheduling_policies"
DRAFTER_GROUP = "baton.drafters"


class DrafterFactory(Protocol):
    """Constructor of a drafter: a class, or a function."""

    def __call__(self, *, model_path: str, vocab_size: int) -> Drafter:
        """Returns a drafter for the model in the folder `model_path`. Its drafts are token ids in
        [0, `vocab_size`)."""
        ...


def _ngram(*, model_path: str, vocab_size: int) -> Drafter:  # noqa: ARG001 - a factory's
    return NgramDrafter()


DRAFTERS: Mapping[str, DrafterFactory] = {"ngram": _ngram}


def policy_named(name: str) -> Policy:
    """Returns a scheduling policy. Raises `InvalidArgumentError` if none has this name."""
    return cast("Policy", plugin_named("policy", name, POLICIES, POLICY_GROUP))


def drafter_named(name: str) -> DrafterFactory:
    """Returns a drafter's factory. Raises `InvalidArgumentError` if none has this name."""
    return cast("DrafterFactory", plugin_named("drafter", name, DRAFTERS, DRAFTER_GROUP))
