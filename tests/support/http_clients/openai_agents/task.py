"""Task for OpenAI's agents: a loop of two tool calls that ends, by either of OpenAI's APIs."""

import asyncio
import json
import sys
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    ToolCallItem,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

QUESTION = "What is the weather in Paris, and what is 12 plus 30?"


@function_tool
def get_weather(city: str) -> str:
    """Returns the weather of a city."""
    return "sunny, 21 degrees"


@function_tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


class Task:
    def __init__(self, address: str, model: str) -> None:
        set_tracing_disabled(True)
        self.client = AsyncOpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
        self.model = model

    def tools(self) -> Any:
        return asyncio.run(
            self._loop(OpenAIChatCompletionsModel(model=self.model, openai_client=self.client))
        )

    def responses_tools(self) -> Any:
        return asyncio.run(
            self._loop(OpenAIResponsesModel(model=self.model, openai_client=self.client))
        )

    def streamed_tools(self) -> Any:
        return asyncio.run(
            self._streamed(OpenAIChatCompletionsModel(model=self.model, openai_client=self.client))
        )

    def responses_streamed_tools(self) -> Any:
        return asyncio.run(
            self._streamed(OpenAIResponsesModel(model=self.model, openai_client=self.client))
        )

    def _agent(self, model: Any) -> Agent:
        return Agent(
            name="helper",
            instructions="You are a helpful assistant.",
            model=model,
            tools=[get_weather, add],
            model_settings=ModelSettings(temperature=0),
        )

    async def _loop(self, model: Any) -> Any:
        result = await Runner.run(self._agent(model), QUESTION, max_turns=5)
        return self._said(result)

    async def _streamed(self, model: Any) -> Any:
        result = Runner.run_streamed(self._agent(model), QUESTION, max_turns=5)
        async for _ in result.stream_events():
            pass
        return self._said(result)

    def _said(self, result: Any) -> Any:
        calls = [
            [item.raw_item.name, json.loads(item.raw_item.arguments)]
            for item in result.new_items
            if isinstance(item, ToolCallItem)
        ]
        return {"calls": calls, "answer": result.final_output}


if __name__ == "__main__":
    address, model, name = sys.argv[1:]
    print(json.dumps(getattr(Task(address, model), name)()))
