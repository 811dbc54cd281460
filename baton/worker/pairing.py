"""Pairing: the properties that two workers must share before they exchange KV blocks."""

from dataclasses import dataclass

from baton.engine.executor.cache.kv_layout import KvLayout
from baton.errors import FailedPreconditionError

# Groups, and shapes of each, that an error names at most: the peer may claim any number.
_MOST_NAMED = 4
_LONGEST_NAME = 64  # characters of a version or a dtype, likewise


@dataclass(frozen=True, slots=True)
class Pairing:
    """Properties that two workers must share before any block moves.

    Attributes:
        version: version of Baton; empty from workers too old to report it, never this worker's.
        layouts: one per cache group, in the order of the groups.
    """

    version: str
    fingerprint: bytes
    layouts: tuple[KvLayout, ...]

    def check(self, other: "Pairing", other_name: str) -> None:
        """Raises `FailedPreconditionError`, naming both values, unless the two are equal."""
        if self.version != other.version:
            theirs = other.version[:_LONGEST_NAME] or "not said"
            raise FailedPreconditionError(
                f"this worker's version of Baton is {self.version}, that of {other_name} is "
                f"{theirs}: blocks are exchanged within one version, so finish the upgrade"
            )
        if self.fingerprint != other.fingerprint:
            raise FailedPreconditionError(
                f"this worker's model fingerprint is {self.fingerprint.hex()}, that of "
                f"{other_name} is {other.fingerprint.hex()}: {self._why_unlike(other)}"
            )
        if self.layouts != other.layouts:
            raise FailedPreconditionError(
                f"this worker's KV layout is {describe_layouts(self.layouts)}, that of "
                f"{other_name} is {describe_layouts(other.layouts)}: start both with the same "
                "dtype, kv_cache_dtype and block size"
            )

    def _why_unlike(self, other: "Pairing") -> str:
        """Returns the likely reason for which fingerprints differ."""
        ours, theirs = _dtypes(self.layouts), _dtypes(other.layouts)
        if ours and theirs and ours != theirs:
            return (
                f"their KV is of {ours} and {theirs}; start both with the same --dtype, since auto "
                "depends on the device and the CPU, and the same --kv-cache-dtype"
            )
        return (
            "they serve different models or revisions, or compute them in other ways (dtype, "
            "kernels, deterministic, kv_cache_dtype)"
        )


def _dtypes(layouts: tuple[KvLayout, ...]) -> str:
    return " and ".join(sorted({layout.dtype[:_LONGEST_NAME] for layout in layouts[:_MOST_NAMED]}))


def describe_layouts(layouts: tuple[KvLayout, ...]) -> str:
    """Returns the layouts as text of bounded length, for error messages."""
    named = list(map(_describe_group, layouts[:_MOST_NAMED]))
    if len(layouts) > _MOST_NAMED:
        named.append(f"{len(layouts) - _MOST_NAMED} more")
    return " and ".join(named) or "that of no cache group"


def _describe_group(layout: KvLayout) -> str:
    heads = {
        (m.num_kv_heads, m.key_head_dim, m.value_head_dim, m.head_stride): None
        for m in layout.layers
    }
    shapes = ", ".join(
        f"{n} heads of {key} + {value} every {stride} bytes"
        for n, key, value, stride in list(heads)[:_MOST_NAMED]
    )
    if len(heads) > _MOST_NAMED:
        shapes += f", {len(heads) - _MOST_NAMED} more"
    window = "" if layout.window is None else f", window {layout.window}"
    return (
        f"{layout.dtype}, block size {layout.block_size}, {layout.block_bytes} bytes a block, "
        f"{len(layout.layers)} layers ({shapes}){window}"
    )
