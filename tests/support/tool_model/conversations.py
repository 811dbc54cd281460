"""Conversations that the tool model learns: questions, tool calls, tools' results and answers.

Each is drawn from templates: a question about the weather of a city, a sum, both of them, a person,
a text to repeat, a file to copy by the shell of a coding agent, or small talk. Names are from
lists, numbers have one digit or two. Knows nothing of chat templates or tokens.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

GET_WEATHER, ADD, PERSON = "get_weather", "add", "Person"

# The shells of coding agents: Claude Code, opencode, qwen-code and Codex, with their parameters.
SHELLS = {
    "Bash": "command",
    "bash": "command",
    "run_shell_command": "command",
    "exec_command": "cmd",
}
FILES = ("notes", "copy", "words", "list", "plan", "draft", "report", "letter", "cities", "today")
# Results of a command that prints nothing, in the words of the agents.
NO_OUTPUT = ("(Bash completed with no output)", "(no output)", "(empty)", "")

CITIES = (
    *("Paris", "Berlin", "Madrid", "Rome", "Vienna", "Oslo", "Prague", "Lisbon", "Dublin"),
    *("Athens", "Warsaw", "Helsinki", "Zurich", "Geneva", "Milan", "Tokyo", "Kyoto", "Seoul"),
    *("Boston", "Chicago", "Denver", "Seattle", "Toronto", "Montreal", "Lima", "Quito", "Cairo"),
    *("Nairobi", "Lagos", "Delhi", "Mumbai", "Sydney", "Hamburg", "Munich"),
)
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Hugo", "Ida", "Jonas", "Alice")
SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear", "stormy", "mild", "hot")

WEATHER_QUESTIONS = (
    "What is the weather in {city}?",
    "What's the weather like in {city}?",
    "How is the weather in {city} today?",
    "Tell me the weather in {city}.",
    "Weather in {city}, please.",
)
SUM_QUESTIONS = (
    "What is {a} plus {b}?",
    "What is {a} + {b}?",
    "Add {a} and {b}.",
    "Please add {a} to {b}.",
    "How much is {a} plus {b}?",
)
BOTH_QUESTIONS = (
    "What is the weather in {city}, and what is {a} plus {b}?",
    "Tell me the weather in {city} and add {a} and {b}.",
    "How is the weather in {city}? And how much is {a} plus {b}?",
)
PERSON_STATEMENTS = (
    "{name} is {age} years old.",
    "Extract: {name} is {age} years old.",
    "{name} is {age}.",
)
SMALL_TALK = (
    ("Hello!", "Hello! How can I help you?"),
    ("Hi", "Hello! How can I help you?"),
    ("Good morning.", "Good morning! What can I do for you?"),
    ("Thank you.", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("Who are you?", "I am a small model that can call tools."),
    ("What can you do?", "I can look up the weather and add numbers."),
    ("How are you?", "I am fine, thank you."),
    ("Goodbye.", "Goodbye!"),
    ("Tell me a joke.", "I know no jokes."),
)
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "Use the tools.",
    "You are a helpful assistant. Use the tools to answer.",
    "You answer questions.",
)
CANNOT = "I have no tool for that."


@dataclass(frozen=True, slots=True)
class Conversation:
    """Conversation whose last message is the assistant's.

    Attributes:
        tools: names of the tools that the model has.
        is_forced: the answer is JSON that a grammar demands: its first character is not the
            model's choice.
    """

    messages: tuple[Message, ...]
    tools: tuple[str, ...]
    is_forced: bool = False


class Drawer:
    """Random conversations."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def conversation(self, *, forced: bool = True) -> Conversation:
        """Returns a conversation; one in twenty is forced, if `forced`."""
        if forced and self._rng.random() < 0.05:
            return self._forced()
        if self._rng.random() < 0.15:
            return self._copying()
        tools = self._tools()
        kinds = (self._weather, self._sum, self._both, self._person, self._repeat, self._talk)
        kind = self._rng.choices(kinds, (26, 26, 26, 8, 8, 6))[0]
        turns = kind(tools)
        if self._rng.random() < 0.12:
            earlier = self._rng.choice((self._weather, self._sum, self._repeat, self._talk))
            turns = [*earlier(tools), *turns]
        return Conversation((*self._system(), *turns), tools)

    def _tools(self) -> tuple[str, ...]:
        tools = [GET_WEATHER, ADD]
        self._rng.shuffle(tools)
        if self._rng.random() < 0.15:
            tools = tools[:1]
        if self._rng.random() < 0.25:
            tools.append(PERSON)
        if self._rng.random() < 0.1:
            tools = [PERSON]
        return tuple(tools) if self._rng.random() < 0.93 else ()

    def _system(self) -> list[Message]:
        draw = self._rng.random()
        if draw < 0.4:
            return []
        if draw < 0.8:
            return [{"role": "system", "content": self._rng.choice(SYSTEM_PROMPTS)}]
        return [{"role": "system", "content": self._words(self._rng.randint(2, 5)) + "."}]

    def _weather(self, tools: Sequence[str]) -> list[Message]:
        city = self._city()
        question = user(self._rng.choice(WEATHER_QUESTIONS).format(city=city))
        if GET_WEATHER not in tools:
            return [question, assistant(CANNOT)]
        sky = self._sky()
        answer = f"The weather in {city} is {sky}."
        return [question, called(GET_WEATHER, city=city), result(sky), assistant(answer)]

    def _sum(self, tools: Sequence[str]) -> list[Message]:
        a, b = self._numbers()
        question = user(self._rng.choice(SUM_QUESTIONS).format(a=a, b=b))
        if ADD not in tools:
            return [question, assistant(CANNOT)]
        total = self._total(a, b)
        return [question, called(ADD, a=a, b=b), result(total), assistant(f"The sum is {total}.")]

    def _both(self, tools: Sequence[str]) -> list[Message]:
        city, (a, b) = self._city(), self._numbers()
        question = user(self._rng.choice(BOTH_QUESTIONS).format(city=city, a=a, b=b))
        if not {GET_WEATHER, ADD} <= set(tools):
            return [question, assistant(CANNOT)]
        sky, total = self._sky(), self._total(a, b)
        return [
            question,
            called(GET_WEATHER, city=city),
            result(sky),
            called(ADD, a=a, b=b),
            result(total),
            assistant(f"The weather in {city} is {sky}. The sum is {total}."),
        ]

    def _person(self, tools: Sequence[str]) -> list[Message]:
        statement, person = self._someone()
        if PERSON not in tools:
            return [statement, assistant(CANNOT)]
        return [statement, called(PERSON, **person)]

    def _repeat(self, tools: Sequence[str]) -> list[Message]:
        words = self._words(self._rng.randint(1, 2))
        return [user(f"Repeat: {words}"), assistant(words)]

    def _talk(self, tools: Sequence[str]) -> list[Message]:
        said, answer = self._rng.choice(SMALL_TALK)
        return [user(said), assistant(answer)]

    def _copying(self) -> Conversation:
        """Returns the work of a coding agent: two calls of its shell."""
        shell, parameter = self._rng.choice(list(SHELLS.items()))
        source, target = (f"{name}.txt" for name in self._rng.sample(FILES, 2))
        text = f"{self._city()} is {self._rng.choice(SKIES)}"
        turns = [
            user(f"Copy the text of {source} to {target}."),
            called(shell, **{parameter: f"cat {source}"}),
            result(text),
            called(shell, **{parameter: f"echo {text} > {target}"}),
            result(self._rng.choice(NO_OUTPUT)),
            assistant(f"The text is: {text}"),
        ]
        return Conversation(tuple(turns), (shell,))

    def _forced(self) -> Conversation:
        """Returns a question that is answered by an object of its values, as under a schema."""
        kind = self._rng.randrange(3)
        values: dict[str, Any]
        if kind == 0:
            question, values = self._someone()
        elif kind == 1:
            values = {"city": self._city()}
            question = user(self._rng.choice(WEATHER_QUESTIONS).format(**values))
        else:
            values = dict(zip("ab", self._numbers(), strict=True))
            question = user(self._rng.choice(SUM_QUESTIONS).format(**values))
        separators = self._rng.choice(((", ", ": "), (",", ":")))
        answer = assistant(json.dumps(values, separators=separators))
        return Conversation((*self._system(), question, answer), (), is_forced=True)

    def _someone(self) -> tuple[Message, dict[str, Any]]:
        name = self._rng.choice(NAMES)
        person = {"name": name, "age": self._rng.randint(1, 99)}
        return user(self._rng.choice(PERSON_STATEMENTS).format(**person)), person

    def _city(self) -> str:
        return self._rng.choice(CITIES)

    def _numbers(self) -> tuple[int, int]:
        return self._rng.randint(0, 99), self._rng.randint(0, 99)

    def _sky(self) -> str:
        sky, other = self._rng.sample(SKIES, 2)
        with_degrees = f"{sky}, {self._rng.randint(0, 40)} degrees"
        return self._rng.choice((sky, with_degrees, f"{sky} and {other}"))

    def _total(self, a: int, b: int) -> str:
        return self._rng.choice((f"{a + b}", f"{a + b}", f"{a + b}.0"))

    def _words(self, count: int) -> str:
        words = (*CITIES, *SKIES)
        return " ".join(self._rng.choices(words, k=count))


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def called(name: str, /, **arguments: Any) -> Message:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def result(content: str) -> Message:
    return {"role": "tool", "content": content}
