"""Task for LiteLLM: completions of the provider `openai`, in text and with tools."""

import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would be fetched

import litellm

QUESTION = "What is the weather in Paris, and what is 12 plus 30?"
SCHEMAS = {
    "get_weather": {"city": {"type": "string"}},
    "add": {"a": {"type": "integer"}, "b": {"type": "integer"}},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": keys, "required": list(keys)},
        },
    }
    for name, keys in SCHEMAS.items()
]


class Task:
    def __init__(self, address: str, model: str) -> None:
        self._address, self._model = address, model
        self.options: Any = {
            "model": f"openai/{model}",
            "api_base": f"{address}/v1",
            "api_key": "any",
            "temperature": 0,
            "max_retries": 0,
        }

    def text(self) -> Any:
        messages = [{"role": "user", "content": "Hello!"}]
        whole = litellm.completion(messages=messages, **self.options)
        chunks = litellm.completion(messages=messages, stream=True, **self.options)
        return {
            "whole": whole.choices[0].message.content,
            "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
        }

    def overlong(self) -> Any:
        """Errors of both providers about a prompt that is longer than the model."""
        messages = [{"role": "user", "content": "word " * 20_000}]
        told = {}
        for provider, base in (("openai", f"{self._address}/v1"), ("anthropic", self._address)):
            options = {**self.options, "model": f"{provider}/{self._model}", "api_base": base}
            try:
                litellm.completion(messages=messages, max_tokens=5, **options)
            except Exception as error:
                told[provider] = type(error).__name__
        return told

    def tools(self) -> Any:
        return self._loop(lambda messages: self._ask(messages))

    def streamed_tools(self) -> Any:
        def ask(messages: Any) -> Any:
            chunks = list(self._ask(messages, stream=True))
            return litellm.stream_chunk_builder(chunks, messages=messages)

        return self._loop(ask)

    def _ask(self, messages: Any, **options: Any) -> Any:
        return litellm.completion(messages=messages, tools=TOOLS, **options, **self.options)

    def _loop(self, ask: Any) -> Any:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        calls = []
        for _ in range(4):
            message = ask(messages).choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                given = json.loads(call.function.arguments)
                calls.append([call.function.name, given])
                weather = call.function.name == "get_weather"
                content = "sunny, 21 degrees" if weather else str(given["a"] + given["b"])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        return {"calls": calls, "answer": message.content}


if __name__ == "__main__":
    address, model, name = sys.argv[1:]
    print(json.dumps(getattr(Task(address, model), name)()))
