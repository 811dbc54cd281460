"""Task for LangChain: text, bound tools, structured output, and an agent."""

import json
import sys
from typing import Any

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

QUESTION = "What is the weather in Paris, and what is 12 plus 30?"


@tool
def get_weather(city: str) -> str:
    """Returns the weather of a city."""
    return "sunny, 21 degrees"


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


class Person(BaseModel):
    """A person."""

    name: str
    age: int


class Task:
    def __init__(self, address: str, model: str) -> None:
        self.model = ChatOpenAI(
            base_url=f"{address}/v1", api_key="any", model=model, temperature=0, max_retries=0
        )

    def text(self) -> Any:
        return {
            "whole": self.model.invoke("Hello!").content,
            "streamed": "".join(chunk.content for chunk in self.model.stream("Hello!")),
        }

    def bound(self) -> Any:
        """Tools that may be called, and tools of which any must be."""
        said = {}
        for choice in ("auto", "any"):
            message = self.model.bind_tools([get_weather, add], tool_choice=choice).invoke(
                "What is the weather in Paris?"
            )
            said[choice] = [[call["name"], call["args"]] for call in message.tool_calls]
        return said

    def structured(self) -> Any:
        """An object, by a function that must be called and by a schema."""
        return {
            method: self.model.with_structured_output(Person, method=method)
            .invoke("Anna is 31 years old.")
            .model_dump()
            for method in ("function_calling", "json_schema")
        }

    def tools(self) -> Any:
        """An agent, which calls tools until the model answers."""
        agent = create_agent(self.model, [get_weather, add])
        messages = agent.invoke({"messages": [{"role": "user", "content": QUESTION}]})["messages"]
        calls = [
            [call["name"], call["args"]]
            for message in messages
            for call in getattr(message, "tool_calls", [])
        ]
        return {"calls": calls, "answer": messages[-1].content}


if __name__ == "__main__":
    address, model, name = sys.argv[1:]
    print(json.dumps(getattr(Task(address, model), name)()))
