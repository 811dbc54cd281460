"""A runner without a model: its cache holds, in place of keys, the tokens they were made from.

Every slot (block, offset) remembers a hash of the prefix that was written there, so that reading a
block which is stale, foreign or overwritten is noticed at once. The next token is a function of all
tokens before it, so that one lost or doubled changes everything after it.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from zlib import crc32

from baton.engine.core.plan import StepPlan, StepResult

VOCAB_SIZE = 7


def next_token(token_ids: SequenceOf[int]) -> int:
    return prefix_hashes(b"", token_ids)[-1] // 64 % VOCAB_SIZE


def prefix_hashes(root: bytes, token_ids: Iterable[int]) -> list[int]:
    """For each token, a number that stands for it, all before it and the root."""
    state, out = crc32(root), []
    for token in token_ids:
        state = crc32(bytes([token]), state)
        out.append(state)
    return out


class FakeRunner:
    """Follows plans as the real one does, and asserts all that a plan promises."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.tokens: dict[str, list[int]] = {}
        self.tables: dict[str, list[int]] = {}
        self.slots: dict[tuple[int, int], int] = {}

    def run(self, plan: StepPlan, roots: dict[str, bytes]) -> StepResult:
        self._follow(plan)
        self._write(plan, roots)
        chosen = []
        for item in plan.scheduled:
            tokens, table = self.tokens[item.request_id], self.tables[item.request_id]
            assert len(table) * self.block_size >= item.end, "tokens beyond the blocks"
            self.check_content(table, prefix_hashes(roots[item.request_id], tokens[: item.end]))
            assert item.samples == (item.end == len(tokens)), "samples before the last token"
            if item.samples:
                token = next_token(tokens)
                tokens.append(token)
                chosen.append(token)
        return StepResult(tuple(chosen), tuple(-float(t) for t in chosen))

    def write(self, table: SequenceOf[int], start: int, hashes: SequenceOf[int]) -> None:
        """Fills slots from position `start` on."""
        for position, value in enumerate(hashes, start):
            self.slots[table[position // self.block_size], position % self.block_size] = value

    def check_content(self, table: SequenceOf[int], hashes: SequenceOf[int]) -> None:
        """Asserts that the blocks hold these prefixes, from position 0 on."""
        for position, value in enumerate(hashes):
            slot = table[position // self.block_size], position % self.block_size
            assert self.slots.get(slot) == value, f"position {position}: {slot} holds other KV"

    def _follow(self, plan: StepPlan) -> None:
        assert len(set(plan.dropped)) == len(plan.dropped), "dropped twice"
        for request_id in plan.dropped:
            assert request_id in self.tokens, "dropped, but never added"
            del self.tokens[request_id], self.tables[request_id]
        for added in plan.added:
            assert added.request_id not in self.tokens, "added twice"
            self.tokens[added.request_id] = list(added.token_ids)
            self.tables[added.request_id] = list(added.block_ids)
        for item in plan.scheduled:
            assert item.request_id in self.tokens, "scheduled, but never added"
            self.tables[item.request_id] += item.new_block_ids

    def _write(self, plan: StepPlan, roots: dict[str, bytes]) -> None:
        """All of a step's KV, before any of it is read."""
        written: set[tuple[int, int]] = set()
        for item in plan.scheduled:
            assert 0 <= item.start < item.end, "nothing to compute"
            tokens, table = self.tokens[item.request_id], self.tables[item.request_id]
            hashes = prefix_hashes(roots[item.request_id], tokens[: item.end])
            slots = {
                (table[p // self.block_size], p % self.block_size)
                for p in range(item.start, item.end)
            }
            assert not slots & written, "two sequences write one slot"
            written |= slots
            self.write(table, item.start, hashes[item.start :])
