"""Parts of items of the Responses API."""

from msgspec import Struct, field


class ItemSchema(Struct, frozen=True, kw_only=True, tag_field="type"):
    """Item of a conversation, or a part of one. Clients send back items of earlier answers, whose
    further fields, such as their ids, change nothing."""


class InputText(ItemSchema, frozen=True, tag="input_text"):
    text: str


class InputImage(ItemSchema, frozen=True, tag="input_image"):
    """Image. `detail` changes nothing: the model's processor decides about sizes."""

    image_url: str
    detail: str | None = None


class OutputText(ItemSchema, frozen=True, tag="output_text"):
    text: str


class Refusal(ItemSchema, frozen=True, tag="refusal"):
    text: str = field(name="refusal")


class ReasoningText(ItemSchema, frozen=True, tag="reasoning_text"):
    text: str
