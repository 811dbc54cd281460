import hashlib
import struct
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cluster.prefix import (
    PrefixNamespace,
    encode_tokens,
    extend_chain,
    hash_chain,
    input_extras,
)

NAMESPACE = PrefixNamespace(b"model", b"tokenizer", "float32", 4)
GOLDEN_OF_ALL = [
    "cee1e3cfad0f2959fa19d304dd0ab173",
    "91b2fc6604936e395906317ebba1b4aa",
    "4250aa20e8558ecf91897eaa1bb3b062",
]
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def plain_root(namespace: PrefixNamespace, *parts: bytes) -> bytes:
    data = b"baton.prefix" + struct.pack("<II", 1, namespace.block_size)
    for field in (namespace.model, namespace.tokenizer, namespace.kv_dtype.encode(), *parts):
        data += struct.pack("<I", len(field)) + field
    return hashlib.sha256(data).digest()[:16]


def plain_block(parent: bytes, tokens: list[int], extras: bytes = b"") -> bytes:
    data = parent + b"".join(struct.pack("<I", token) for token in tokens)
    if extras:
        data += struct.pack("<I", len(extras)) + extras
    return hashlib.sha256(data).digest()[:16]


def one_block(tokens: list[int], extras: bytes = b"") -> bytes:
    hashes: list[bytes] = []
    extend_chain(hashes, NAMESPACE.root(), encode_tokens(tokens), 4, lambda _: extras)
    return hashes[0]


@pytest.mark.parametrize(
    ("parts", "golden"),
    [
        ([b""], "35db3baeaebf24189b6f93f6de78fcd9"),
        ([b"tenant"], "7bd7c4e21b2246c9809eadac7620e21f"),
        ([b"tenant", b"adapter"], "fb6eac98f58bc06e60c8698ac4f0dfe1"),
    ],
)
def test_root_matches_golden_hash(parts: list[bytes], golden: str) -> None:
    assert NAMESPACE.root(*parts).hex() == golden
    assert plain_root(NAMESPACE, *parts).hex() == golden


def test_extend_chain_hashes_extras_into_their_blocks() -> None:
    tokens = list(range(12))
    extras = {1: b"image"}
    hashes: list[bytes] = []
    extend_chain(hashes, NAMESPACE.root(), encode_tokens(tokens), 4, lambda i: extras.get(i, b""))
    first = plain_block(plain_root(NAMESPACE, b""), tokens[:4])
    second = plain_block(first, tokens[4:8], b"image")
    assert hashes == [first, second, plain_block(second, tokens[8:])]


def test_hash_chain_matches_golden_hashes() -> None:
    tokens = [0, 1, 2, 3, 255, 256, 65536, 2**32 - 1, 7, 7]
    golden = ["434c97ed517b0f35870b300f0c17417d", "5573943dc3e55f556f9ccfe1cde5dc7b"]
    assert [block.hex() for block in hash_chain(NAMESPACE.root(), tokens, 4)] == golden
    first = plain_block(plain_root(NAMESPACE, b""), tokens[:4])
    assert [first.hex(), plain_block(first, tokens[4:8]).hex()] == golden


def test_chain_with_encoder_inputs_matches_golden_hashes() -> None:
    """An image over the tokens [2, 6) of blocks of 4, and one in the last of them."""
    inputs = [(2, 6, b"image"), (9, 10, b"sound")]
    extras = [input_extras(inputs, 4, i) for i in range(3)]
    assert [e.hex() for e in extras] == [
        "0200000005000000696d616765",
        "feffffff05000000696d616765",
        "0100000005000000736f756e64",
    ]
    hashes: list[bytes] = []
    root = NAMESPACE.root(b"tenant", b"adapter")
    extend_chain(hashes, root, encode_tokens(range(12)), 4, lambda i: extras[i])
    assert [block.hex() for block in hashes] == GOLDEN_OF_ALL
    parent = root
    for number, block in enumerate(hashes):
        parent = plain_block(parent, list(range(4 * number, 4 * number + 4)), extras[number])
        assert block == parent


@pytest.mark.parametrize(
    "inputs",
    [
        [],
        [(2, 6, b"other"), (9, 10, b"sound")],
        [(1, 6, b"image"), (9, 10, b"sound")],
        [(2, 6, b"imag"), (9, 10, b"esound")],
    ],
)
def test_chains_of_other_encoder_inputs_share_no_hash(inputs: list[tuple[int, int, bytes]]) -> None:
    chains = []
    for each in (inputs, [(2, 6, b"image"), (9, 10, b"sound")]):
        hashes: list[bytes] = []
        extras_of = partial(input_extras, each, 4)
        extend_chain(hashes, NAMESPACE.root(), encode_tokens(range(12)), 4, extras_of)
        chains.append(set(hashes))
    assert not chains[0] & chains[1]


def test_block_with_extras_matches_golden_hash() -> None:
    golden = "09c091a280cba3f7273915f84baa1fd2"
    assert one_block([1, 2, 3, 4], b"adapter-7").hex() == golden
    assert plain_block(plain_root(NAMESPACE, b""), [1, 2, 3, 4], b"adapter-7").hex() == golden


@given(TOKENS, st.integers(1, 8), st.integers(0, 40))
def test_extend_chain_agrees_with_hash_block_at_any_cut(
    tokens: list[int], block_size: int, cut: int
) -> None:
    parent = NAMESPACE.root()
    expected = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = plain_block(parent, tokens[start : start + block_size])
        expected.append(parent)
    hashes: list[bytes] = []
    extend_chain(hashes, NAMESPACE.root(), encode_tokens(tokens[:cut]), block_size)
    rest = encode_tokens(tokens[len(hashes) * block_size :])
    extend_chain(hashes, NAMESPACE.root(), rest, block_size)
    assert hashes == expected == hash_chain(NAMESPACE.root(), tokens, block_size)


@given(st.binary(max_size=8), st.binary(max_size=8), st.lists(st.integers(0, 9), min_size=4))
def test_chains_of_unequal_salts_share_no_hash(
    salt: bytes, other: bytes, tokens: list[int]
) -> None:
    one = hash_chain(NAMESPACE.root(salt), tokens, 4)
    two = hash_chain(NAMESPACE.root(other), tokens, 4)
    assert (one == two) if salt == other else not set(one) & set(two)


@given(TOKENS, TOKENS, st.binary(max_size=4), st.binary(max_size=4))
def test_hash_block_is_equal_only_for_equal_blocks(
    tokens: list[int], others: list[int], extras: bytes, other_extras: bytes
) -> None:
    tokens, others = (tokens + [0] * 4)[:4], (others + [0] * 4)[:4]
    equal = one_block(tokens, extras) == one_block(others, other_extras)
    assert equal == ((tokens, extras) == (others, other_extras))


@pytest.mark.parametrize(
    "other",
    [
        PrefixNamespace(b"other", b"tokenizer", "float32", 4),
        PrefixNamespace(b"model", b"other", "float32", 4),
        PrefixNamespace(b"model", b"tokenizer", "bfloat16", 4),
        PrefixNamespace(b"model", b"tokenizer", "float32", 8),
        PrefixNamespace(b"modelt", b"okenizer", "float32", 4),
    ],
)
def test_root_depends_on_every_part_of_the_namespace(other: PrefixNamespace) -> None:
    assert other.root() != NAMESPACE.root()


def test_hash_block_rejects_a_token_beyond_32_bits() -> None:
    with pytest.raises(OverflowError):
        encode_tokens([2**32])
