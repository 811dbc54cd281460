"""Sampling options of the command line, and the parameters they become."""

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from baton.cli import generate as room
from baton.cli.commands.requests import chat
from baton.cli.main import app
from baton.cli.options.sampling import SamplingOptions, takes_sampling, with_options_named
from baton.client.client import Generation
from baton.errors import InvalidArgumentError
from baton.sampling import EarlyStopping, Grammar, GrammarKind, SamplingParams
from baton.v1 import inference_pb2 as pb

SCHEMA = '{"type": "object"}'


def said(*arguments: str) -> SamplingOptions:
    """Returns the options that a command gets for these arguments."""
    given: list[SamplingOptions] = []
    command = typer.Typer()

    @command.command()
    @takes_sampling()
    def run(*, sampling: SamplingOptions) -> None:
        given.append(sampling)

    result = CliRunner().invoke(command, list(arguments))
    assert result.exit_code == 0, result.output
    return given[0]


def test_chat_has_no_bound_of_its_own():
    assert inspect.signature(chat.callback).parameters["max_tokens"].default is None
    assert SamplingOptions(max_tokens=None).params().max_tokens > 2**30


def test_options_default_to_greedy_sampling():
    assert said().params() == SamplingParams(max_tokens=128)


OPTIONS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "--max-tokens": (["9"], {"max_tokens": 9}),
    "--min-tokens": (["3"], {"min_tokens": 3}),
    "--stop": (["a", "--stop", "b"], {"stop": ("a", "b")}),
    "--stop-token-id": (["4", "--stop-token-id", "5"], {"stop_token_ids": (4, 5)}),
    "--ignore-eos": ([], {"ignore_eos": True}),
    "--temperature": (["0.5"], {"temperature": 0.5}),
    "--top-k": (["5"], {"top_k": 5}),
    "--top-p": (["0.5"], {"top_p": 0.5}),
    "--min-p": (["0.25"], {"min_p": 0.25}),
    "--seed": (["7"], {"seed": 7}),
    "--n": (["2", "--temperature", "1"], {"n": 2, "temperature": 1.0}),
    "--best-of": (["4", "--temperature", "1"], {"best_of": 4, "temperature": 1.0}),
    "--beam-width": (["3"], {"beam_width": 3}),
    "--length-penalty": (["-1.5"], {"length_penalty": -1.5}),
    "--early-stopping": (["never"], {"early_stopping": EarlyStopping.NEVER}),
    "--repetition-penalty": (["1.2"], {"repetition_penalty": 1.2}),
    "--presence-penalty": (["-0.5"], {"presence_penalty": -0.5}),
    "--frequency-penalty": (["0.5"], {"frequency_penalty": 0.5}),
    "--logit-bias": (["5=-2.5", "--logit-bias", "6=1"], {"logit_bias": ((5, -2.5), (6, 1.0))}),
    "--bad-word": (["x", "--bad-word", "y z"], {"bad_words": ("x", "y z")}),
    "--bad-token-ids": (["5,7", "--bad-token-ids", "6"], {"bad_token_ids": ((5, 7), (6,))}),
    "--logprobs": (["3"], {"logprobs": True, "top_logprobs": 3}),
    "--prompt-logprobs": (["0"], {"prompt_logprobs": 0}),
    "--json-schema": ([SCHEMA], {"grammar": Grammar(GrammarKind.JSON_SCHEMA, SCHEMA)}),
    "--regex": (["a+"], {"grammar": Grammar(GrammarKind.REGEX, "a+")}),
    "--speculate": ([], {"speculate": True}),
    "--no-speculate": ([], {"speculate": False}),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options_set_each_its_parameter(option):
    values, fields = OPTIONS[option]
    assert said(option, *values).params() == SamplingParams(**{"max_tokens": 128, **fields})


def test_options_cover_every_sampling_parameter():
    set_by_some = {name for _, fields in OPTIONS.values() for name in fields}
    assert set_by_some == {field.name for field in dataclasses.fields(SamplingParams)}


def test_options_enable_logprobs_with_zero_top_logprobs():
    params = said("--logprobs", "0").params()
    assert (params.logprobs, params.top_logprobs) == (True, 0)


def test_options_keep_priority_out_of_sampling_params():
    assert said("--priority", "-3").priority == -3


def test_options_read_schema_and_grammar_from_files(tmp_path):
    schema, grammar = tmp_path / "schema.json", tmp_path / "list.gbnf"
    schema.write_text(SCHEMA)
    grammar.write_text('root ::= "a"+')
    assert said("--json-schema", str(schema)).params().grammar == Grammar(
        GrammarKind.JSON_SCHEMA, SCHEMA
    )
    assert said("--grammar", str(grammar)).params().grammar == Grammar(
        GrammarKind.EBNF, 'root ::= "a"+'
    )


def refused(tmp_path: Path) -> dict[str, tuple[list[str], str]]:
    broken, binary = tmp_path / "broken.json", tmp_path / "binary"
    broken.write_text("{")
    binary.write_bytes(b"\xff")
    return {
        "no number": (["--logit-bias", "5"], "--logit-bias: is '5'; must be ID=BIAS"),
        "no id": (["--logit-bias", "a=1"], "--logit-bias: is 'a=1'; must be ID=BIAS"),
        "a bias": (["--logit-bias", "5=200"], "--logit-bias[0]: is 200.0; must be in [-100, 100]"),
        "no file": (["--json-schema", "no.json"], "--json-schema: 'no.json' is a file that cannot"),
        "no grammar": (["--grammar", "no.gbnf"], "--grammar: 'no.gbnf' is a file that cannot"),
        "binary": (["--grammar", str(binary)], "is a file that is not UTF-8"),
        "no JSON": (["--json-schema", "{"], "--json-schema: '{' is no JSON: "),
        "no JSON in it": (["--json-schema", str(broken)], f"'{broken}' is no JSON: "),
        "two grammars": (
            ["--regex", "a", "--json-schema", "{}"],
            "--regex: cannot be given together with --json-schema",
        ),
        "an empty one": (["--regex", ""], "--regex: is 0 bytes; must be 1 to 65536 bytes"),
        "no tokens": (["--bad-token-ids", "a"], "--bad-token-ids: is 'a'; must be ID or ID,ID,"),
        "a word": (["--bad-word", ""], "--bad-word[0]: is 0 bytes; must be 1 to 256 bytes"),
        "several": (
            ["--n", "2", "--temperature", "0"],
            "--n: is 2; must be 1 where --temperature is 0: the sequences would be the same",
        ),
        "beams": (
            ["--beam-width", "2", "--temperature", "1"],
            "--beam-width: is 2; must be 0 (off) where --temperature is set",
        ),
        "a grammar's beams": (
            ["--beam-width", "2", "--regex", "a"],
            "--beam-width: is 2; must be 0 (off) where grammar is set",
        ),
        "logprobs": (["--logprobs", "21"], "--logprobs: is 21; must be in [0, 20]"),
        "not printed": (["--logprobs", "1"], "--logprobs: is printed only with --json; add it"),
        "nor this": (["--prompt-logprobs", "1"], "--prompt-logprobs: is printed only with --json"),
    }


def test_generate_names_the_option_that_is_invalid(tmp_path):
    for arguments, sentence in refused(tmp_path).values():
        result = CliRunner().invoke(app, ["generate", "x", *arguments])
        assert result.exit_code == 1, arguments
        assert result.stderr.startswith("baton: ")
        assert sentence in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_errors_without_a_field_keep_their_text():
    assert with_options_named("the sampling. of router") == "the sampling. of router"


def test_help_groups_options_and_lists_each_once(wide):
    output = CliRunner().invoke(app, ["generate", "--help"]).output
    headings = [line for line in output.splitlines() if line.endswith(":") and line[0] != " "]
    assert headings[:2] == ["Arguments:", "Options:"]
    assert len(headings) == 9
    for field in dataclasses.fields(SamplingOptions):
        option = f"  --{field.name.replace('_', '-')} "
        assert output.count(f"\n{option}") == 1, option


def test_chat_help_omits_options_that_chat_cannot_show(wide):
    output = CliRunner().invoke(app, ["chat", "--help"]).output
    assert "--best-of" in output
    for option in ("--n ", "--logprobs", "--prompt-logprobs"):
        assert option not in output


class FakeCall:
    """A stream of events."""

    def __init__(self, *events: pb.GenerateResponse) -> None:
        self._events = iter(events)
        self.is_cancelled = False

    def __next__(self) -> pb.GenerateResponse:
        return next(self._events)

    def cancel(self) -> None:
        self.is_cancelled = True


def event(**parts: Any) -> pb.GenerateResponse:
    return pb.GenerateResponse(**parts)


def chunk(index: int, text: str, **fields: Any) -> pb.GenerateResponse:
    return event(tokens=pb.TokenChunk(sequence_index=index, text=text, token_ids=[7], **fields))


def finished(index: int, **fields: Any) -> pb.GenerateResponse:
    reason = pb.FINISH_REASON_LENGTH
    return event(finished=pb.Finished(sequence_index=index, reason=reason, **fields))


ACCEPTED = event(accepted=pb.Accepted(request_id="r"))


def test_show_prints_several_completions_one_after_another(capsys):
    call = FakeCall(ACCEPTED, chunk(1, "b\n"), finished(1), chunk(0, "a"), finished(0))
    params = SamplingParams(n=2, temperature=1.0)
    assert room.show(Generation(call, 2), params).sequence_index == 0
    assert capsys.readouterr().out == "[1]\na\n[2]\nb\n"


def test_show_prints_beams_with_their_scores(capsys):
    call = FakeCall(
        ACCEPTED, chunk(0, "a"), finished(0, score=-0.5), chunk(1, "b"), finished(1, score=-1)
    )
    room.show(Generation(call, 2), SamplingParams(n=2, beam_width=2))
    assert capsys.readouterr().out == "[1, score -0.5000]\na\n[2, score -1.0000]\nb\n"


def test_show_cancels_the_call_when_interrupted():
    class Interrupted(FakeCall):
        def __next__(self) -> pb.GenerateResponse:
            raise KeyboardInterrupt

    call = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        room.show(Generation(call), SamplingParams())
    assert call.is_cancelled


def test_as_json_returns_scores_of_one_completion():
    top = pb.TopLogprobs(token_ids=[7, 8], logprobs=[-0.5, -1])
    call = FakeCall(
        ACCEPTED,
        event(prompt_logprobs=pb.PromptLogprobs(position=1, logprobs=[-2])),
        chunk(0, "a", logprobs=[-0.5], top_logprobs=[top]),
        finished(0),
    )
    params = SamplingParams(logprobs=True, top_logprobs=2, prompt_logprobs=0)
    answer = json.loads(room.as_json(Generation(call), params))
    assert answer["prompt_logprobs"] == [{"logprob": -2, "top": []}]
    (completion,) = answer["completions"]
    assert (completion["text"], completion["token_ids"]) == ("a", [7])
    assert completion["finish_reason"] == "length"
    assert completion["logprobs"] == [
        {
            "logprob": -0.5,
            "top": [{"token_id": 7, "logprob": -0.5}, {"token_id": 8, "logprob": -1}],
        }
    ]


def test_as_json_returns_a_list_for_several_completions():
    call = FakeCall(ACCEPTED, chunk(1, "b"), finished(1), chunk(0, "a"), finished(0, score=-0.5))
    params = SamplingParams(n=2, temperature=1.0, logprobs=True)
    answer = json.loads(room.as_json(Generation(call, 2), params))
    assert [completion["text"] for completion in answer["completions"]] == ["a", "b"]
    assert answer["completions"][0]["score"] == -0.5
    assert "text" not in answer


def test_options_name_the_option_that_cannot_be_parsed():
    with pytest.raises(InvalidArgumentError) as caught:
        SamplingOptions(logit_bias=["x"]).params()
    assert caught.value.field == "--logit-bias"
