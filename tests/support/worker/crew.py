"""Several workers in this process, of which any has what another wants. Plays the router."""

import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc

from baton.cluster.prefix import HashedInput, hash_chain
from baton.models.images.encoder_input import EncoderInput
from baton.rpc.encoder_inputs import encoder_input_to_message
from baton.rpc.params import params_to_message
from baton.rpc.worker_role import Role
from baton.sampling import SamplingParams
from baton.serving.telemetry.propagation import outgoing
from baton.v1 import (
    admin_pb2,
    decode_pb2,
    encode_pb2,
    kv_sharing_pb2,
    kv_transfer_pb2,
    prefill_pb2,
)
from baton.v1.admin_pb2_grpc import AdminStub
from baton.v1.decode_pb2_grpc import DecodeStub
from baton.v1.encode_pb2_grpc import EncodeStub
from baton.v1.kv_sharing_pb2_grpc import KvSharingStub
from baton.v1.prefill_pb2_grpc import PrefillStub
from baton.worker.process import assemble
from baton.worker.roles import settings_class
from baton.worker.worker import Worker
from baton_decode_worker.service import DecodeService
from baton_kvtransfer.exchange.exchange import EncoderExchange, KvExchange
from tests.support.waiting import until
from tests.support.worker.pair import COMMON, TIMEOUT, handle_of, rest_of, start

_names = itertools.count(1)


class Member:
    """One worker and the ways to ask it."""

    def __init__(
        self, worker: Worker, channel: grpc.aio.Channel, to_admin: grpc.aio.Channel
    ) -> None:
        self.worker = worker
        self.model = worker.model
        self.membership = worker.membership
        self.decode: Any = DecodeStub(channel)
        self.prefill: Any = PrefillStub(channel)
        self.encode: Any = EncodeStub(channel)
        self.sharing: Any = KvSharingStub(channel)
        self.admin: Any = AdminStub(to_admin)

    @property
    def id(self) -> str:
        return self.membership.id

    @property
    def num_leased_or_promised(self) -> int:
        """Its leases, and the blocks that it has promised."""
        exchanges = map(self.worker.component, (KvExchange, EncoderExchange))
        num_leases = sum(len(exchange.leases) for exchange in exchanges)
        return num_leases + self.worker.component(DecodeService).num_promised_blocks

    async def set_role(self, role: Any, **fields: Any) -> int:
        """Returns the epoch that the change has begun."""
        request = admin_pb2.SetRoleRequest(role=role, **fields)
        return int((await self.admin.SetRole(request, timeout=TIMEOUT)).epoch)

    @property
    def num_computed_tokens(self) -> int:
        return self.model.engine.reading.stats.num_computed_tokens

    @property
    def num_encoded_tokens(self) -> int:
        """Tokens of images whose encoder output this worker has computed."""
        return self.model.engine.reading.work_done.num_encoder_tokens

    @property
    def num_fetched_outputs(self) -> int:
        """Encoder outputs that it has fetched from other workers."""
        return self.worker.component(EncoderExchange).transfers.num_done

    @property
    def num_pulled_tokens(self) -> int:
        return self.model.engine.reading.stats.num_pulled_tokens

    def hashes(self, tokens: list[int], images: Sequence[HashedInput] = ()) -> bytes:
        """Returns the hashes of the full blocks of a text."""
        engine = self.model.engine
        root = engine.facts.info.namespace.root(b"", b"")
        chain = hash_chain(root, tokens, engine.facts.block_size, images)
        return b"".join(chain)

    def handle(self, lease_id: bytes, num_tokens: int) -> kv_transfer_pb2.KvHandle:
        integrity = kv_transfer_pb2.INTEGRITY_BY_CONNECTOR
        return handle_of(self.worker, lease_id, num_tokens, integrity)

    # A prompt and its answer.

    def to_decode(
        self,
        prompt: list[int],
        params: SamplingParams,
        output: tuple[int, ...] = (),
        handle: kv_transfer_pb2.KvHandle | None = None,
        **fields: Any,
    ) -> tuple[Any, str]:
        """A call that generates, and its id."""
        name = f"r{next(_names)}"
        request = decode_pb2.DecodeGenerateRequest(
            request_id=name,
            token_ids=[*prompt, *output],
            num_prompt_tokens=len(prompt),
            sampling=params_to_message(params),
            handle=handle,
            **fields,
        )
        return self.decode.Generate(request, timeout=TIMEOUT), name

    async def answer(self, prompt: list[int], params: SamplingParams) -> list[int]:
        """Returns the worker's answer to a prompt that it computes itself."""
        call, _ = self.to_decode(prompt, params)
        return tokens_of(await rest_of(call))

    async def first_token(
        self, prompt: list[int], source: prefill_pb2.PrefixSource | None = None, **fields: Any
    ) -> prefill_pb2.PrefillResult:
        """Returns the result of a prefill that no worker fetches."""
        request = self.prefill_request(prompt, source, **fields)
        call = self.prefill.Prefill(request, timeout=TIMEOUT, metadata=outgoing())
        try:
            events = await rest_of(call)
        finally:
            call.cancel()  # which gRPC omits where a first read is cancelled as it begins to wait
        (result,) = (e.result for e in events if e.HasField("result"))
        return result

    def prefill_request(
        self, prompt: list[int], source: prefill_pb2.PrefixSource | None = None, **fields: Any
    ) -> prefill_pb2.PrefillRequest:
        return prefill_pb2.PrefillRequest(
            request_id=f"r{next(_names)}",
            lease_id=new_lease_id(),
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=params_to_message(SamplingParams(max_tokens=8, ignore_eos=True)),
            source=source,
            **fields,
        )

    # What others may have of it.

    def share(
        self, tokens: list[int], claimant: str, tenant: str = "", images: Sequence[HashedInput] = ()
    ) -> tuple[Any, bytes]:
        """A call that lends what is cached of a text, and its lease id."""
        lease_id = new_lease_id()
        request = kv_sharing_pb2.ShareRequest(
            lease_id=lease_id,
            block_hashes=self.hashes(tokens, images),
            claimant=claimant,
            tenant=tenant,
        )
        return self.sharing.Share(request, timeout=TIMEOUT), lease_id

    def to_encode(self, wanted: EncoderInput, claimant: str, **fields: Any) -> tuple[Any, bytes]:
        """A call that encodes an image for another worker, and its lease id."""
        lease_id = new_lease_id()
        request = encode_pb2.EncodeRequest(
            request_id=f"r{next(_names)}",
            lease_id=lease_id,
            encoder_input=encoder_input_to_message(wanted),
            claimant=claimant,
            **fields,
        )
        return self.encode.Encode(request, timeout=TIMEOUT, metadata=outgoing()), lease_id

    def encoder_source(
        self, lease_id: bytes, index: int = 0, **changes: Any
    ) -> prefill_pb2.EncoderSource:
        """The source of a request's image with this index."""
        fields = {
            "input": index,
            "worker": self.id,
            "endpoint": self.worker.server.kv.endpoint,
            "epoch": self.membership.epoch,
            "lease_id": lease_id,
        }
        return prefill_pb2.EncoderSource(**{**fields, **changes})

    def source(self, lease_id: bytes, num_blocks: int, **changes: Any) -> prefill_pb2.PrefixSource:
        fields = {
            "worker": self.id,
            "endpoint": self.worker.server.kv.endpoint,
            "epoch": self.membership.epoch,
            "lease_id": lease_id,
            "num_blocks": num_blocks,
        }
        return prefill_pb2.PrefixSource(**{**fields, **changes})


def new_lease_id() -> bytes:
    return next(_names).to_bytes(16, "big")


def tokens_of(events: list[Any]) -> list[int]:
    """Returns the tokens that a decode worker sent, each position once."""
    tokens: list[int] = []
    first = None
    for event in events:
        if event.HasField("tokens"):
            first = event.tokens.position if first is None else first
            assert event.tokens.position == first + len(tokens)
            tokens += event.tokens.token_ids
    return tokens


class Crew:
    """All of them. What they hold beside their caches is nothing, in the end."""

    def __init__(self, members: list[Member]) -> None:
        self.members = members

    async def nothing_held(self, within: float = 2.0) -> None:
        await until(lambda: not any(map(_num_held, self.members)), within=within)
        for member in self.members:
            member.model.engine.handle.core.scheduler.check_integrity()


def _num_held(member: Member) -> int:
    stats = member.model.engine.reading.stats
    waits = stats.num_waiting + stats.num_running + stats.num_awaiting_kv + stats.num_kept
    outputs = stats.num_held_encoder_blocks + stats.num_encode_jobs
    return stats.num_held_blocks + outputs + waits + member.num_leased_or_promised


@asynccontextmanager
async def crew_of(
    model: str,
    *roles: Role,
    prefill: dict[str, Any] | None = None,
    encode: dict[str, Any] | None = None,
    own: Sequence[dict[str, Any]] = (),
    **settings: Any,
) -> AsyncIterator[Crew]:
    """Workers of these roles on one checkpoint. Keywords are settings of all, those of `prefill`
    and `encode` of the workers in these roles, and those in `own` of one worker each, in order."""
    common = {**COMMON, "model": model, **settings}
    of_role = {"encode": encode or {}, "prefill": prefill or {}, "decode": {}}
    settings = settings_class()
    workers = [
        assemble(role, settings(**{**common, **of_role[role], **(its or {})}))
        for role, its in itertools.zip_longest(roles, own)
    ]
    async with AsyncExitStack() as stack:
        await start(stack, *workers)
        members = []
        for worker in workers:
            server = worker.server.main
            endpoints = server.endpoint, server.admin_endpoint
            channels = [grpc.aio.insecure_channel(endpoint) for endpoint in endpoints]
            for channel in channels:
                stack.push_async_callback(channel.close)
            members.append(Member(worker, *channels))
        crew = Crew(members)
        yield crew
        await crew.nothing_held()
