"""Cache of what was computed for tenants: who gives way at its bound."""

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from baton_router.text.salted_cache import SaltedCache


class Key(NamedTuple):
    salt: bytes
    name: str


def cache_of(max_bytes: int) -> SaltedCache[Key, int]:
    """Returns a cache whose values are their bytes."""
    return SaltedCache(max_bytes, lambda _, value: value)


def test_salted_cache_evicts_oldest_of_largest_tenant():
    cache = cache_of(10)
    for name in "abcd":
        cache.put(Key(b"many", name), 2, "many")
    cache.get(Key(b"many", "a"))
    cache.put(Key(b"few", "a"), 4, "few")
    assert cache.num_bytes == 10
    assert [name for name in "abcd" if cache.get(Key(b"many", name))] == ["a", "c", "d"]
    for name in "efghijk":
        cache.put(Key(b"many", name), 2, "many")
    assert cache.get(Key(b"few", "a")) == 4
    assert [name for name in "abcdefghijk" if cache.get(Key(b"many", name))] == ["i", "j", "k"]


def test_salts_of_one_tenant_count_as_one():
    cache = cache_of(10)
    cache.put(Key(b"few", "a"), 4, "few")
    for number in range(20):
        cache.put(Key(b"many%d" % number, "a"), 1, "many")
    assert cache.get(Key(b"few", "a")) == 4
    cache.drop(b"few")
    assert (cache.get(Key(b"few", "a")), cache.num_bytes) == (None, 6)
    cache.drop(None)
    assert cache.num_bytes == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.integers(0, 12))))
def test_salted_cache_holds_no_more_than_its_bytes(puts):
    cache, sizes = cache_of(20), {}
    for holder, number, size in puts:
        key = Key(holder.encode(), str(number))
        cache.put(key, size, holder)
        sizes.setdefault(key, set()).add(size)
        kept = {key: value for key in sizes if (value := cache.get(key)) is not None}
        assert cache.num_bytes == sum(kept.values()) <= 20
        assert all(value in sizes[key] for key, value in kept.items())
