"""A cluster whose Redis has keys of wrong types and forged records, with signing on."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli.local.local_cluster import LocalCluster
from baton.cli.main import app
from baton.client.client import AsyncClient, Client
from baton.cluster.keys import gossip_key, record_key, role_lock_key, workers_key
from baton.cluster.redis.client import connect, transact
from baton.cluster.redis.signing import SigningKeys
from baton.cluster.registry.registration import Registration
from baton.models import locate
from baton.sampling import SamplingParams
from tests.support.cluster.checkpoints import is_greedy, prompt_of
from tests.support.cluster.wide import listed
from tests.support.redis_loops import RECORD
from tests.support.waiting import until_observed

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("0" * 64 + "\n")
    flags = {"redis_signing_key_file": str(keys)}
    with LocalCluster(num_decode=2, worker_flags=flags, router_flags=flags) as cluster:
        yield cluster


async def spoil(url: str) -> None:
    """Writes keys of wrong types, 2,000 forged records of workers, and other garbage."""
    redis = connect(url)
    for number in range(2000):
        forged = replace(RECORD, id=f"forged-{number}", endpoint="127.0.0.1:1", epoch=2**60)
        fields = [part for pair in forged.to_fields().items() for part in pair]
        await transact(redis, ("HSET", record_key(forged.id), *fields))
        await transact(redis, ("SADD", workers_key(), forged.id, f"str-{number % 50}"))
    for number in range(50):
        await transact(redis, ("SET", record_key(f"str-{number}"), "x"))
    for key in (gossip_key(), role_lock_key()):
        await transact(redis, ("SET", key, "x"))
    (keys,) = await transact(redis, ("KEYS", "{baton}:kv:*"))
    for key in keys:
        await transact(redis, ("DEL", key), ("SADD", key, "x"))
    await redis.aclose()


async def test_signed_cluster_serves_amid_forged_keys(signed: LocalCluster) -> None:
    await spoil(signed.redis_url)
    prompt = prompt_of(40)
    async with AsyncClient(signed.address, timeout=20.0) as client:
        tokens = await client.generate(prompt, PARAMS).token_ids()
        assert is_greedy(locate("tiny"), prompt, tokens)
        before = listed(signed)["decode-0"].epoch
        await asyncio.to_thread(signed.kill, "decode-0")
        await asyncio.to_thread(signed.restart, "decode-0")
        await until_observed(
            lambda: (
                {
                    name: worker.state
                    for name, worker in listed(signed).items()
                    if name != "decode-0" or worker.epoch > before
                }
                == dict.fromkeys(["decode-0", "decode-1", "prefill-0"], "ready")
            ),
            within=20.0,
            what="the new worker",
        )
        assert await client.generate(prompt, PARAMS).token_ids() == tokens
    with Client(signed.admin_address) as client:
        assert len(client.list_workers()) == 3, "no forged one"


async def test_doctor_names_workers_signed_by_another_key(
    signed: LocalCluster, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("1" * 64)
    redis = connect(signed.redis_url, signing_keys=SigningKeys(tmp_path / "keys"))
    await transact(redis, ("FLUSHALL",))
    registration = Registration(redis, replace(RECORD, id="stranger"))
    registration.start()
    with Client(signed.admin_address) as client:
        await until_observed(
            lambda: list(client.get_info().refused_records) == ["stranger"],
            within=10.0,
            what="the refusal",
        )
    arguments = ["doctor", "--admin", signed.admin_address, "--json"]
    result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    await registration.stop()
    await redis.aclose()
    findings = [json.loads(line) for line in result.stdout.splitlines()]
    (found,) = [finding for finding in findings if finding["subject"] == "records"]
    assert "stranger: its signature is of another key" in found["text"]
    assert "--redis-signing-key-file" in found["advice"]
    assert result.exit_code == 1
