"""Arguments of tool calls, as a model wrote them."""

import json
from typing import Any, NoReturn


def arguments_object(written: str) -> dict[str, Any]:
    """Returns arguments as the object that templates and clients expect: null and no text are an
    empty one, and what is no object is the value of `arguments` as it was written."""
    try:
        found = json.loads(written, parse_constant=_refuse) if written.strip() else None
        if "\\u" in written:  # half of a surrogate pair is valid JSON, and no text
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return {"arguments": written}
    if found is None:
        return {}
    return found if isinstance(found, dict) else {"arguments": written}


def arguments_text(written: str) -> str:
    """Returns arguments as the text of the object that `arguments_object` returns."""
    return json.dumps(arguments_object(written), ensure_ascii=False)


def text_argument(text: str) -> str:
    """Returns a text, which is all that a custom tool gets, as the arguments of a function."""
    return json.dumps({"input": text}, ensure_ascii=False)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")
