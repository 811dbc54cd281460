"""Check of the pairing of workers: whether all of one model can exchange blocks."""

from collections import defaultdict
from collections.abc import Iterator, Mapping

from baton.cli.checks.finding import Finding, differences, fault, note, ok
from baton.client.types import Info, WorkerFacts
from baton.version import NOT_INSTALLED


def pairing(processes: Mapping[str, Info]) -> Iterator[Finding]:
    """Checks that every worker can exchange blocks with every other of its version and model."""
    workers: defaultdict[str, dict[str, WorkerFacts]] = defaultdict(dict)
    for name, info in processes.items():
        if info.worker is not None:
            workers[version_of(info)][name] = info.worker
    if len(workers) > 1:
        listed = "; ".join(f"{v}: {', '.join(facts)}" for v, facts in sorted(workers.items()))
        advice = "finish the upgrade or roll it back: workers exchange blocks within one version"
        yield note("pairing", f"the versions of workers differ: {listed}", advice)
    for version, facts in sorted(workers.items()):
        models = sorted({fact.model for fact in facts.values()})
        for model in models:
            own = {name: fact for name, fact in facts.items() if fact.model == model}
            who = "all workers" if len(workers) == 1 else f"those of {version}"
            yield _pairing_of(who if len(models) == 1 else f"{who} of {model}", own)


def _pairing_of(who: str, facts: Mapping[str, WorkerFacts]) -> Finding:
    """Checks that these workers, which are of one version, can exchange blocks."""
    dtypes = {name: fact.dtype for name, fact in facts.items() if fact.dtype}
    if len(set(dtypes.values())) > 1:
        advice = "start all with the same --dtype: auto depends on the device and the CPU of each"
        return fault("dtype", f"workers compute in different ones: {differences(dtypes)}", advice)
    contents = {name: fact.content.hex()[:12] for name, fact in facts.items() if fact.content}
    if len(set(contents.values())) > 1:
        advice = "finish the rollout, or start all with the same model, revision and dtype"
        return fault("weights", f"workers serve different ones: {differences(contents)}", advice)
    prints = {name: fact.fingerprint.hex()[:12] for name, fact in facts.items()}
    layouts = {name: fact.layouts for name, fact in facts.items()}
    if len(set(prints.values())) > 1:
        advice = "start all with the same model, revision, dtype and --deterministic"
        text = f"models or their numerics differ: {differences(prints)}"
        return fault("pairing", text, advice)
    if len(set(layouts.values())) > 1:
        advice = "start all with the same dtype, kv_cache_dtype and block size"
        return fault("pairing", f"KV cache layouts differ: {differences(layouts)}", advice)
    devices = ", ".join(sorted({fact.device for fact in facts.values()}))
    model = next(iter(facts.values())).model
    return ok("pairing", f"{who} can exchange blocks ({model} on {devices})")


def version_of(process: Info) -> str:
    """Returns the version of Baton that a process runs."""
    return process.versions.get("baton", NOT_INSTALLED)
