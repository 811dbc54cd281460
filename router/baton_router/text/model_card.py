"""Model card: configuration, tokenizer and chat template of a served model.

Reads only JSON files and the template of the checkpoint; loads neither torch nor weights.
"""

import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from baton.errors import FailedPreconditionError, InvalidArgumentError, UnsupportedModelError
from baton.models import DESCRIPTION, base_name, checkpoint_folder, read_json
from baton.models.generation_config import read_generation_config, sampling_defaults
from baton.models.length import longest
from baton.models.pooling import PooledKind, Pooling, read_pooling, why_not
from baton.models.tokenizer_files import (
    DEFAULT_TEMPLATE,
    TOOL_TEMPLATE,
    read_tokenizer_files,
)
from baton.sampling import NO_DEFAULTS, SamplingDefaults
from baton_router.call.output_format import OutputFormat
from baton_router.text.output_parsing.formats import catalog as formats
from baton_router.text.template.chat_template import ChatTemplate

# Content that a template of a vision model tells from a list of parts.
_TAKES_TEXT = re.compile(r"\bis\s+(not\s+)?string\b")
_IMAGE_TOKENS = (
    "image_token_id",
    "image_token_index",
    "boi_token_index",
    "eoi_token_index",
    "vision_start_token_id",
    "vision_end_token_id",
)

# Of a sequence whose configuration tells no maximum.
_MAX_POSITIONS = 2**20

# Shorter texts are tokenized faster than a thread is dispatched.
THREAD_FROM_CHARS = 4096
AUTO = "auto"
"""Name for the format that the chat template and the model type tell."""


class ModelOutputError(FailedPreconditionError):
    """Output that a model does not make: text, embeddings or scores."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Model card of a served model.

    Attributes:
        max_model_len: maximum tokens of one sequence by the checkpoint; workers may allow less.
        tokenizer_hash: must equal the hash of each worker.
        chat_template: None if the model has none.
        tool_template: template of conversations with tools; None: the same.
        sampling_defaults: of requests that name no value.
        special_tokens: by the names that chat templates use, such as "bos_token".
        tool_format: name of the format of tool calls; None: unknown.
        reasoning_format: name of the format of reasoning; None: none.
        pooling: its pooled output; None: it generates.
        image_token_ids: tokens that stand for images in prompts; empty: it takes no images.
    """

    name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    tokenizer: Tokenizer
    tokenizer_hash: bytes
    chat_template: str | None
    special_tokens: dict[str, str]
    tool_format: str | None = None
    reasoning_format: str | None = None
    pooling: Pooling | None = None
    image_token_ids: frozenset[int] = frozenset()
    tool_template: str | None = None
    sampling_defaults: SamplingDefaults = NO_DEFAULTS

    def check_makes(self, output: PooledKind | None) -> None:
        """Raises `ModelOutputError` unless the model makes this output. None: text."""
        if reason := why_not(self.name, self.pooling, output):
            raise ModelOutputError(reason)

    @property
    def output_format(self) -> OutputFormat:
        """Format of its outputs."""
        return _output_format(self.tool_format, self.reasoning_format, self.tokenizer)

    @property
    def template_takes_tools(self) -> bool:
        """True if the chat template describes tools to the model."""
        return _takes_tools(self.tool_template or self.chat_template)

    @property
    def takes_images(self) -> bool:
        """True if the model is one of vision and language."""
        return bool(self.image_token_ids)

    @property
    def template_needs_parts(self) -> bool:
        """True if the chat template reads content as a list of parts, even of text alone."""
        template = self.chat_template or ""
        return self.takes_images and not _TAKES_TEXT.search(template)

    def template(self, *, tools: bool) -> ChatTemplate | None:
        """Returns the chat template of conversations with `tools`, or without; None if the model
        has none."""
        source = (self.tool_template if tools else None) or self.chat_template
        if source is None:
            return None
        tokens = tuple(self.special_tokens.items())
        return _template(source, tokens, self.template_needs_parts)

    @property
    def templates(self) -> list[ChatTemplate]:
        """All its chat templates."""
        found = (self.template(tools=False), self.template(tools=True))
        return [template for template in dict.fromkeys(found) if template is not None]

    @property
    def template_tokens(self) -> list[str]:
        """Added tokens that its chat template writes, as strings, but for those of images."""
        source = "".join(template.source for template in self.templates)
        named = frozenset(self.special_tokens.values())
        return [
            token.content
            for token_id, token in self.tokenizer.get_added_tokens_decoder().items()
            if token_id not in self.image_token_ids
            and (token.content in source or token.content in named)
        ]

    @property
    def control_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer, that stand for images, and those that chat templates have
        names for."""
        named = map(self.tokenizer.token_to_id, self.special_tokens.values())
        named_ids = {token_id for token_id in named if token_id is not None}
        return self.eos_token_ids | self.image_token_ids | named_ids

    def encode(self, text: str) -> list[int]:
        """Returns the text's tokens, with the special tokens the tokenizer adds by default."""
        return self._encode(text, add_special_tokens=True)

    def encode_all(self, texts: Sequence[str | tuple[str, str]]) -> list[list[int]]:
        """Returns the tokens of each text, or of each pair of texts as one prompt, as `encode`."""
        found = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=True)
        return [encoding.ids for encoding in found]

    def encode_rendered(self, text: str) -> list[int]:
        """Returns the tokens of a rendered conversation, which includes its special tokens."""
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # As `encode`, without the tokens' offsets in the text, which take a quarter of the time and
        # are not needed.
        (encoding,) = self.tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        ids: list[int] = encoding.ids
        return ids

    def warm_up(self) -> None:
        """Loads the template renderer and learns what the template takes, which would delay the
        first conversation by 0.5 s."""
        for template in self.templates:
            template.abilities  # noqa: B018 - kept by the template

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        *,
        adds_generation_prompt: bool = True,
    ) -> str:
        """Returns the conversation as text.

        Args:
            messages: fields that the template reads of each, `role` and `content` at least.
            tools: JSON schemas that the template describes to the model.
            variables: further template variables, such as `enable_thinking`.
            adds_generation_prompt: at its end, for the model's answer.

        Raises `InvalidArgumentError` if the template refuses it or the model has none.
        """
        template = self.template(tools=bool(tools))
        if template is None:
            raise InvalidArgumentError(
                "input.chat",
                f"model {self.name!r} has no chat template; give its router one by --chat-template",
            )
        return template.render(
            messages, tools, variables, adds_generation_prompt=adds_generation_prompt
        )


_output_format = functools.cache(formats.output_format)
_takes_tools = functools.cache(formats.takes_tools)
_template = functools.cache(ChatTemplate)


def read_model_card(
    path: str,
    name: str = "",
    tool_format: str | None = AUTO,
    reasoning_format: str | None = AUTO,
    chat_template: Path | None = None,
) -> ModelCard:
    """Reads the card from a folder, or from the hub for an id.

    Args:
        name: name under which the model is served; empty: the last part of the path.
        tool_format, reasoning_format: names of formats; None: none.
        chat_template: file of a template that takes the place of the checkpoint's.

    Raises `UnsupportedModelError` for the checkpoint, and `FailedPreconditionError` if the file
    cannot be read or is no template that renders a message of a user.
    """
    folder = checkpoint_folder(path, DESCRIPTION)
    config = read_json(folder / "config.json")
    text = config.get("text_config", config)
    generation = read_generation_config(folder)
    files = read_tokenizer_files(folder)
    tokenizer = files.tokenizer
    templates = files.templates
    if chat_template is not None:
        templates = {DEFAULT_TEMPLATE: _read_template(chat_template)}
    template, tool_template = map(templates.get, (DEFAULT_TEMPLATE, TOOL_TEMPLATE))
    model_type = str(config.get("model_type", ""))
    detected = formats.detect(tool_template or template, model_type, tokenizer)
    described = text if text is config else {**_unwritten(tokenizer), **text}
    card = ModelCard(
        name=name or base_name(path),
        architecture=(config.get("architectures") or [config.get("model_type", "unknown")])[0],
        vocab_size=int(_required(described, "vocab_size", path)),
        max_model_len=longest(
            int(_required(described, "max_position_embeddings", path)),
            text.get("rope_parameters") or text.get("rope_scaling"),
        ),
        eos_token_ids=_eos(generation, config, text) | files.end_token_ids,
        tokenizer=tokenizer,
        tokenizer_hash=hashlib.sha256((folder / "tokenizer.json").read_bytes()).digest()[:16],
        chat_template=template,
        special_tokens=files.special_tokens,
        tool_format=detected.tool_format if tool_format == AUTO else tool_format,
        reasoning_format=(
            detected.reasoning_format if reasoning_format == AUTO else reasoning_format
        ),
        pooling=read_pooling(folder),
        image_token_ids=_image_token_ids(config) if "vision_config" in config else frozenset(),
        tool_template=tool_template,
        sampling_defaults=sampling_defaults(folder),
    )
    if chat_template is not None:
        (given,) = card.templates
        why = given.why_no_message()
        if why is not None:
            raise FailedPreconditionError(
                f"the chat template in {str(chat_template)!r} {why}; expected a Jinja "
                "template that renders a message of a user"
            )
    return card


def _image_token_ids(config: Mapping[str, Any]) -> frozenset[int]:
    found = (config.get(name) for name in _IMAGE_TOKENS)
    return frozenset(token_id for token_id in found if isinstance(token_id, int))


def _unwritten(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns bounds for what a nested configuration leaves out where it is the default of its
    class, as Gemma 3's do. Workers have the class, and their own limits."""
    return {
        "vocab_size": tokenizer.get_vocab_size(with_added_tokens=True),
        "max_position_embeddings": _MAX_POSITIONS,
    }


def _required(config: dict[str, Any], key: str, path: str) -> Any:
    names = (key, "n_positions") if key == "max_position_embeddings" else (key,)
    for name in names:
        if config.get(name) is not None:
            return config[name]
    raise UnsupportedModelError(f"the configuration of {path!r} has no {key!r}")


def _eos(*configs: dict[str, Any]) -> frozenset[int]:
    """Returns the end-of-sequence tokens of the first one that has some."""
    found = (config["eos_token_id"] for config in configs if config.get("eos_token_id") is not None)
    ids: int | list[int] = next(found, [])
    return frozenset(ids if isinstance(ids, list) else [ids])


def _read_template(file: Path) -> str:
    """Returns the template in a file that a setting names."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise FailedPreconditionError(
            f"cannot read the chat template in {str(file)!r}: {error}"
        ) from error
