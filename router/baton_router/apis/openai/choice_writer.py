"""Writer of OpenAI's completions and chat completions: answers that are lists of choices."""

import time
from collections.abc import Iterator, Sequence

from baton_router.apis.answers.answer_writer import COMMENT, DONE, AnswerStart, Json, event
from baton_router.apis.answers.sequence_reader import Reader, SequenceDelta
from baton_router.apis.edge.errors import Failure
from baton_router.apis.openai.choice_formats import Shape
from baton_router.apis.openai.schemas import GenerationRequest


class ChoiceWriter:
    """Writer of one answer, an `AnswerWriter`."""

    keep_alive = COMMENT

    def __init__(self, body: GenerationRequest, shape: Shape, start: AnswerStart) -> None:
        self._body = body
        self._request_id = start.request_id
        self._model = start.model
        self._readers = start.readers
        self._extra = start.make_extra
        self._shape = shape
        self._created = int(time.time())
        options = body.stream_options
        self.opens_with_usage = (
            options is not None
            and options.continuous_usage_stats
            and options.include_usage is not False
        )
        self._has_ids = body.return_token_ids
        self._have_begun: set[int] = set()

    def opening(self) -> bytes:
        indices = (index for reader in self._readers for index in reader.indices)
        choices = (self._shape.opening(index) for index in indices)
        chunks = [self._chunk([choice]) for choice in choices if choice is not None]
        if self._has_ids and chunks:
            chunks[0]["prompt_token_ids"] = self._readers[0].prompt_token_ids
        return b"".join(map(event, chunks))

    def part(self, update: SequenceDelta) -> bytes:
        choice = self._shape.part(update)
        if self._has_ids:
            choice = self._with_ids(choice, update)
        return b"" if choice is None else event(self._chunk([choice]))

    async def closing(self) -> bytes:
        return b"".join(map(event, self._closings())) + DONE

    def failed(self, failure: Failure) -> bytes:
        return event(failure.body)

    async def whole(self, updates: Sequence[SequenceDelta]) -> Json:
        by_index: dict[int, list[SequenceDelta]] = {
            index: [] for reader in self._readers for index in reader.indices
        }
        for update in updates:
            by_index[update.index].append(update)
        choices = [self._shape.whole(index, found) for index, found in by_index.items()]
        if self._has_ids:
            for choice, found in zip(choices, by_index.values(), strict=True):
                choice["token_ids"] = [i for update in found for i in update.token_ids]
        answer = {**self._frame(self._shape.whole_name, choices), "usage": self._usage()}
        if self._shape.has_prompts:
            for reader in self._readers:
                about = self._about_prompt(reader)
                for choice in choices:
                    if choice["index"] in reader.indices:
                        choice |= about
        else:
            answer |= self._about_prompt(self._readers[0])
        if self._extra is not None:
            answer["baton"] = self._extra(self._readers)
        return answer

    def _about_prompt(self, reader: Reader) -> Json:
        """Returns what the client asked to be told of a prompt."""
        about: Json = {}
        if self._has_ids:
            about["prompt_token_ids"] = reader.prompt_token_ids
        if self._body.prompt_logprobs is not None:
            about["prompt_logprobs"] = self._shape.prompt_logprobs(reader.prompt_scores)
        return about

    def _with_ids(self, choice: Json | None, update: SequenceDelta) -> Json | None:
        """Returns a piece with the ids of its tokens, also of those without text; the first one of
        a choice with its prompt's, where they are not in the opening."""
        if choice is None and not update.token_ids:
            return None
        choice = self._shape.empty(update.index) if choice is None else choice
        choice["token_ids"] = update.token_ids
        if self._shape.has_prompts and update.index not in self._have_begun:
            self._have_begun.add(update.index)
            reader = next(r for r in self._readers if update.index in r.indices)
            choice["prompt_token_ids"] = reader.prompt_token_ids
        return choice

    def _frame(self, name: str, choices: list[Json]) -> Json:
        return {
            "id": self._shape.id_prefix + self._request_id,
            "object": name,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _chunk(self, choices: list[Json]) -> Json:
        frame = self._frame(self._shape.chunk_name, choices)
        options = self._body.stream_options
        if self.opens_with_usage and choices:
            frame["usage"] = self._usage()
        elif options is not None and options.include_usage:
            frame["usage"] = None
        return frame

    def _closings(self) -> Iterator[Json]:
        options = self._body.stream_options
        if self._extra is not None:
            yield {**self._chunk([]), "baton": self._extra(self._readers)}
        if options is not None and options.include_usage:
            yield {**self._chunk([]), "usage": self._usage()}

    def _usage(self) -> Json:
        """Returns the usage of all prompts so far."""
        num_prompt = sum(reader.num_prompt_tokens for reader in self._readers)
        num_output = sum(reader.num_output_tokens for reader in self._readers)
        num_reasoning = sum(reader.num_reasoning_tokens for reader in self._readers)
        details = {"completion_tokens_details": {"reasoning_tokens": num_reasoning}}
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {
                "cached_tokens": sum(reader.num_cached_prompt_tokens for reader in self._readers)
            },
            **(details if num_reasoning else {}),
        }
