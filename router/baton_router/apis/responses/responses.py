"""OpenAI's Responses API: answers conversations of items by the pipeline of chat completions, and
keeps responses for a while."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from baton.errors import NotFoundError
from baton.serving.tenant import Caller, Tenants
from baton_router.apis.answers.answer_writer import Json, encoded
from baton_router.apis.answers.http_call import HttpCall
from baton_router.apis.edge.errors import PreviousResponseError
from baton_router.apis.openai.generations import Generations
from baton_router.apis.openai.schemas import ChatOptions
from baton_router.apis.responses.conversion import (
    REFERENCE,
    conversation_of,
    items_of,
    options_of,
)
from baton_router.apis.responses.functions import Functions
from baton_router.apis.responses.input_items import ItemList, listed
from baton_router.apis.responses.schemas import LOGPROBS, ResponsesRequest
from baton_router.apis.responses.store import ResponseStore, input_item_id, response_of_item
from baton_router.apis.responses.writer import ResponseWriter
from baton_router.call.generate_call import Conversation
from baton_router.text.conversation.in_thread import in_thread_if_long


class _Stored(msgspec.Struct, frozen=True):
    """Stored response. `items` are its conversation and its output."""

    items: list[Json]
    response: msgspec.Raw


class Responses:
    """Responses of all tenants."""

    def __init__(self, generations: Generations, store: ResponseStore, tenants: Tenants) -> None:
        self._generations = generations
        self._store = store
        self._tenants = tenants

    async def create(self, body: ResponsesRequest, caller: Caller) -> HttpCall:
        """Makes the exchange of `POST /v1/responses`. Raises `InvalidArgumentError`, and for stored
        responses that the request names `NotFoundError` or `UnavailableError`."""
        functions = Functions(body.tools)
        options = options_of(body, functions)
        conversation, items = await self._conversation(body, caller, options, functions)
        save = None
        if body.store and self._store.is_on:
            save = partial(self._save, self._tenants.of(caller).name, items)
        writer_of = partial(ResponseWriter, body, functions, save)
        ignored = ["include"] if {*body.include} - {LOGPROBS} else []
        return await self._generations.answer(
            options, conversation, caller, writer_of, ignored=ignored
        )

    async def count_tokens(self, body: ResponsesRequest, caller: Caller) -> int:
        """Returns the number of tokens of the prompt. Raises what `create` raises."""
        functions = Functions(body.tools)
        options = options_of(body, functions)
        conversation, _ = await self._conversation(body, caller, options, functions)
        return len(await self._generations.tokens_of_chat(body.model, conversation, caller))

    async def input_items(
        self, response_id: str, query: Mapping[str, str], caller: Caller
    ) -> ItemList:
        """Returns items of a stored response's conversation, without those of its output. Raises
        `InvalidArgumentError`, `NotFoundError`, `UnavailableError`."""
        stored = await self._read(response_id, caller)
        output = msgspec.json.decode(stored.response)["output"]
        return listed(stored.items[: len(stored.items) - len(output)], query)

    async def _conversation(
        self, body: ResponsesRequest, caller: Caller, options: ChatOptions, functions: Functions
    ) -> tuple[Conversation, list[Json]]:
        """Returns the conversation, and its items."""
        given = items_of(body)
        earlier = await self._items_before(body, caller)
        if any(map(_is_reference, given)):
            given = await self._with_referenced(given, earlier, caller)
        num_items = len(earlier) + len(given)
        conversation = await in_thread_if_long(
            num_items, conversation_of, options, body, functions, earlier, given
        )
        return conversation, [*earlier, *(item for item in given if item is not None)]

    async def get(self, response_id: str, caller: Caller) -> bytes:
        """Returns a stored response, as JSON. Raises `NotFoundError`, `UnavailableError`."""
        return bytes((await self._read(response_id, caller)).response)

    async def delete(self, response_id: str, caller: Caller) -> Json:
        """Deletes a stored response. Raises `NotFoundError`, `UnavailableError`."""
        await self._store.delete(self._tenants.of(caller).name, response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    async def _items_before(self, body: ResponsesRequest, caller: Caller) -> list[Json]:
        if body.previous_response_id is None:
            return []
        try:
            return (await self._read(body.previous_response_id, caller)).items
        except NotFoundError as error:
            raise PreviousResponseError(str(error)) from error

    async def _with_referenced(
        self, given: Sequence[Any], earlier: Sequence[Json], caller: Caller
    ) -> list[Any]:
        """Returns the items with those of stored responses in the places of their references, and
        None in that of an item that the conversation has already."""
        wanted: dict[str, dict[str, int]] = {}  # by response: ids, each with its first index
        known = {_id_of(item) for item in [*earlier, *given] if not _is_reference(item)} - {""}
        for at, item in enumerate(given):
            if _is_reference(item) and (item_id := _id_of(item)) not in known:
                response_id = response_of_item(item_id)
                if response_id is None:
                    raise _unknown_item(at, item_id, "it is no id of an item")
                wanted.setdefault(response_id, {}).setdefault(item_id, at)
        found: dict[str, Json] = {}
        for response_id, places in wanted.items():
            try:
                items = (await self._read(response_id, caller)).items
            except NotFoundError as error:
                item_id, at = next(iter(places.items()))
                raise _unknown_item(at, item_id, str(error)) from error
            of_id = {_id_of(item): item for item in items}
            for item_id, at in places.items():
                if item_id not in of_id:
                    raise _unknown_item(at, item_id, "its response has no such item")
                found[item_id] = of_id[item_id]
        return [found.pop(_id_of(i), None) if _is_reference(i) else i for i in given]

    async def _read(self, response_id: str, caller: Caller) -> _Stored:
        content = await self._store.get(self._tenants.of(caller).name, response_id)
        return msgspec.json.decode(content, type=_Stored)

    async def _save(self, tenant: str, items: list[Json], response: Json) -> bool:
        output = response["output"]
        # So that each item of the input can be listed and referred to.
        own = [
            item if _id_of(item) else {**item, "id": input_item_id(item, response["id"], index)}
            for index, item in enumerate(items, len(output))
        ]
        kept: dict[str, Any] = {"items": [*own, *output], "response": response}
        return await self._store.put(tenant, response["id"], encoded(kept))


def _is_reference(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") == REFERENCE


def _id_of(item: Any) -> str:
    """Returns the id of an item, or "" if it has none."""
    found = item.get("id") if isinstance(item, dict) else None
    return found if isinstance(found, str) else ""


def _unknown_item(at: int, item_id: str, reason: str) -> NotFoundError:
    return NotFoundError(
        f"input[{at}].id: item {item_id[:64]!r} is unknown: {reason}. Send the item itself."
    )
