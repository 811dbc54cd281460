"""Hypothesis strategies for the router's view of its workers."""

from hypothesis import strategies as st

from baton.cluster.prefix import HashedInput
from baton.rpc.worker_role import Role
from baton_router.routing.fleet.candidate import Candidate
from baton_router.routing.fleet.cost_rates import Rates

ROLES: tuple[Role, ...] = ("encode", "prefill", "decode")

_SECONDS = st.floats(0, 1.0)

request_ids = st.text(max_size=8)
rates = st.builds(
    Rates,
    prefill_seconds_per_step=_SECONDS,
    prefill_seconds_per_token=_SECONDS,
    attention_seconds_per_pair=st.floats(0, 1e-3),
    max_step_tokens=st.integers(0, 600),
    handoff_seconds=_SECONDS,
    transfer_seconds_per_token=_SECONDS,
    interference_seconds_per_sequence=_SECONDS,
    encoder_seconds_per_token=_SECONDS,
)


def candidates(role: Role, num_tokens: int = 1024) -> st.SearchStrategy[Candidate]:
    """Returns workers of `role` in any state, before a prompt of `num_tokens`."""
    return st.builds(
        lambda **fields: Candidate(**fields),  # by itself it would draw other fields, too
        worker=st.integers(0, 9).map(lambda i: f"{role}-{i}"),
        role=st.just(role),
        pairing=st.sampled_from([b"a", b"b\xff"]),
        num_cached_tokens=st.integers(0, num_tokens + 64),
        num_queued_tokens=st.integers(0, 4096),
        num_recent_tokens=st.floats(0, 1e9),
        num_sequences=st.integers(0, 64),
        num_held_tokens=st.integers(0, 4096),
        max_held_tokens=st.none() | st.integers(1, 4096),
        last_turn=st.integers(0, 99) | st.integers(0, 2**62),
        excluded=st.sampled_from(["", "", "", "draining", "not answering"]),
        rates=st.none() | rates,
    )


def clusters(num_tokens: int = 1024) -> st.SearchStrategy[list[Candidate]]:
    """Returns up to five workers of each role."""
    prefill, decode = (
        st.lists(candidates(role, num_tokens), max_size=5, unique_by=lambda c: c.worker)
        for role in ("prefill", "decode")
    )
    return st.builds(lambda p, d: p + d, prefill, decode)


def images(num_tokens: int = 1024) -> st.SearchStrategy[tuple[HashedInput, ...]]:
    """Returns up to four encoder inputs in a prompt of `num_tokens`."""
    bounds = st.lists(st.integers(0, num_tokens), max_size=8, unique=True).map(sorted)
    return bounds.map(
        lambda ends: tuple(
            (start, end, bytes([index]) * 16)
            for index, (start, end) in enumerate(zip(ends[::2], ends[1::2], strict=False))
        )
    )


def clusters_with_images(num_tokens: int = 1024) -> st.SearchStrategy[list[Candidate]]:
    """Returns up to three workers of each role, with outputs cached and queued images."""
    some = [
        st.lists(_with_outputs(role, num_tokens), max_size=3, unique_by=lambda c: c.worker)
        for role in ROLES
    ]
    return st.tuples(*some).map(lambda lists: [one for each in lists for one in each])


def _with_outputs(role: Role, num_tokens: int) -> st.SearchStrategy[Candidate]:
    return st.builds(
        lambda one, num_queued, cached, pending: one._replace(
            num_queued_encoder_tokens=num_queued,
            cached_inputs=tuple(sorted(cached)),
            pending_inputs=tuple(sorted(pending)),
        ),
        candidates(role, num_tokens),
        st.integers(0, 2048),
        st.sets(st.integers(0, 3)),
        st.sets(st.integers(0, 3)),
    )
