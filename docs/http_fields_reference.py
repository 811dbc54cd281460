"""Reference of the fields of other servers that the HTTP API takes or refuses, from its table."""

import json

from baton_router.apis.edge.body.other_servers import OTHER_FIELDS, OtherField
from docs.tables import code, page, table

_INTRODUCTION = """```
curl http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \\
    -d '{"prompt": "Hello", "max_new_tokens": 8}'
```

Servers have names of their own for fields that change the answer. A route takes such a field as
the fields of the third column if it has all of them; else it refuses the field by name, unless its
value is one of the fourth column. Errors name the field that it has become. A field that a route
has itself means what that route says.
Fields that change nothing are ignored, and named in the header `x-baton-ignored`
([parameters](../openai.md#parameters))."""


def http_fields() -> str:
    """Returns the page of the fields of other servers."""
    rows = [_row(name, field) for name, field in sorted(OTHER_FIELDS.items())]
    head = ("field", "there", "becomes", "changes nothing")
    return page("Fields of other servers", _INTRODUCTION, table(head, rows))


def _row(name: str, field: OtherField) -> tuple[str, str, str, str]:
    becomes = ", ".join(map(code, field.becomes)) or "refused"
    neutral = ", ".join(code(json.dumps(value)) for value in field.neutral)
    return code(name), field.meaning, becomes, neutral
