"""Membership of a worker: role, epoch and readiness, and in Redis its record and KV events.

No model is loaded.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.cli.certs import Authority, write
from baton.cluster.events.kv_events import KvEvents
from baton.cluster.events.subscriber import EventSubscriber
from baton.cluster.index import LocalityIndex
from baton.cluster.redis.client import connect
from baton.cluster.redis.embedded import EmbeddedRedis
from baton.cluster.registry.watcher import RegistryWatcher
from baton.errors import FailedPreconditionError, InvalidArgumentError
from baton.rpc.worker_role import Role
from baton.serving.server import READINESS
from baton.worker.membership import Membership
from baton.worker.server import WorkerServer
from baton.worker.settings import WorkerSettings
from tests.support.redis_loops import BLOCKS, RECORD
from tests.support.waiting import until


def membership_of(role: Role, **settings: Any) -> tuple[Membership, WorkerServer]:
    given = WorkerSettings(worker_id="w", **settings)
    server = WorkerServer(given)
    return Membership(role, given, server), server


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as running:
        yield running


async def test_membership_is_ready_from_join_until_drain(stack):
    member, server = membership_of("prefill")
    drained: list[bool] = []
    member.on_drain.append(lambda: drained.append(member.is_draining))

    def state() -> tuple[bool, bool, bool]:
        return member.is_ready, member.is_draining, server.main.is_serving(READINESS)

    assert state() == (False, False, False)
    await member.join(RECORD, stack)
    assert state() == (True, False, True)
    await member.pause()
    assert state() == (True, True, False)
    await member.begin_epoch("decode")
    assert state() == (True, False, True)
    assert not drained
    for _ in range(2):
        await member.drain()
        assert state() == (True, True, False)
    assert drained == [True]
    assert (member.redis_answers, member.staleness) == (True, {})


async def test_membership_never_takes_work_if_drained_before_join(stack):
    member, server = membership_of("prefill")
    await member.drain()
    await member.join(RECORD, stack)
    assert member.is_ready
    assert not server.main.is_serving(READINESS)


async def test_membership_refuses_requests_of_other_incarnations():
    member, _ = membership_of("prefill")
    first, seen = member.epoch, []
    member.on_new_epoch.append(lambda: seen.append((member.role, member.epoch)))
    member.check_epoch(first)
    await member.pause()
    await member.begin_epoch("decode")
    assert seen == [("prefill", first)], "called before the new incarnation"
    assert (member.role, member.epoch > first) == ("decode", True)
    with pytest.raises(FailedPreconditionError, match="restarted or changed its role since"):
        member.check_epoch(first)


async def test_membership_publishes_role_epoch_and_blocks_again(stack):
    redis_server = stack.enter_context(EmbeddedRedis())
    member, _ = membership_of("prefill", redis_url=redis_server.url)
    redis, index = connect(redis_server.url), LocalityIndex()
    stack.push_async_callback(redis.aclose)
    subscriber = EventSubscriber(redis, index)
    watcher = RegistryWatcher(redis, lambda *_: None, interval=0.02)
    for loop in (subscriber, watcher):
        loop.start()
        stack.push_async_callback(loop.stop)
    async with AsyncExitStack() as joined:
        await member.join(replace(RECORD, epoch=member.epoch), joined)
        member.publish_events(KvEvents(tuple(BLOCKS), (), False))
        await until(lambda: "w" in watcher.records)
        await until(lambda: not member.num_unpublished_events)
        await member.pause()
        await until(lambda: watcher.records["w"].draining)
        await member.begin_epoch("decode")
        await until(lambda: watcher.records["w"].epoch == member.epoch)
        record = watcher.records["w"]
        assert (record.id, record.role, record.draining) == ("w", "decode", False)
        subscriber.follow("w", member.epoch)
        await until(lambda: index.num_hashes("w") == len(BLOCKS))
        assert member.redis_answers
    await until(lambda: "w" not in watcher.records)


@pytest.mark.parametrize("certificate", ["prefill", "worker"])
async def test_membership_keeps_role_of_a_certificate_for_it_alone(tmp_path, certificate):
    files = certified(tmp_path, certificate)
    member, _ = membership_of("prefill", **files)
    kept = "its certificate is for prefill alone; one for worker may change its role"
    assert member.why_keeps_role == ("" if certificate == "worker" else kept)


async def test_membership_refuses_a_certificate_for_another_role(tmp_path):
    files = certified(tmp_path, "decode")
    for changes in ({}, {"encoder_only": True}):
        with pytest.raises(FailedPreconditionError, match=r"is for .*decode; this process needs"):
            membership_of("encode", **files, **changes)


def certified(folder: Path, role: Any) -> dict[str, str]:
    """Returns the settings of a certificate that is for `role`."""
    authority = Authority()
    write(folder, {"ca": authority.own, role: authority.issue(role)})
    files = {"tls_cert": f"{role}.pem", "tls_key": f"{role}.key", "tls_ca": "ca.pem"}
    return {setting: str(folder / file) for setting, file in files.items()}


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_membership_refuses_encoder_only_in_other_roles(role):
    with pytest.raises(InvalidArgumentError, match=f"for a {role} worker.* expected an encode"):
        membership_of(role, encoder_only=True)
    member, _ = membership_of("encode", encoder_only=True)
    assert member.why_keeps_role.startswith("it has loaded the encoder alone")
