"""Trial process for grammars: compiles untrusted ones in a sandbox, so that none kills the engine.

Run as a module it reads grammars from stdin, one per line, and writes verdicts. It holds the
tokenizer, and forks a child per grammar, which compiles it under limits that the kernel enforces
and generates a few texts: children of several grammars run at once, and none waits for a tokenizer
to be read. The engine's side is `baton.engine.executor.grammar.trial`.
"""

import json
import math
import os
import random
import re
import resource
import selectors
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any, Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from baton.engine.executor.grammar.tool_schemas import (
    ToolSchemaError,
    without_faults,
    without_unknown_formats,
)
from baton.sampling import Grammar, GrammarKind

# Smaller than the stack of any engine thread, so that a grammar that passes here fits there.
_STACK_BYTES: Final = 3 << 19
_LEAST_BYTES: Final = 1 << 18
_WALKS: Final = 4
_WALK_TOKENS: Final = 16
_MAX_REASON: Final = 300
# Seconds for which a grammar stays refused that took too long: so may others on a busy machine.
_SLOW_FOR_S: Final = 60.0
# Without it llguidance allows only the canonical tokenization of text that is certain to follow. It
# computes that again for each mask (slow for long constants), confuses text that spells a special
# token with the token, and masks that allow less than `accept` are hard to reason about.
_OPTIONS: Final = '\n%llguidance {"no_forcing": true}'
# A rule of GBNF; no line of a Lark grammar begins like this.
_GBNF_RULE: Final = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_VERBOSE_FLAG: Final = re.compile(r"\(\?[a-zA-Z]*x")


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Resource limits of one grammar, and of the pool of trials.

    Attributes:
        time_s: wall-clock seconds of a trial.
        memory_bytes: bytes that a trial may allocate.
        token_s: CPU seconds of one token, its mask included.
        mean_token_s: mean CPU seconds per token, masks included.
        max_lexer_states: lexer states cached; about 550 bytes each.
        step_max_items: items of the parser for one mask; real grammars need less than 1,000, with
            vocabularies of 150,000, too.
        num_trials: maximum number of concurrent trials.
        max_waiting: maximum number of grammars that wait for a trial.
    """

    time_s: float = 2.0
    memory_bytes: int = 256 << 20
    token_s: float = 0.1
    mean_token_s: float = 0.005
    max_lexer_states: int = 20_000
    step_max_items: int = 3_000
    num_trials: int = 3
    max_waiting: int = 16

    def native(self) -> LLParserLimits:
        """Returns the limits for llguidance, whose errors must not quote the grammar in logs."""
        return LLParserLimits(
            max_lexer_states=self.max_lexer_states,
            step_max_items=self.step_max_items,
            verbose_errors=False,
        )


@dataclass(frozen=True, slots=True)
class TrialResult:
    """Result of a trial.

    Attributes:
        native: the grammar in llguidance's format.
        problem: reason for rejection; None if it is accepted.
        valid_s: seconds for which another trial would give the same result, as far as can be known.
        num_bytes: memory that compilation takes, in bytes.
        field: path of what is rejected, of a schema of a tool; empty: the whole grammar.
    """

    native: str = ""
    problem: str | None = None
    field: str = ""
    valid_s: float = math.inf
    num_bytes: int = 0


def reason_of(error: str) -> str:
    """Returns the reason from an error of llguidance, without the grammar's text around it."""
    lines = error.splitlines() or ["it does not compile"]
    problem = next((line for line in lines if line.startswith("error: ")), lines[0])
    problem = problem.removeprefix("error: ").rpartition(" (in regex): ")[2]
    if problem.startswith("NoExtensionBias"):
        problem = "no token of the model can continue what it has matched"
    return problem if len(problem) <= _MAX_REASON else problem[:_MAX_REASON] + "..."


def _too_long(limits: GrammarLimits) -> str:
    return f"takes more than {limits.time_s:g} s to compile"


def _too_big(limits: GrammarLimits) -> str:
    return f"takes more than {limits.memory_bytes >> 20} MiB to compile"


def _main(config: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(10)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    marks: list[int] = config["marks"]
    tokenizer = LLTokenizer(config["file"], eos_token=marks)
    Judge(tokenizer, marks, GrammarLimits(**config["limits"]), answers).run()


@dataclass(slots=True)
class _Trial:
    """Child that tries one grammar.

    Attributes:
        number: of the request.
        pipe: descriptor from which the child's answer is read, to its end.
    """

    number: int
    child: int
    pipe: int
    answer: bytes = b""


class Judge:
    """Judge of the grammars that come by stdin, each in a child of its own, any number at once.

    Args:
        marks: tokens that end a sequence.
        answers: gets the results' fields in any order, by the numbers of their requests; first 0,
            once it is ready.
    """

    def __init__(
        self, tokenizer: LLTokenizer, marks: list[int], limits: GrammarLimits, answers: RawIOBase
    ) -> None:
        self._tokenizer = tokenizer
        self._marks = marks
        self._limits = limits
        self._answers = answers
        self._received = b""
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Judges until stdin ends."""
        smallest = self._tried(Grammar(GrammarKind.REGEX, "a"))
        own_bytes = smallest.get("num_bytes", 0)  # of a child that compiles next to nothing
        self._tell(0, {})
        self._selector.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                chunk = os.read(key.fd, 1 << 16)
                if key.data is not None:
                    self._read(key.data, chunk, own_bytes)
                elif chunk:
                    self._receive(chunk)
                else:
                    return

    def _tried(self, grammar: Grammar) -> dict[str, Any]:
        """Returns the fields of a trial for which nothing else waits."""
        trial = self._start(0, grammar)
        with os.fdopen(trial.pipe, "rb") as pipe:
            trial.answer = pipe.read()
        return _ended(trial, self._limits)

    def _receive(self, chunk: bytes) -> None:
        *lines, self._received = (self._received + chunk).split(b"\n")
        for line in lines:
            asked = json.loads(line)
            trial = self._start(asked["number"], Grammar(GrammarKind(asked["kind"]), asked["text"]))
            self._selector.register(trial.pipe, selectors.EVENT_READ, trial)

    def _start(self, number: int, grammar: Grammar) -> _Trial:
        read, write = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.close(self._answers.fileno())
                _run_trial(grammar, self._tokenizer, self._marks, self._limits, write)
            finally:
                os._exit(1)
        os.close(write)
        return _Trial(number, child, read)

    def _read(self, trial: _Trial, chunk: bytes, own_bytes: int) -> None:
        trial.answer += chunk
        if chunk:
            return
        self._selector.unregister(trial.pipe)
        os.close(trial.pipe)
        fields = _ended(trial, self._limits)
        fields["num_bytes"] = max(fields.get("num_bytes", 0) - own_bytes, _LEAST_BYTES)
        self._tell(trial.number, fields)

    def _tell(self, number: int, fields: dict[str, Any]) -> None:
        self._answers.write(json.dumps({"number": number, "fields": fields}).encode() + b"\n")


def _ended(trial: _Trial, limits: GrammarLimits) -> dict[str, Any]:
    """Returns the fields of a child's result, or those of one by its exit code."""
    status = os.waitstatus_to_exitcode(os.waitpid(trial.child, 0)[1])
    if status == 0:
        fields: dict[str, Any] = json.loads(trial.answer)
        return fields
    if status == -signal.SIGALRM:
        return {"problem": _too_long(limits), "valid_s": _SLOW_FOR_S}
    if status == -signal.SIGKILL:  # by the OOM killer: a matter of the machine
        return {"problem": "could not be tried out: no memory was left", "valid_s": 0.0}
    if status in (-signal.SIGSEGV, -signal.SIGBUS):
        return {"problem": "is nested too deeply"}
    return {"problem": _too_big(limits)}


def _run_trial(
    grammar: Grammar, tokenizer: LLTokenizer, marks: list[int], limits: GrammarLimits, pipe: int
) -> None:
    """Runs the trial in the child, under limits that the kernel enforces, and exits."""
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.setitimer(signal.ITIMER_REAL, limits.time_s)
    held_bytes = resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[0])
    most_bytes = held_bytes + limits.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    results: list[TrialResult] = []
    threading.stack_size(_STACK_BYTES)

    def run() -> None:
        try:
            results.append(_trial_result(grammar, tokenizer, marks, limits))
        except MemoryError:
            results.append(TrialResult(problem=_too_big(limits)))
        except BaseException as error:  # a panic of llguidance is not an `Exception`
            results.append(TrialResult(problem=reason_of(str(error))))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    with os.fdopen(pipe, "wb") as answers:
        answers.write(json.dumps(asdict(results[0]) | {"num_bytes": grown}).encode())
    os._exit(0)


def _trial_result(
    grammar: Grammar, tokenizer: LLTokenizer, marks: list[int], limits: GrammarLimits
) -> TrialResult:
    native = _to_native(grammar)
    matcher = LLMatcher(tokenizer, native, log_level=0, limits=limits.native())
    first = matcher.compute_bitmask()
    if matcher.is_error():
        try:
            followed = _without_faults(grammar)
        except ToolSchemaError as error:
            return TrialResult(problem=reason_of(str(error)), field=error.field)
        if followed != grammar:
            return _trial_result(followed, tokenizer, marks, limits)
        return TrialResult(problem=reason_of(matcher.get_error()))
    if warnings := matcher.get_grammar_warnings():
        return TrialResult(problem=reason_of(warnings[0]))
    end_bits = sum(1 << mark for mark in marks)
    if not int.from_bytes(first, "little") & ~end_bits and matcher.is_accepting():
        return TrialResult(problem="matches nothing but the empty text")
    draws = random.Random(0)  # noqa: S311 - the same walks each time
    for _ in range(_WALKS):
        result = _walk(matcher.deep_copy(), end_bits, draws, limits)
        if result is not None:
            return result
    return TrialResult(native)


def _without_faults(grammar: Grammar) -> Grammar:
    """Returns the grammar without what cannot be followed in its schemas of tools, and need not be.
    Raises `ToolSchemaError`."""
    if grammar.kind is not GrammarKind.EBNF:
        return grammar
    return Grammar(grammar.kind, without_faults(grammar.text))


def _walk(
    matcher: LLMatcher, end_bits: int, draws: random.Random, limits: GrammarLimits
) -> TrialResult | None:
    """Generates a random text by the grammar. Returns the result for a problem, else None."""
    matcher.compute_bitmask()
    began_s = time.thread_time()
    for _ in range(_WALK_TOKENS):
        token_began_s = time.thread_time()
        bits = int.from_bytes(matcher.compute_bitmask(), "little") & ~end_bits
        if not bits and not matcher.is_error():
            if matcher.is_accepting():
                return None
            return TrialResult(problem="asks for an end-of-sequence token; leave those out")
        if bits:
            above = bits >> (start := draws.randrange(bits.bit_length()))
            matcher.try_consume_tokens([start + (above & -above).bit_length() - 1])
        if matcher.is_error():
            return TrialResult(problem=reason_of(matcher.get_error()))
        if time.thread_time() - token_began_s > limits.token_s:
            return _too_slow(time.thread_time() - token_began_s)
    mean_s = (time.thread_time() - began_s) / _WALK_TOKENS
    return _too_slow(mean_s) if mean_s > limits.mean_token_s else None


def _too_slow(token_s: float) -> TrialResult:
    problem = f"takes {1000 * token_s:.0f} ms of computing for a token"
    return TrialResult(problem=problem, valid_s=_SLOW_FOR_S)


def _to_native(grammar: Grammar) -> str:
    """Converts to llguidance's format. Raises `ValueError` with the reason if it cannot."""
    try:
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                schema = json.loads(grammar.text, parse_constant=_refuse_constant)
                root = {"name": "root", "json_schema": without_unknown_formats(schema)}
                return json.dumps({"grammars": [_lark("start: @root"), root]})
            case GrammarKind.REGEX:
                _check_regex(grammar.text)
                lark = f"start: /{regex_to_lark(grammar.text, use_ascii='')}/"
                return json.dumps({"grammars": [_lark(lark)]})
            case GrammarKind.EBNF:
                is_gbnf = _GBNF_RULE.search(grammar.text)
                lark = gbnf_to_lark(grammar.text) if is_gbnf else grammar.text
                return json.dumps({"grammars": [_lark(lark)]})
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}") from error


def _check_regex(text: str) -> None:
    """Raises `ValueError` for syntax that llguidance would silently misread."""
    if (len(text) - len(text.rstrip("\\"))) % 2:
        raise ValueError("ends in a backslash")
    if "#" in text and _VERBOSE_FLAG.search(text):
        raise ValueError("has comments, which are not supported")


def _lark(text: str) -> dict[str, str]:
    return {"lark_grammar": text + _OPTIONS}


def _refuse_constant(name: str) -> None:
    raise ValueError(f"is not JSON: {name}")


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
