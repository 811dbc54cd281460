"""Functions of a Responses request by the names that the model calls them by.

Functions in a `namespace`, as Codex sends them, are functions like all others to the model: under
names made of both, which no other function has. Their calls come and go with both names apart.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from baton_router.apis.answers.answer_writer import Json
from baton_router.apis.responses.schemas import FunctionTool, Namespace

# As long as OpenAI's own names of functions.
_MAX_CHARS = 64
_ILLEGAL = re.compile(r"[^A-Za-z0-9_-]")


@dataclass(frozen=True, slots=True)
class NamedTool:
    """Function of a request.

    Attributes:
        name: by which the model calls it.
        description: for the model, after that of its namespace.
        namespace: empty: it is in none.
        place: its path in the request.
    """

    name: str
    description: str
    namespace: str
    tool: FunctionTool
    place: str


class Functions:
    """Functions of one request, in their order.

    Args:
        tools: None is a tool that was left out.
    """

    def __init__(self, tools: Sequence[FunctionTool | Namespace | None]) -> None:
        # Names, each with the last number that one like it got.
        taken = {tool.name: 1 for tool in tools if isinstance(tool, FunctionTool)}
        self.all: list[NamedTool] = []
        for at, given in enumerate(tools):
            if isinstance(given, FunctionTool):
                self.all.append(_named(given.name, given, None, f"tools[{at}]"))
            elif given is not None:
                for inner, tool in enumerate(given.tools):
                    if tool is not None:
                        name = _unique(_joined(given.name, tool.name), taken)
                        place = f"tools[{at}].tools[{inner}]"
                        self.all.append(_named(name, tool, given, place))
        self._apart = {f.name: (f.namespace, f.tool.name) for f in self.all if f.namespace}
        self._names = {apart: name for name, apart in self._apart.items()}

    def name_of(self, namespace: str | None, name: str) -> str:
        """Returns the name by which the model calls a function, also one of an earlier turn that
        the request has no more."""
        if not namespace:
            return name
        return self._names.get((namespace, name)) or _joined(namespace, name)

    def fields_of(self, name: str) -> Json:
        """Returns the fields that name a function in its call, by the name that the model wrote."""
        namespace, short = self._apart.get(name, ("", name))
        return {"name": short, "namespace": namespace} if namespace else {"name": short}


def _named(name: str, tool: FunctionTool, of: Namespace | None, place: str) -> NamedTool:
    about = (None if of is None else of.description, tool.description)
    description = "\n\n".join(text for text in about if text)
    return NamedTool(name, description, "" if of is None else of.name, tool, place)


def _joined(namespace: str, name: str) -> str:
    return f"{_ILLEGAL.sub('_', namespace)}__{name}"


def _unique(name: str, taken: dict[str, int]) -> str:
    """Returns a name that is not yet taken, and takes it."""
    found = base = name[:_MAX_CHARS]
    while found in taken:
        taken[base] += 1
        end = f"_{taken[base]}"
        found = base[: _MAX_CHARS - len(end)] + end
    taken[found] = 1
    return found
