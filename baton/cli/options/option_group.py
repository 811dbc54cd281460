"""Option groups that several commands share: the fields of a data class."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints


def takes_options(
    group: type, parameter: str, *, without: frozenset[str] = frozenset(), **defaults: object
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command an option for each field of `group`, and an instance as `parameter`.

    Args:
        group: a data class whose fields are annotated as Typer expects.
        without: fields that are not offered.
        defaults: of this command, where they differ.
    """
    hints = get_type_hints(group, include_extras=True)
    options = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults.get(field.name, field.default),
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(group)
        if field.name not in without
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_options(**values: Any) -> None:
            given = {option.name: values.pop(option.name) for option in options}
            command(**values, **{parameter: group(**given)})

        own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [
            *(p.replace(kind=p.KEYWORD_ONLY) for p in own if p.name != parameter),
            *options,
        ]
        with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_options.__annotations__ = {p.name: p.annotation for p in parameters}
        return with_options

    return decorate
