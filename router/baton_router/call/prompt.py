"""Prompt with the chain hashes of its blocks, each computed once for admission, placement and
handoff."""

import asyncio
from collections.abc import Callable, Collection, Sequence

from baton.cluster.prefix import BlockHash, HashedInput, PrefixNamespace, hash_chain

# Shorter prompts are hashed faster than a thread is dispatched: 256 blocks of 16 tokens.
_THREAD_FROM_TOKENS = 4096

HashChain = Callable[[BlockHash, Sequence[int], int, Sequence[HashedInput]], list[BlockHash]]


class Prompt:
    """Tokens that sequences begin with, in the prefix cache of one tenant. From any thread.

    Args:
        salt: salt of the tenant's chain hashes.
        images: what the chain hashes cover of its images (`EncoderInput.hashed`).
    """

    __slots__ = ("_chains", "_hash_chain", "images", "salt", "token_ids")

    def __init__(
        self,
        token_ids: tuple[int, ...],
        salt: bytes = b"",
        images: tuple[HashedInput, ...] = (),
        hash_chain: HashChain = hash_chain,
    ) -> None:
        self.token_ids = token_ids
        self.salt = salt
        self.images = images
        self._hash_chain = hash_chain
        self._chains: dict[PrefixNamespace, list[BlockHash]] = {}

    def extended(self, output: tuple[int, ...]) -> "Prompt":
        """Returns this prompt with the tokens of `output` after its own."""
        return Prompt(self.token_ids + output, self.salt, self.images)

    def hashes(self, namespace: PrefixNamespace) -> list[BlockHash]:
        """Returns the chain hashes of the full blocks, as workers of `namespace` compute them."""
        chain = self._chains.get(namespace)
        if chain is None:
            root = namespace.root(self.salt)
            chain = self._hash_chain(root, self.token_ids, namespace.block_size, self.images)
            self._chains[namespace] = chain
        return chain

    async def hash_ahead(self, namespaces: Collection[PrefixNamespace]) -> None:
        """Computes the hashes of a long prompt in a thread, so that other requests' tokens keep
        flowing."""
        if len(self.token_ids) >= _THREAD_FROM_TOKENS:
            await asyncio.to_thread(lambda: list(map(self.hashes, namespaces)))


NO_PROMPT = Prompt(())
