"""Train the shapes checkpoint: a small LLaVA that answers questions about drawings of shapes.

Drawings, questions and answers come from `baton.models.shapes.drawings`, so the script needs no
download. Everything it writes can be loaded with ``AutoProcessor`` and
``AutoModelForImageTextToText``.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
)
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from baton.models.shapes.drawings import (
    COLOURS,
    KINDS,
    MAX_SHAPES,
    SIDE,
    Drawing,
    Question,
    comparisons,
    held_out,
    messages,
    questions,
    random_drawing,
)
from bench.training.train_tiny import (
    END_OF_TEXT,
    PAD,
    TOKEN_BORDERS,
    TURN_END,
    TURN_START,
    learning_rate,
    token_id,
)

IMAGE = "<image>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, PAD, IMAGE)
VOCABULARY = 512  # at most
CONTEXT = 2048
PATCH = 8
GRID = SIDE // PATCH
TOKENS_PER_IMAGE = GRID**2
WIDTH = 128

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] in ('image', 'image_url') %}{{ '<image>' }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Other ways to ask the same, so that the model does not depend on one of them.
PARAPHRASES = {
    "How many ": (("?", " are there?"), ("?", " do you see?"), ("?", " are in the picture?")),
    "What colour ": (("What colour", "What color"),),
    "Is there ": (("?", " in the picture?"), ("Is there", "Do you see")),
    "Describe ": (
        ("Describe the picture", "Describe this picture"),
        ("Describe the picture", "Describe the image"),
        ("Describe the picture.", "What is in the picture?"),
        ("Describe the picture.", "What do you see?"),
    ),
    "Which ": (("picture", "image"), ("?", " in it?")),
}
TURNS = 6
NO_LABEL = -100
SMOOTHING = 0.02


@dataclass(frozen=True)
class Recipe:
    """Recipe of one training run; every field has a command-line option or a fixed value."""

    out: Path
    start: Path | None
    minutes: float
    steps: int | None
    seed: int
    threads: int
    bf16: bool
    learning_rate: float
    held_out: int
    rows: int = 32
    pairs_share: float = 0.25
    patches_until: float = 0.2
    patch_weight: float = 5.0
    count_weight: float = 0.2
    warm_up: float = 0.03
    weight_decay: float = 0.05


# Tokenizer and processor


def build_processor(rng: random.Random) -> LlavaProcessor:
    """Return a processor whose byte-level tokenizer has a token for each word of the chats."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(TOKEN_BORDERS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(_texts(rng), _bpe_trainer())
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=END_OF_TEXT,
        eos_token=TURN_END,
        pad_token=PAD,
        extra_special_tokens={"image_token": IMAGE},
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )
    return LlavaProcessor(
        image_processor=SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE}),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="full",
        num_additional_image_tokens=0,
        chat_template=CHAT_TEMPLATE,
    )


def _texts(rng: random.Random) -> Iterator[str]:
    """Yield what is asked and answered, and the rest of a chat."""
    for _ in range(4000):
        first, second = random_drawing(rng), random_drawing(rng)
        for question in questions(first) + comparisons(first, second):
            yield f"user\n{paraphrase(question.text, rng)}"
            yield f"assistant\n{question.answer}"
    yield "system\nYou are a helpful assistant."


def _bpe_trainer() -> BpeTrainer:
    """Return a trainer whose first ids are the special tokens, then the 256 bytes."""
    return BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )


def paraphrase(text: str, rng: random.Random) -> str:
    """Return a question as it is, or asked in another way."""
    ways = next(ways for start, ways in PARAPHRASES.items() if text.startswith(start))
    return text.replace(*rng.choice((("", ""), *ways)))


# Batches


@dataclass(frozen=True)
class Batch:
    """Rows of chats about drawings.

    Attributes:
        ids: [rows, length], padded on the right.
        labels: like `ids`, the answers alone.
        drawings: those of all rows, one after the other.
    """

    ids: Tensor
    mask: Tensor
    labels: Tensor
    drawings: Sequence[Drawing]


class Chats:
    """Source of random chats about random drawings."""

    def __init__(self, processor: LlavaProcessor, rng: random.Random) -> None:
        self._tokenizer, self._rng = processor.tokenizer, rng
        self._pad = token_id(self._tokenizer, PAD)
        self._encoded: dict[str, list[int]] = {}

    def batch(self, recipe: Recipe) -> Batch:
        """Return chats about one drawing each, or about two each."""
        is_pairs = self._rng.random() < recipe.pairs_share
        per_row, rows = (2, recipe.rows // 2) if is_pairs else (1, recipe.rows)
        drawings = self.drawings(per_row * rows)
        chats = [self._chat(drawings[i : i + per_row]) for i in range(0, len(drawings), per_row)]
        length = max(len(ids) for ids, _ in chats)
        ids = torch.full((rows, length), self._pad)
        labels = torch.full((rows, length), NO_LABEL)
        for row, (of_row, labels_of_row) in enumerate(chats):
            ids[row, : len(of_row)] = torch.tensor(of_row)
            labels[row, : len(of_row)] = torch.tensor(labels_of_row)
        return Batch(ids, (ids != self._pad).long(), labels, drawings)

    def drawings(self, number: int) -> list[Drawing]:
        """Return so many drawings."""
        return [random_drawing(self._rng) for _ in range(number)]

    def _chat(self, drawings: Sequence[Drawing]) -> tuple[list[int], list[int]]:
        """Return the ids of a chat of several turns, and its labels."""
        rng = self._rng
        asked = self._asked(drawings)
        images = IMAGE * len(drawings) * TOKENS_PER_IMAGE
        before, after = (images, "") if rng.random() < 0.7 else ("", images)
        opening = f"{TURN_START}system\nYou are a helpful assistant.{TURN_END}\n"
        ids = [*self._encode(opening)] if rng.random() < 0.1 else []
        labels = [NO_LABEL] * len(ids)
        for turn, question in enumerate(asked):
            text = paraphrase(question.text, rng)
            text = f"{before}{text}{after}" if turn == 0 else text
            prompt = f"{TURN_START}user\n{text}{TURN_END}\n{TURN_START}assistant\n"
            given, said = self._encode(prompt), self._encode(f"{question.answer}{TURN_END}")
            ids += given + said + self._encode("\n")
            labels += [NO_LABEL] * len(given) + said + [NO_LABEL]
        return ids, labels

    def _asked(self, drawings: Sequence[Drawing]) -> list[Question]:
        """Return the questions of a chat, of each kind about as many."""
        if len(drawings) == 2:
            return self._rng.sample(found := comparisons(*drawings), len(found))
        by_kind: dict[str, list[Question]] = {}
        for question in questions(*drawings):
            by_kind.setdefault(question.kind, []).append(question)
        for each in by_kind.values():
            self._rng.shuffle(each)
        by_kind["count"] = by_kind["count"][:3]
        by_kind["presence"] = by_kind["presence"][:1]
        found = [question for each in by_kind.values() for question in each]
        return self._rng.sample(found, min(TURNS, len(found)))

    def _encode(self, text: str) -> list[int]:
        if text not in self._encoded:
            ids: list[int] = self._tokenizer(text)["input_ids"]
            self._encoded[text] = ids
        return self._encoded[text]


def pixels_of(drawings: Sequence[Drawing]) -> Tensor:
    """Return the pixels as the processor scales them."""
    pixels = np.stack([np.asarray(drawing.image()) for drawing in drawings])
    return (torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5


def _patches(drawing: Drawing) -> Tensor:
    """Return the number of the shape whose centre is in each patch; 0 for none."""
    patches = torch.zeros(TOKENS_PER_IMAGE, dtype=torch.long)
    for shape in drawing.shapes:
        number = KINDS.index(shape.kind) * len(COLOURS) + list(COLOURS).index(shape.colour)
        patches[shape.y // PATCH * GRID + shape.x // PATCH] = 1 + number
    return patches


# Model


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlavaForConditionalGeneration:
    """Return an untrained LLaVA of less than a million parameters."""
    end, turn_end, pad = (token_id(tokenizer, name) for name in (END_OF_TEXT, TURN_END, PAD))
    tokens = {"bos_token_id": end, "eos_token_id": [end, turn_end], "pad_token_id": pad}
    vision = SiglipVisionConfig(
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
        vision_use_head=False,
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        **tokens,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=token_id(tokenizer, IMAGE),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
        **tokens,
    )
    model = LlavaForConditionalGeneration(config)
    model.generation_config = GenerationConfig(**tokens)
    return model


def _start(recipe: Recipe, processor: LlavaProcessor) -> LlavaForConditionalGeneration:
    """Return the model of the folder to start from, or an untrained one."""
    if recipe.start is None:
        return build_model(processor.tokenizer)
    return LlavaForConditionalGeneration.from_pretrained(recipe.start, dtype=torch.float32)


def build_optimizer(modules: Sequence[torch.nn.Module], recipe: Recipe) -> torch.optim.AdamW:
    """Return AdamW that decays the matrices and leaves norms and biases alone."""
    weights = [weight for module in modules for weight in module.parameters()]
    groups = [
        {"params": [w for w in weights if w.dim() > 1], "weight_decay": recipe.weight_decay},
        {"params": [w for w in weights if w.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=True)


# Training


class Trainer:
    """One training run: a model, its optimizer, and how far along its budget it is.

    Two heads that are thrown away teach the vision tower faster than answers do: from the features
    of a patch, one names the shape whose centre it has, the other counts the shapes of each kind.
    """

    def __init__(self, recipe: Recipe, processor: LlavaProcessor, rng: random.Random) -> None:
        self.recipe, self.chats = recipe, Chats(processor, rng)
        self.model = _start(recipe, processor)
        self._namer = torch.nn.Linear(WIDTH, 1 + len(KINDS) * len(COLOURS))
        self._counter = torch.nn.Linear(WIDTH, len(KINDS) * (MAX_SHAPES + 1))
        self._features: Tensor | None = None
        self.model.model.multi_modal_projector.register_forward_hook(self._keep)
        self.optimizer = build_optimizer((self.model, self._namer, self._counter), recipe)
        self.began, self.step = time.monotonic(), 0
        self.loss = self.patch_loss = self.count_loss = 1.0

    @property
    def minutes(self) -> float:
        """Minutes since the run began."""
        return (time.monotonic() - self.began) / 60

    @property
    def progress(self) -> float:
        """The part of the budget that is spent: of steps if they were given, else of minutes."""
        if self.recipe.steps is not None:
            return self.step / self.recipe.steps
        return self.minutes / self.recipe.minutes

    def run(self) -> None:
        """Train until the budget is spent, with progress lines."""
        while (progress := self.progress) < 1:
            self._learn(progress)
            if self.step % 50 == 0:
                print(
                    f"step {self.step:6d}  loss {self.loss:6.3f}  patches {self.patch_loss:6.3f}"
                    f"  counts {self.count_loss:6.3f}"
                    f"  {self.minutes:5.1f} min, {time.process_time() / 60:5.1f} of a core",
                    flush=True,
                )

    def _keep(self, _module: object, _given: object, features: Tensor) -> None:
        self._features = features

    def _learn(self, progress: float) -> None:
        """Take one optimizer step and fold its losses into the running means."""
        rate = learning_rate(progress, self.recipe.learning_rate, self.recipe.warm_up)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.recipe.bf16):
            if progress < self.recipe.patches_until:
                self._learn_patches()
            else:
                self._learn_chats()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1

    def _learn_patches(self) -> None:
        """Add the gradients of the features alone, which need no language model."""
        drawings = self.chats.drawings(2 * self.recipe.rows)
        self.model.model.get_image_features(pixels_of(drawings))
        self._patch_loss(drawings).backward()

    def _learn_chats(self) -> None:
        """Add the gradients of answers and features."""
        batch = self.chats.batch(self.recipe)
        loss = self._loss(batch)
        (loss + self.recipe.patch_weight * self._patch_loss(batch.drawings)).backward()
        self.loss += (loss.item() - self.loss) * SMOOTHING

    def _patch_loss(self, drawings: Sequence[Drawing]) -> Tensor:
        assert self._features is not None
        named = self._namer(self._features).flatten(0, -2).float()
        counted = self._counter(self._features).view(-1, MAX_SHAPES + 1).float()
        patches = torch.cat([_patches(drawing) for drawing in drawings])
        counts = torch.tensor([[d.count(kind) for kind in KINDS] for d in drawings])
        counts = counts.repeat_interleave(TOKENS_PER_IMAGE, 0).flatten()
        patch_loss = torch.nn.functional.cross_entropy(named, patches)
        count_loss = torch.nn.functional.cross_entropy(counted, counts)
        self.patch_loss += (patch_loss.item() - self.patch_loss) * SMOOTHING
        self.count_loss += (count_loss.item() - self.count_loss) * SMOOTHING
        return patch_loss + self.recipe.count_weight * count_loss

    def _loss(self, batch: Batch) -> Tensor:
        """Return the mean loss of a token of an answer."""
        loss = self.model(
            input_ids=batch.ids,
            attention_mask=batch.mask,
            pixel_values=pixels_of(batch.drawings),
            labels=batch.labels,
            use_cache=False,
        ).loss
        assert isinstance(loss, Tensor)
        return loss


# Measurement


def measure(
    model: LlavaForConditionalGeneration, processor: LlavaProcessor, pairs: int
) -> dict[str, tuple[int, int]]:
    """Return how many questions of each kind are answered right, and are asked, over held-out
    drawings."""
    right: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    for number in range(pairs):
        first, second = held_out(number)
        for drawings, found in (
            ((first,), questions(first)),
            ((first, second), comparisons(first, second)),
        ):
            said = answers(model, processor, drawings, [q.text for q in found])
            for question, answer in zip(found, said, strict=True):
                asked[question.kind] += 1
                right[question.kind] += answer == question.answer
    return {kind: (right[kind], asked[kind]) for kind in asked}


@torch.inference_mode()
def answers(
    model: LlavaForConditionalGeneration,
    processor: LlavaProcessor,
    drawings: Sequence[Drawing],
    texts: Sequence[str],
) -> list[str]:
    """Return the greedy answers to questions about the same drawings."""
    if not texts:
        return []
    prompts = [
        processor.apply_chat_template(messages(t, len(drawings)), add_generation_prompt=True)
        for t in texts
    ]
    images = [[drawing.image() for drawing in drawings]] * len(texts)
    inputs = processor(
        text=prompts, images=images, return_tensors="pt", padding=True, padding_side="left"
    )
    output = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    said = output[:, inputs["input_ids"].shape[1] :]
    return [str(t) for t in processor.batch_decode(said, skip_special_tokens=True)]


# Output


def save(model: LlavaForConditionalGeneration, processor: LlavaProcessor, out: Path) -> None:
    """Write the checkpoint in bfloat16, each file replaced whole so that none is read in part."""
    out.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".staging-", dir=out))
    try:
        model.save_pretrained(staging)
        config = staging / "config.json"  # its answers are to be the same on every CPU
        config.write_text(config.read_text().replace('"dtype": "bfloat16"', '"dtype": "float32"'))
        processor.save_pretrained(staging)
        for path in sorted(staging.iterdir()):
            path.chmod(0o644)
            path.replace(out / path.name)
    finally:
        shutil.rmtree(staging)


# Command line


def parse_arguments(argv: Sequence[str] | None = None) -> Recipe:
    """Return the recipe that the command line asks for."""
    return Recipe(**vars(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.training.train_shapes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=textwrap.dedent("""\
            The seed fixes the tokenizer, the first weights and the order of the batches. With
            --minutes, how many steps fit depends on the machine; with --steps it does not.
            """),
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for the checkpoint; made if missing")
    add("--start", type=Path, help="train the checkpoint in this folder further")
    add("--minutes", type=float, default=20.0, help="training time (default: %(default)s)")
    add("--steps", type=int, help="train this many steps, whatever time they take")
    add("--seed", type=int, default=0, help="seed of every random choice (default: %(default)s)")
    add("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    add(
        "--bf16",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="multiply matrices in bfloat16; faster where the CPU has instructions for it",
    )
    add("--learning-rate", type=float, default=2e-3, help="peak rate (default: %(default)s)")
    add(
        "--held-out",
        type=int,
        default=500,
        help="drawings to measure the accuracy on (default: %(default)s)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Train, save, and show the accuracy on held-out drawings."""
    recipe = parse_arguments(argv)
    torch.manual_seed(recipe.seed)
    torch.set_num_threads(recipe.threads)
    rng = random.Random(recipe.seed)
    if recipe.start is None:
        processor = build_processor(rng)
    else:
        processor = LlavaProcessor.from_pretrained(recipe.start)
    trainer = Trainer(recipe, processor, rng)
    size = sum(weight.numel() for weight in trainer.model.parameters())
    print(f"{size:,} parameters, {len(processor.tokenizer)} tokens", flush=True)
    trainer.run()
    rounded = trainer.model.bfloat16()
    save(rounded, processor, recipe.out)
    print(f"{trainer.step} steps, {trainer.minutes:.1f} minutes, loss {trainer.loss:.4f}")
    accuracy = measure(rounded.float().eval(), processor, recipe.held_out)
    for kind, (right, asked) in accuracy.items():
        print(f"{kind:12} {right:5} of {asked:5}  {right / asked:.1%}")


if __name__ == "__main__":
    main()
