"""Task for Instructor: an object by a tool that must be called, and by JSON."""

import json
import sys
from typing import Any

import instructor
import openai
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


class Task:
    def __init__(self, address: str, model: str) -> None:
        self.openai = openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
        self.model = model

    def structured(self) -> Any:
        """Each mode: the default, with tools, the object's schema, and any JSON."""
        said = {}
        for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
            client = instructor.from_openai(self.openai, mode=mode)
            person = client.chat.completions.create(
                model=self.model,
                response_model=Person,
                messages=[{"role": "user", "content": "Anna is 31 years old."}],
                temperature=0,
                max_tokens=100,
                max_retries=0,
            )
            said[mode.value] = person.model_dump()
        return said


if __name__ == "__main__":
    address, model, name = sys.argv[1:]
    print(json.dumps(getattr(Task(address, model), name)()))
