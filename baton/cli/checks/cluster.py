"""Checks of a running cluster, which query every process from this machine."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from baton.cli.checks.encryption import encryption
from baton.cli.checks.finding import Finding, differences, fault, note, ok
from baton.cli.checks.pairing import pairing, version_of
from baton.cli.checks.pools import pools
from baton.cli.checks.slow_workers import slow_workers
from baton.cli.options.common import DEFAULT_ADMIN_ADDRESS
from baton.cli.session import admin_session, session
from baton.client.client import Client, Info, Worker
from baton.client.types import WorkerFacts
from baton.errors import BatonError
from baton.rpc.tls import Tls
from baton.sampling import SamplingParams
from baton.serving.grpc.access import WORKER_NAME

_TIMEOUT = 5.0
_SKEW = 1.0
_MAX_LISTED = 5


@dataclass(frozen=True, slots=True)
class _Answer:
    """Build info of a process, the seconds that its clock is ahead of this machine's, and whether
    its admission is paused."""

    info: Info
    skew: float
    is_paused: bool = False


def cluster(
    admin: str, address: str | None, token: str, tls: Tls | None = None
) -> Iterator[Finding]:
    """Checks the router whose admin service is at `admin`, and its workers; at `address`, if any,
    generates a token too. `tls`: files of an administrator."""
    try:
        with admin_session(admin, _TIMEOUT, token, tls) as client:
            router = _query(client)
            workers = client.list_workers()
    except BatonError as error:
        advice = (
            f"--admin is a router's port for administration, {DEFAULT_ADMIN_ADDRESS} by default"
        )
        yield fault("router", str(error), advice)
        return
    yield ok("router", f"answers at {admin}, Baton {version_of(router.info)}")
    yield from _workers(workers)
    yield from slow_workers(workers)
    answers: dict[str, _Answer] = {"router": router}
    for worker in workers:
        found = _query_worker(worker, tls)
        if isinstance(found, _Answer):
            answers[worker.id] = found
        else:
            yield found
    places = {"router": admin, **{worker.id: worker.admin_endpoint for worker in workers}}
    yield from _admission(answers, places)
    yield from _versions(answers)
    yield from pairing({name: answer.info for name, answer in answers.items()})
    yield from pools(_generating(workers, answers))
    yield from _redis(answers)
    yield from _clocks(answers)
    yield from encryption(_endpoints(admin, address, workers, answers), tls)
    if address is not None:
        yield _request(address, token, tls)


def _query(client: Client) -> _Answer:
    before = time.time()
    info = client.get_info()
    after = time.time()
    return _Answer(info, info.unix_time - (before + after) / 2, client.get_load().is_paused)


def _endpoints(
    admin: str, address: str | None, workers: Sequence[Worker], answers: Mapping[str, _Answer]
) -> dict[str, str]:
    """Returns the endpoints of all known processes, by name: one for each port."""
    endpoints = {"router's administration": admin}
    if address is not None:
        endpoints["router"] = address
    for worker in workers:
        answer = answers.get(worker.id)
        facts = None if answer is None else answer.info.worker
        endpoints[worker.id] = worker.endpoint
        endpoints[f"{worker.id}'s administration"] = worker.admin_endpoint
        if facts is not None and facts.kv_endpoint != worker.endpoint:
            endpoints[f"{worker.id}'s blocks"] = facts.kv_endpoint
    return endpoints


def _query_worker(worker: Worker, tls: Tls | None) -> _Answer | Finding:
    to_worker = None if tls is None else replace(tls, server_name=WORKER_NAME)
    try:
        with Client(worker.admin_endpoint, timeout=_TIMEOUT, tls=to_worker) as client:
            return _query(client)
    except BatonError as error:
        if worker.state == "ready":
            advice = "run this where the workers can be reached, to check them too"
            text = f"ready, but unreachable from here at {worker.admin_endpoint}: {error}"
            return note(worker.id, text, advice)
        return fault(
            worker.id, f"does not answer at {worker.admin_endpoint}: {error}", "see its log"
        )


def _workers(workers: Sequence[Worker]) -> Iterator[Finding]:
    """Checks that prefill and decode workers are ready; of models with a pooled output prefill
    workers are enough, and decode workers without any prefill worker. Without encode workers, the
    workers that compute prompts encode images."""
    generates = not workers or any(not worker.pooled_output for worker in workers)
    needed = ("prefill", "decode") if generates else ("prefill",)
    if {worker.role for worker in workers} - {"encode"} == {"decode"}:
        needed = ("decode",)
        text = "none is registered: decode workers compute prompts, as with `baton up --workers`"
        yield note("prefill workers", text, _start_advice("prefill"))
    for role in ("encode", "prefill", "decode"):
        of_role = [worker for worker in workers if worker.role == role]
        ready = [worker for worker in of_role if worker.state == "ready"]
        if not of_role and role not in needed:
            continue
        if not of_role:
            yield fault(f"{role} workers", "none is registered", _start_advice(role))
        elif not ready:
            listed = ", ".join(f"{worker.id} is {worker.state}" for worker in of_role)
            found = fault if role in needed else note
            yield found(f"{role} workers", f"none is ready: {listed}", "see their logs")
        else:
            yield ok(f"{role} workers", f"{len(ready)} of {len(of_role)} are ready")
        for worker in of_role:
            if ready and worker.state == "unreachable":
                advice = f"see its log, and check that the router can reach {worker.endpoint}"
                yield fault(worker.id, "the router cannot reach it", advice)


def _start_advice(role: str) -> str:
    return f"start `baton {role}-worker` with the router's --redis-url"


def _admission(answers: Mapping[str, _Answer], places: Mapping[str, str]) -> Iterator[Finding]:
    """Notes processes whose admission is paused: requests wait there, and expire."""
    for name, answer in answers.items():
        if answer.is_paused:
            advice = f"`baton resume --admin {places[name]}`"
            yield note(f"admission at {name}", "is paused: requests wait until they expire", advice)


def _versions(answers: Mapping[str, _Answer]) -> Iterator[Finding]:
    ours = {name: version_of(answer.info) for name, answer in answers.items()}
    if len(set(ours.values())) > 1:
        advice = "finish one rolling upgrade before the next; during one, versions may differ"
        yield note("versions", f"of Baton differ: {differences(ours)}", advice)
    else:
        yield ok("versions", f"Baton {next(iter(ours.values()))} everywhere")
    libraries = {n for answer in answers.values() for n in answer.info.versions if n != "baton"}
    for library in sorted(libraries):
        found = {
            name: answer.info.versions[library]
            for name, answer in answers.items()
            if library in answer.info.versions
        }
        if len(set(found.values())) > 1:
            yield note("versions", f"of {library} differ: {differences(found)}", "install the same")


def _generating(
    workers: Sequence[Worker], answers: Mapping[str, _Answer]
) -> dict[str, WorkerFacts]:
    """Returns the facts of the workers that hold sequences in their KV pools."""
    holding = {worker.id for worker in workers if worker.role != "encode"}
    facts = {name: answer.info.worker for name, answer in answers.items() if name in holding}
    return {name: fact for name, fact in facts.items() if fact is not None}


def _redis(answers: Mapping[str, _Answer]) -> Iterator[Finding]:
    state = {name: answer.info.redis for name, answer in answers.items()}
    silent = [name for name, redis in state.items() if redis == "silent"]
    none = [name for name, redis in state.items() if redis == "none"]
    if silent:
        advice = "check that Redis runs; until then routers know only the prefixes that they placed"
        yield fault("Redis", f"does not answer {', '.join(silent)}", advice)
    if none:
        yield fault("Redis", f"{', '.join(none)} has none", "start it with --redis-url")
    if not (silent or none):
        yield ok("Redis", "answers every process")
    yield from _records(answers["router"].info.refused_records)


def _records(refused: Mapping[str, str]) -> Iterator[Finding]:
    """Checks that the router refuses no record in Redis."""
    if not refused:
        return
    few = sorted(refused.items())[:_MAX_LISTED]
    listed = "; ".join(f"{worker}: {reason}" for worker, reason in few)
    if len(refused) > len(few):
        listed += f"; and {len(refused) - len(few)} more"
    advice = (
        "give the router and its workers the same --redis-signing-key-file and the same names of "
        "models; if these are no workers of yours, find who else writes to Redis"
    )
    yield fault("records", f"the router does not use records of workers: {listed}", advice)


def _clocks(answers: Mapping[str, _Answer]) -> Iterator[Finding]:
    wrong = {n: f"{a.skew:+.1f} s" for n, a in answers.items() if abs(a.skew) > _SKEW}
    if wrong:
        listed = ", ".join(f"{name} {by}" for name, by in wrong.items())
        advice = "synchronize all clocks with NTP: a worker's epoch is the time of its start"
        yield fault("clocks", f"differ from this machine's: {listed}", advice)
    else:
        yield ok("clocks", f"all within {_SKEW:g} s of this machine's")


def _request(address: str, token: str, tls: Tls | None) -> Finding:
    began = time.monotonic()
    try:
        with session(address, 30.0, token, tls) as client:
            match client.get_model().pooled_output:
                case "embedding":
                    client.embed("Hello")
                case "score":
                    client.score([("Hello", "Hello")])
                case _:
                    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
                    client.generate("Hello", sampling).text()
    except BatonError as error:
        return fault("a request", str(error), "`baton explain hello` shows the candidates")
    return ok("a request", f"answered after {time.monotonic() - began:.2f} s")
