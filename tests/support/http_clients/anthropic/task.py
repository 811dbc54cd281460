"""Task for Anthropic's client: messages, their stream, and tool calls to the answer."""

import json
import sys
from typing import Any

import anthropic

QUESTION = "What is the weather in Paris, and what is 12 plus 30?"
SCHEMAS = {
    "get_weather": {"city": {"type": "string"}},
    "add": {"a": {"type": "integer"}, "b": {"type": "integer"}},
}
TOOLS: Any = [
    {
        "name": name,
        "description": "A tool.",
        "input_schema": {"type": "object", "properties": keys, "required": list(keys)},
    }
    for name, keys in SCHEMAS.items()
]


def run_tool(name: str, given: Any) -> str:
    return "sunny, 21 degrees" if name == "get_weather" else str(given["a"] + given["b"])


class Task:
    def __init__(self, address: str, model: str) -> None:
        self.client = anthropic.Anthropic(base_url=address, api_key="any", max_retries=0)
        # This client knows no temperature.
        greedy = {"temperature": 0}
        self.options: Any = {"model": model, "max_tokens": 100, "extra_body": greedy}

    def text(self) -> Any:
        """Text, whole and in a stream."""
        messages: Any = [{"role": "user", "content": "Hello!"}]
        whole = self.client.messages.create(
            messages=messages, system="You are a helpful assistant.", **self.options
        )
        with self.client.messages.stream(
            messages=messages, system="You are a helpful assistant.", **self.options
        ) as stream:
            streamed = "".join(stream.text_stream)
            final = stream.get_final_message()
        return {
            "whole": "".join(block.text for block in whole.content),
            "streamed": streamed,
            "stop_reason": whole.stop_reason,
            "same_usage": final.usage.output_tokens == whole.usage.output_tokens,
        }

    def tools(self) -> Any:
        """Tool calls and their results, until the model answers."""
        return self._loop(self._create)

    def streamed_tools(self) -> Any:
        return self._loop(self._stream)

    def forced(self) -> Any:
        """A call that must be made, of any tool and of a named one."""
        messages: Any = [{"role": "user", "content": "What is 7 plus 8?"}]
        said = {}
        for choice in ({"type": "any"}, {"type": "tool", "name": "add"}):
            message = self._create(messages, tool_choice=choice)
            said[choice["type"]] = [
                [block.name, block.input] for block in message.content if block.type == "tool_use"
            ]
        return said

    def _create(self, messages: Any, **options: Any) -> Any:
        return self.client.messages.create(
            messages=messages, tools=TOOLS, **options, **self.options
        )

    def _stream(self, messages: Any) -> Any:
        with self.client.messages.stream(messages=messages, tools=TOOLS, **self.options) as stream:
            return stream.get_final_message()

    def _loop(self, ask: Any) -> Any:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        calls = []
        for _ in range(4):
            message = ask(messages)
            messages.append({"role": "assistant", "content": message.content})
            if message.stop_reason != "tool_use":
                break
            used = [block for block in message.content if block.type == "tool_use"]
            calls += [[block.name, block.input] for block in used]
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": block.id,
                    "content": run_tool(block.name, block.input),
                }
                for block in used
            ]
            messages.append({"role": "user", "content": results})
        answer = "".join(block.text for block in message.content if block.type == "text")
        return {"calls": calls, "answer": answer, "stop_reason": message.stop_reason}


if __name__ == "__main__":
    address, model, name = sys.argv[1:]
    print(json.dumps(getattr(Task(address, model), name)()))
