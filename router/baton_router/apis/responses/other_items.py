"""Items of histories that other servers made: calls of tools of types that Baton does not serve.

A client that changes its model within a conversation sends them. What can be told is told to the
model as a call of a function and its result; the types of the others are `LEFT_OUT`, which are
named to the client. Each struct of a call has the properties of `FunctionCallItem`, and each of a
result those of `FunctionCallOutput`.
"""

import json
from collections.abc import Sequence
from typing import Any, ClassVar

from msgspec import field

from baton_router.apis.openai.schemas import JsonObject
from baton_router.apis.responses.parts import InputImage, InputText, ItemSchema
from baton_router.call.arguments import text_argument

LEFT_OUT = frozenset(
    {
        "additional_tools",
        "compaction",
        "compaction_trigger",
        "computer_call",
        "computer_call_output",
        "image_generation_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_list_tools",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    }
)
"""Types without text that a model of another server could read."""


class CustomCall(ItemSchema, frozen=True, tag="custom_tool_call"):
    """Call with a text as argument."""

    call_id: str
    name: str
    input: str = ""
    namespace: str | None = None

    @property
    def arguments(self) -> str:
        return text_argument(self.input)


class CustomOutput(ItemSchema, frozen=True, tag="custom_tool_call_output"):
    call_id: str
    output: str | list[InputText | InputImage] = ""


class _Call(ItemSchema, frozen=True):
    """Call of a tool that has its name from its type."""

    name: ClassVar[str]
    namespace: ClassVar[None] = None


class LocalShellCall(_Call, frozen=True, tag="local_shell_call"):
    name: ClassVar[str] = "local_shell"
    call_id: str
    action: JsonObject
    # By which its output names it.
    id: str = ""

    @property
    def arguments(self) -> str:
        return _json(self.action)


class LocalShellOutput(ItemSchema, frozen=True, tag="local_shell_call_output"):
    call_id: str = field(name="id")
    output: str = ""


class ShellCall(_Call, frozen=True, tag="shell_call"):
    name: ClassVar[str] = "shell"
    call_id: str
    action: JsonObject

    @property
    def arguments(self) -> str:
        return _json(self.action)


class ShellOutput(ItemSchema, frozen=True, tag="shell_call_output"):
    call_id: str
    chunks: list[JsonObject] = field(name="output")

    @property
    def output(self) -> str:
        return _json(self.chunks)


class PatchCall(_Call, frozen=True, tag="apply_patch_call"):
    name: ClassVar[str] = "apply_patch"
    call_id: str
    operation: JsonObject

    @property
    def arguments(self) -> str:
        return _json(self.operation)


class PatchOutput(ItemSchema, frozen=True, tag="apply_patch_call_output"):
    call_id: str
    status: str = ""
    log: str | None = field(name="output", default=None)

    @property
    def output(self) -> str:
        return self.log or self.status


class ProgramCall(_Call, frozen=True, tag="program"):
    name: ClassVar[str] = "program"
    call_id: str
    code: str

    @property
    def arguments(self) -> str:
        return _json({"code": self.code})


class ProgramOutput(ItemSchema, frozen=True, tag="program_output"):
    call_id: str
    output: str = field(name="result")


class McpCall(ItemSchema, frozen=True, tag="mcp_call"):
    """Call of a tool of a server of MCP, with its result."""

    call_id: str = field(name="id")
    name: str
    arguments: str = ""
    output: str | None = None
    error: Any = None
    namespace: ClassVar[None] = None

    @property
    def result(self) -> str:
        if self.output is not None or self.error is None:
            return self.output or ""
        return self.error if isinstance(self.error, str) else _json(self.error)


class CodeCall(_Call, frozen=True, tag="code_interpreter_call"):
    """Code that was run, with what it wrote."""

    name: ClassVar[str] = "code_interpreter"
    call_id: str = field(name="id")
    code: str | None = None
    outputs: list[JsonObject] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return _json({"code": self.code or ""})

    @property
    def result(self) -> str:
        return "\n".join(str(written["logs"]) for written in self.outputs if "logs" in written)


class FileSearchCall(_Call, frozen=True, tag="file_search_call"):
    """Search in files, with what it found."""

    name: ClassVar[str] = "file_search"
    call_id: str = field(name="id")
    queries: list[str] = field(default_factory=list)
    results: list[JsonObject] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return _json({"queries": self.queries})

    @property
    def result(self) -> str:
        return _json(self.results)


OtherCall = CustomCall | LocalShellCall | ShellCall | PatchCall | ProgramCall
OtherOutput = CustomOutput | LocalShellOutput | ShellOutput | PatchOutput | ProgramOutput
CallWithResult = McpCall | CodeCall | FileSearchCall
OtherItem = OtherCall | OtherOutput | CallWithResult


def _json(value: JsonObject | Sequence[Any]) -> str:
    return json.dumps(value, ensure_ascii=False)
