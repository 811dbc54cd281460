"""Length of the longest sequence that a model was made for, by its configuration."""

from typing import Any


def longest(positions: int, rope: Any) -> int:
    """Returns tokens of one sequence: the positions that a model was made for, or those to which
    YaRN extends it: its original length times its factor (arXiv 2309.00071, section 3).

    Args:
        positions: `max_position_embeddings`.
        rope: `rope_parameters`, or `rope_scaling` of older configurations; of one kind of layer
            each where it has several. None: no scaling.
    """
    given = rope if isinstance(rope, dict) else {}
    scalings = [given, *(value for value in given.values() if isinstance(value, dict))]
    return max([positions, *(_by_yarn(each, positions) for each in scalings)])


def _by_yarn(scaling: dict[str, Any], positions: int) -> int:
    if scaling.get("rope_type", scaling.get("type")) != "yarn":
        return 0
    original = scaling.get("original_max_position_embeddings") or positions
    return int(original * scaling.get("factor", 1))
