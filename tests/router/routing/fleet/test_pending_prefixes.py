"""Pending prefixes of workers, against a plain count."""

from contextlib import ExitStack

from hypothesis import given
from hypothesis import strategies as st

from baton.cluster.events.kv_events import KvEvents
from baton.cluster.index import LocalityIndex
from baton_router.routing.fleet.pending_prefixes import PendingPrefixes, held_blocks

# A chain: each hash says all that comes before it.
chains = st.text("ab", max_size=6).map(
    lambda text: [text[: i + 1].encode() for i in range(len(text))]
)
workers = st.sampled_from(["one", "two"])


@given(st.lists(st.tuples(workers, chains, st.booleans()), max_size=12), chains)
def test_pending_prefix_counts_until_prompt_has_arrived(prompts, asked):
    pending = PendingPrefixes()
    expected: dict[str, int] = {}
    with ExitStack() as stack:
        for worker, chain, has_arrived in prompts:
            with ExitStack() as prompt:
                prompt.enter_context(pending.pending(worker, chain))
                if not has_arrived:
                    stack.push(prompt.pop_all())
                    num_common = sum(a == b for a, b in zip(chain, asked, strict=False))
                    if num_common:
                        expected[worker] = max(expected.get(worker, 0), num_common)
        assert pending.match(asked) == expected
    assert pending.match(asked) == {}


def test_pending_prefixes_add_to_held_blocks():
    index, pending = LocalityIndex(), PendingPrefixes()
    chain = [b"a", b"ab", b"aba"]
    index.apply("one", 1, KvEvents(stored=(b"a", b"ab")))
    index.apply("two", 1, KvEvents(stored=(b"a",)))
    with pending.pending("one", chain[:1]), pending.pending("three", chain):
        assert held_blocks(index, pending, chain) == {"one": 2, "two": 1, "three": 3}
    assert held_blocks(index, pending, chain) == {"one": 2, "two": 1}
