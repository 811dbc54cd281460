"""Prompts: their chain hashes are computed once, and those of long ones in a thread."""

import threading
from collections.abc import Sequence
from dataclasses import replace

from baton.cluster.prefix import BlockHash, HashedInput, hash_chain
from baton.models.images.encoder_input import EncoderInput
from baton.sampling import SamplingParams
from baton.serving.tenant import Tenant
from baton_router.call.prompt import Prompt
from baton_router.call.request import Request, work_of
from tests.support.router.records import RECORD

NAMESPACE = RECORD.namespace
OTHER = replace(NAMESPACE, block_size=32)


class CountedHashing:
    """`hash_chain` that records the thread of each call."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def __call__(
        self, root: BlockHash, token_ids: Sequence[int], size: int, images: Sequence[HashedInput]
    ) -> list[BlockHash]:
        self.threads.append(threading.get_ident())
        return hash_chain(root, token_ids, size, images)


def test_prompt_hashes_match_its_tokens_salt_and_namespace():
    for token_ids in (tuple(range(40)), tuple(range(1, 41))):
        for salt in (b"", b"a"):
            for space in (NAMESPACE, OTHER):
                expected = hash_chain(space.root(salt), token_ids, space.block_size)
                assert Prompt(token_ids, salt).hashes(space) == expected


def test_prompt_hashes_once_for_each_namespace():
    hashing = CountedHashing()
    prompt = Prompt(tuple(range(64)), hash_chain=hashing)
    for _ in range(3):
        for space in (NAMESPACE, OTHER):
            prompt.hashes(space)
    assert len(hashing.threads) == 2


async def test_prompt_hashes_in_a_thread_when_it_is_long():
    hashing = CountedHashing()
    prompt = Prompt(tuple(range(4096)), hash_chain=hashing)
    await prompt.hash_ahead([NAMESPACE, OTHER])
    assert len(prompt.hashes(NAMESPACE)) == 256
    assert len(hashing.threads) == 2
    assert threading.get_ident() not in hashing.threads


async def test_prompt_is_not_hashed_ahead_when_it_is_short():
    hashing = CountedHashing()
    await Prompt(tuple(range(4095)), hash_chain=hashing).hash_ahead([NAMESPACE])
    assert hashing.threads == []


def test_work_has_prompt_of_its_request_until_it_resumes():
    params = SamplingParams(max_tokens=8)
    request = Request("r", (1, 2, 3), params, tenant=Tenant("t", salt=b"s"))
    assert work_of(request).prompt is request.prompt
    resumed = work_of(request, [(4, 5)]).prompt
    assert (resumed.token_ids, resumed.salt) == ((1, 2, 3, 4, 5), b"s")


def test_prompt_hashes_cover_its_images_and_its_output():
    def work(content: bytes, output: tuple[int, ...] = ()) -> Prompt:
        image = EncoderInput(content * 16, start=20, length=30)
        params = SamplingParams(max_tokens=99)
        request = Request("r", tuple(range(64)), params, encoder_inputs=(image,))
        return work_of(request, [output]).prompt

    prompts = work(b"1"), work(b"2"), Prompt(tuple(range(64)))
    one, other, text = (prompt.hashes(NAMESPACE) for prompt in prompts)
    assert one[0] == other[0] == text[0]
    assert len({one[1], other[1], text[1]}) == len({one[3], other[3], text[3]}) == 3
    extended = work(b"1", tuple(range(16))).hashes(NAMESPACE)
    assert (extended[:4], len(extended)) == (one, 5)
    assert work(b"1").hashes(NAMESPACE) == one
