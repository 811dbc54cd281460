"""References of settings, errors and sampling parameters, from their classes."""

import dataclasses
import inspect
import json
import re
import types
from enum import Enum
from itertools import chain
from typing import Any, get_args, get_origin

from baton import errors as error_types
from baton.errors import BatonError, ContextLengthError, InvalidArgumentError
from baton.sampling import EarlyStopping, Grammar, GrammarKind, SamplingParams
from baton.serving.grpc.errors import code_of, status_of
from baton.serving.settings import ServingSettings
from baton.worker.roles import settings_class
from baton_picker.settings import PickerSettings
from baton_router.settings import RouterSettings
from docs.tables import code, first_paragraph, page, prose, table

_SETTINGS = """```
baton router --log-level DEBUG          # a flag
BATON_LOG_LEVEL=DEBUG baton router      # an environment variable
baton router --config router.yaml       # a file with the line `log_level: DEBUG`
```

A setting has one name in all three places. A flag goes before the environment, the environment
before the file, the file before the default. A setting of type boolean has two flags: `--metrics`
and `--no-metrics`. An unknown flag, or an unknown name in the file, ends the process with code 2
and a sentence that names the nearest known one.

In a file, settings that begin alike may stand in a group: `images: {max_pixels: 1000000}` is
`images_max_pixels: 1000000`. The groups of a router are those that `--help` has headings for."""

_ERRORS = """```python
from baton import Client, SamplingParams
from baton.errors import OverloadedError

with Client("127.0.0.1:50051") as client:
    try:
        print(client.generate("def main(", SamplingParams(max_tokens=20)).text())
    except OverloadedError as error:
        print(f"no room now; worth another try in {error.retry_after:.1f} s")
```

An error keeps its type from process to process: a server sends it as the canonical gRPC code of
this table, and the client raises it as the class. Details are messages of `google.rpc`. All
classes are in `baton.errors`."""

_ERRORS_BACK = """Codes that no Baton process sends become `InternalError` in the client. Two
exceptions: `UNIMPLEMENTED` becomes `FailedPreconditionError`, since the other side does not offer
the call, and `RESOURCE_EXHAUSTED` for a message above the size limit of gRPC becomes
`InvalidArgumentError`."""

_SAMPLING = """```python
from baton import SamplingParams

SamplingParams(max_tokens=40, temperature=0.7, top_p=0.9, seed=1)
```

A value out of bounds is refused with `InvalidArgumentError`, which names field and bound. On the
wire the same fields are [`baton.v1.SamplingParams`](protobuf/sampling.md#samplingparams)."""


def settings() -> str:
    """Returns the page of the settings of all processes."""
    common = ServingSettings.model_fields
    worker = settings_class()
    return page(
        "Settings",
        _SETTINGS,
        "## All processes",
        _settings(ServingSettings, list(common)),
        "## Router",
        "A router has these besides, or with another default.",
        _settings(RouterSettings, _own(RouterSettings)),
        "## Endpoint picker",
        "An [endpoint picker](../guides/endpoint-picker.md) has these besides.",
        _settings(PickerSettings, _own(PickerSettings)),
        "## Workers",
        "A worker has these besides, in any role.",
        _settings(worker, _own(worker)),
    )


def _own(of: type[ServingSettings]) -> list[str]:
    """Returns the settings that `ServingSettings` lacks, or has with another default."""
    common = ServingSettings.model_fields
    return [
        name
        for name, field in of.model_fields.items()
        if name not in common or field.default != common[name].default
    ]


def _settings(of: type[ServingSettings], names: list[str]) -> str:
    schemas, prefix = of.model_json_schema()["properties"], of.model_config["env_prefix"]
    in_groups = set(chain.from_iterable(group.names for group in of.GROUPS.values()))
    rows = [
        (
            code(name),
            _type(schemas[name]),
            _shown(of.model_fields[name].default),
            code(f"{prefix}{name}".upper()),
            prose(schemas[name]["description"]),
        )
        for name in sorted(names, key=in_groups.__contains__)
    ]
    return table(("setting", "type", "default", "environment", "meaning"), rows)


def _type(schema: dict[str, Any]) -> str:
    """Returns the type of a JSON schema, with its choices or bounds."""
    given: dict[str, Any] = next(
        (option for option in schema.get("anyOf", ()) if option["type"] != "null"), schema
    )
    if "enum" in given:
        return ", ".join(code(choice) for choice in given["enum"])
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {given[key]:.12g}" for key, sign in bounds.items() if key in given]
    return prose(" ".join([given["type"], ", ".join(limits)]).strip())


def _shown(default: object) -> str:
    return "" if default is None else code(json.dumps(default).strip('"'))


def errors() -> str:
    """Returns the page of the errors."""
    rows = []
    for name, kind in vars(error_types).items():
        if inspect.isclass(kind) and issubclass(kind, BatonError):
            lengths = (0, 0) if kind is ContextLengthError else ()
            has_field = issubclass(kind, InvalidArgumentError)
            error = kind("", "", *lengths) if has_field else kind("")
            details = [d.type_url.rpartition("/")[2] for d in status_of(error).details]
            sent = code(code_of(error))
            rows.append((code(name), sent, ", ".join(map(code, details)), _paragraphs(kind)))
    head = ("class", "gRPC code", "details", "meaning")
    return page("Errors", _ERRORS, table(head, rows), _ERRORS_BACK)


def _paragraphs(kind: type) -> str:
    return prose(" ".join(inspect.cleandoc(kind.__doc__ or "").split()))


def sampling() -> str:
    """Returns the page of the sampling parameters."""
    documentation = inspect.getdoc(SamplingParams) or ""
    introduction, _, attributes = documentation.partition("Attributes:\n")
    # A field at the first indentation, its text to the next one.
    found = re.findall(r"^    (\w+): (.*?)(?=^    \w|\Z)", attributes, re.MULTILINE | re.DOTALL)
    meanings = {name: prose(" ".join(text.split())) for name, text in found}
    rows = [
        (code(field.name), _annotation(field.type), _value(field.default), meanings[field.name])
        for field in dataclasses.fields(SamplingParams)
    ]
    order = prose(" ".join(introduction.strip().split("\n\n")[-1].split()))
    return page(
        "Sampling parameters",
        _SAMPLING,
        table(("field", "type", "default", "meaning"), rows),
        f"## Order\n\n{order}",
        f"## Grammar\n\n{first_paragraph(Grammar.__doc__)} "
        f"`kind` is one of {_members(GrammarKind)}.",
        "## EarlyStopping\n\n"
        f"{first_paragraph(EarlyStopping.__doc__)} One of {_members(EarlyStopping)}.",
    )


def _annotation(annotation: Any) -> str:
    """Returns a type as it is written, without the names of modules."""
    if isinstance(annotation, types.UnionType):
        return " or ".join(_annotation(kind) for kind in get_args(annotation))
    if annotation in (None, types.NoneType):
        return "`None`"
    return code(_written(annotation))


def _written(annotation: Any) -> str:
    if annotation is ...:
        return "..."
    if origin := get_origin(annotation):
        return f"{origin.__name__}[{', '.join(map(_written, get_args(annotation)))}]"
    return str(annotation.__name__)


def _value(default: object) -> str:
    return code(str(default) if isinstance(default, Enum) else repr(default))


def _members(kind: type[Enum]) -> str:
    return ", ".join(code(str(member)) for member in kind)
