"""Task for OpenAI's client: streams, tool calls to the answer, and the Responses API."""

import json
import sys
from typing import Any

import openai

QUESTION = "What is the weather in Paris, and what is 12 plus 30?"
SCHEMAS: dict[str, dict[str, str]] = {
    "get_weather": {"city": "string"},
    "add": {"a": "integer", "b": "integer"},
}


def parameters(name: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in SCHEMAS[name].items()}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def run_tool(name: str, arguments: str) -> str:
    given = json.loads(arguments)
    return "sunny, 21 degrees" if name == "get_weather" else str(given["a"] + given["b"])


class Task:
    def __init__(self, address: str, model: str) -> None:
        self.client = openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
        self.model = model

    def chat_tools(self) -> list[Any]:
        return [
            {"type": "function", "function": {"name": name, "parameters": parameters(name)}}
            for name in SCHEMAS
        ]

    def ask(self, messages: list[Any], **options: Any) -> Any:
        return self.client.chat.completions.create(
            model=self.model, messages=messages, temperature=0, **options
        )

    def text(self) -> Any:
        """Text, whole and in a stream, of a conversation and of a prompt."""
        messages = [{"role": "user", "content": "Hello!"}]
        whole = self.ask(messages)
        streamed = self.ask(messages, stream=True, stream_options={"include_usage": True})
        chunks = list(streamed)
        prompt = self.client.completions.create(
            model=self.model,
            prompt="The weather",
            temperature=0,
            max_tokens=4,
            extra_body={"ignore_eos": True},
        )
        return {
            "whole": whole.choices[0].message.content,
            "streamed": "".join(c.choices[0].delta.content or "" for c in chunks if c.choices),
            "finish_reason": whole.choices[0].finish_reason,
            "same_usage": chunks[-1].usage == whole.usage,
            "completion_tokens": prompt.usage.completion_tokens if prompt.usage else None,
            "models": [model.id for model in self.client.models.list()],
        }

    def tools(self) -> Any:
        """Tool calls and their results, until the model answers."""
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        calls = []
        for _ in range(4):
            choice = self.ask(messages, tools=self.chat_tools()).choices[0]
            messages.append(choice.message.model_dump(exclude_none=True))
            for call in choice.message.tool_calls or []:
                calls.append([call.function.name, json.loads(call.function.arguments)])
                content = run_tool(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
            if choice.finish_reason != "tool_calls":
                break
        return {"calls": calls, "answer": choice.message.content}

    def streamed_tools(self) -> Any:
        """The same by the client's own stream, which puts deltas together."""
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        calls = []
        for _ in range(4):
            with self.client.chat.completions.stream(
                model=self.model, messages=messages, temperature=0, tools=self.chat_tools()
            ) as stream:
                choice = stream.get_final_completion().choices[0]
            messages.append({**choice.message.to_dict(), "role": "assistant"})
            for call in choice.message.tool_calls or []:
                calls.append([call.function.name, json.loads(call.function.arguments)])
                content = run_tool(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
            if choice.finish_reason != "tool_calls":
                break
        return {"calls": calls, "answer": choice.message.content, "in_deltas": self._deltas() > 2}

    def _deltas(self) -> int:
        """In how many pieces the arguments of a forced call come; others come whole."""
        with self.client.chat.completions.stream(
            model=self.model,
            messages=[{"role": "user", "content": "What is 7 plus 8?"}],
            temperature=0,
            max_tokens=64,
            tools=self.chat_tools(),
            tool_choice="required",
        ) as stream:
            return sum(event.type == "tool_calls.function.arguments.delta" for event in stream)

    def forced(self) -> Any:
        """A call that must be made, of any tool and of a named one, and one that must not."""
        messages = [{"role": "user", "content": "What is 7 plus 8?"}]
        named = {"type": "function", "function": {"name": "add"}}
        said = {}
        for name, choice in (("required", "required"), ("named", named), ("none", "none")):
            message = (
                self.ask(messages, tools=self.chat_tools(), tool_choice=choice, max_tokens=64)
                .choices[0]
                .message
            )
            said[name] = [
                [call.function.name, json.loads(call.function.arguments)]
                for call in message.tool_calls or []
            ]
        return said

    def responses_text(self) -> Any:
        """Text by the Responses API, whole and in typed events, and an answer that is deleted."""
        whole = self.client.responses.create(model=self.model, input="Hello!", temperature=0)
        with self.client.responses.stream(
            model=self.model, input="Hello!", temperature=0
        ) as stream:
            types = [event.type for event in stream]
            streamed = stream.get_final_response()
        kept = self.client.responses.retrieve(whole.id)
        self.client.responses.delete(whole.id)
        try:
            self.client.responses.retrieve(whole.id)
            deleted = False
        except openai.NotFoundError:
            deleted = True
        return {
            "whole": whole.output_text,
            "streamed": streamed.output_text,
            "kept": kept.output_text,
            "deleted": deleted,
            "first": types[0],
            "last": types[-1],
        }

    def responses_tools(self) -> Any:
        """Tool calls by the Responses API, each answered by naming the previous response."""
        tools: list[Any] = [
            {"type": "function", "name": name, "parameters": parameters(name), "strict": True}
            for name in SCHEMAS
        ]
        given: Any = [{"role": "user", "content": QUESTION}]
        previous, calls = None, []
        for _ in range(4):
            response = self.client.responses.create(
                model=self.model,
                input=given,
                tools=tools,
                temperature=0,
                **({"previous_response_id": previous} if previous else {}),
            )
            previous, given = response.id, []
            for item in response.output:
                if item.type == "function_call":
                    calls.append([item.name, json.loads(item.arguments)])
                    output = run_tool(item.name, item.arguments)
                    given.append(
                        {
                            "type": "function_call_output",
                            "call_id": item.call_id,
                            "output": output,
                        }
                    )
            if not given:
                break
        return {"calls": calls, "answer": response.output_text}


if __name__ == "__main__":
    address, model, name = sys.argv[1:]
    print(json.dumps(getattr(Task(address, model), name)()))
