"""Task for LlamaIndex: text, a chat with tools, and an agent that calls functions."""

import asyncio
import json
import sys
from typing import Any

from llama_index.core.agent.workflow import FunctionAgent, ToolCall
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

QUESTION = "What is the weather in Paris, and what is 12 plus 30?"


def get_weather(city: str) -> str:
    """Returns the weather of a city."""
    return "sunny, 21 degrees"


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


TOOLS: Any = [FunctionTool.from_defaults(get_weather), FunctionTool.from_defaults(add)]


class Task:
    def __init__(self, address: str, model: str) -> None:
        self.model = OpenAILike(
            model=model,
            api_base=f"{address}/v1",
            api_key="any",
            is_chat_model=True,
            is_function_calling_model=True,
            temperature=0,
            max_retries=0,
            context_window=2048,
        )

    def text(self) -> Any:
        messages = [ChatMessage(role="user", content="Hello!")]
        return {
            "whole": self.model.chat(messages).message.content,
            "streamed": "".join(part.delta or "" for part in self.model.stream_chat(messages)),
        }

    def bound(self) -> Any:
        """Tools that may be called, and tools of which any must be."""
        said = {}
        for name, required in (("auto", False), ("any", True)):
            response = self.model.chat_with_tools(
                TOOLS, user_msg="What is the weather in Paris?", tool_required=required
            )
            calls = self.model.get_tool_calls_from_response(response)
            said[name] = [[call.tool_name, call.tool_kwargs] for call in calls]
        return said

    def tools(self) -> Any:
        """An agent, which calls tools until the model answers."""
        return asyncio.run(self._agent())

    async def _agent(self) -> Any:
        agent = FunctionAgent(tools=TOOLS, llm=self.model, system_prompt="Use the tools.")
        handler = agent.run(QUESTION)
        calls = [
            [event.tool_name, event.tool_kwargs]
            async for event in handler.stream_events()
            if type(event) is ToolCall
        ]
        return {"calls": calls, "answer": str(await handler)}


if __name__ == "__main__":
    address, model, name = sys.argv[1:]
    print(json.dumps(getattr(Task(address, model), name)()))
