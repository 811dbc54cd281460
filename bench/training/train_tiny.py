"""Train the tiny checkpoint: a byte-level tokenizer and a small Llama, from Python's own sources.

The corpus is the standard library of the interpreter that runs the script, so the script needs
no download.  Everything it writes can be loaded with ``AutoTokenizer`` and
``AutoModelForCausalLM``.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import math
import random
import re
import shutil
import sysconfig
import tempfile
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END_OF_TEXT, TURN_START, TURN_END, PAD = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, PAD)
VOCABULARY = 3072
CONTEXT = 2048

LINE_BREAK, WORD, NUMBER = r"\s*\n[ \t]*", r" ?\p{L}+", r" ?\p{N}+"
PUNCTUATION, SPACES = r" ?[^\s\p{L}\p{N}]+", r"\s+(?!\S)|\s"
TOKEN_BORDERS = "|".join((LINE_BREAK, WORD, NUMBER, PUNCTUATION, SPACES))

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

INSTALLED = {"dist-packages", "site-packages"}
NOT_LIBRARY = {"__pycache__", "encodings", "idlelib", "lib2to3", "pydoc_data", "test", "tests"}
SKIPPED_FOLDERS = INSTALLED | NOT_LIBRARY
MACHINE_SPECIFIC = ("_sysconfigdata", "_sysconfig_vars")
LARGEST_SOURCE = 200_000
CUT_EVERY = 64

SYSTEM_PROMPTS = ("You are a helpful assistant.", "You write Python.", "Answer with one function.")
REQUESTS = (
    "Write a function `{name}` that does this: {summary}",
    "Write a Python function `{name}`. {summary}",
    "Write a function named {name}. {summary}",
    "Implement `{name}` in Python: {summary}",
)
SAMPLE_PROMPTS = ("import os\nimport sys\n\ndef ", "class Queue:\n    ", "def main():\n")

Message = dict[str, str]
Conversation = list[Message]


@dataclass(frozen=True)
class Recipe:
    """Recipe of one training run; every field has a command-line option or a fixed value."""

    out: Path
    minutes: float
    steps: int | None
    seed: int
    threads: int
    bf16: bool
    checkpoint_minutes: float
    learning_rate: float
    batch_tokens: int = 2048
    chat_share: float = 0.15
    held_out_share: float = 0.02
    warm_up: float = 0.02
    long_rows_from: float = 0.85
    weight_decay: float = 0.1


# Corpus


def read_sources() -> list[str]:
    """Return the standard library's own modules as text, in path order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return [path.read_text("utf-8") for path in sorted(root.rglob("*.py")) if _wanted(path, root)]


def _wanted(path: Path, root: Path) -> bool:
    """Say whether a file is ordinary library code of a moderate size."""
    if SKIPPED_FOLDERS.intersection(path.relative_to(root).parts):
        return False
    return not path.name.startswith(MACHINE_SPECIFIC) and path.stat().st_size < LARGEST_SOURCE


def split(sources: Sequence[str], share: float, rng: random.Random) -> tuple[list[str], list[str]]:
    """Return (training, held-out) sources, with at least one held out."""
    shuffled = rng.sample(sources, len(sources))
    held_out = max(1, round(len(shuffled) * share))
    return shuffled[held_out:], shuffled[:held_out]


def cut(text: str, rng: random.Random) -> list[str]:
    """Return the text in pieces cut at random places.

    Encoded piece by piece, it teaches the model to go on from a prompt that stops inside a word
    or just after a space, which the tokenizer splits otherwise than whole text.
    """
    borders = [0]
    while borders[-1] < len(text):
        borders.append(borders[-1] + 1 + int(rng.expovariate(1 / CUT_EVERY)))
    return [text[start:end] for start, end in pairwise(borders)]


def conversations(sources: Iterable[str], rng: random.Random) -> list[Conversation]:
    """Return one- and two-turn chats in which each answer is a documented function."""
    exchanges = [exchange for source in sources for exchange in _exchanges(source, rng)]
    rng.shuffle(exchanges)
    chats: list[Conversation] = []
    while exchanges:
        turns = [exchanges.pop() for _ in range(min(len(exchanges), rng.choice((1, 1, 1, 2))))]
        chats.append(_opening(rng) + [message for turn in turns for message in turn])
    return chats


def _opening(rng: random.Random) -> Conversation:
    """Return a system message for about a third of the chats, otherwise nothing."""
    if rng.random() > 1 / 3:
        return []
    return [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}]


def _exchanges(source: str, rng: random.Random) -> Iterator[Conversation]:
    """Yield a request and its answer for every function of 5 to 40 lines with a docstring."""
    lines = source.split("\n")
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        code, docstring = lines[node.lineno - 1 : node.end_lineno], ast.get_docstring(node)
        if docstring and 5 <= len(code) <= 40:
            yield [
                {"role": "user", "content": _request(node.name, docstring, rng)},
                {"role": "assistant", "content": textwrap.dedent("\n".join(code))},
            ]


def _request(name: str, docstring: str, rng: random.Random) -> str:
    """Ask for the function in words taken from the first line of its docstring."""
    summary = docstring.splitlines()[0].strip()
    returned, found = re.subn(r"^Returns? ", "", summary)
    if found:
        return f"Write a function `{name}` that returns {returned}"
    return rng.choice(REQUESTS).format(name=name, summary=summary)


# Tokenizer


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer that gives back any text unchanged.

    A line break and the indentation after it are one unit, so a prompt that ends in indentation
    is split as it would be with code after it.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(TOKEN_BORDERS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(texts, _bpe_trainer())
    if core.get_vocab_size() != VOCABULARY:
        raise ValueError(f"the corpus fills {core.get_vocab_size()} of {VOCABULARY} tokens")
    return _for_transformers(core)


def _bpe_trainer() -> trainers.BpeTrainer:
    """Return a trainer whose first ids are the special tokens, then the 256 bytes."""
    return trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )


def _for_transformers(core: Tokenizer) -> PreTrainedTokenizerFast:
    """Wrap a tokenizer with the names of its special tokens and the chat template."""
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        extra_special_tokens=[TURN_START, TURN_END],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )


def token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    """Return the id of one token of the vocabulary."""
    found = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(found, int)
    return found


def render(tokenizer: PreTrainedTokenizerFast, chats: Iterable[Conversation]) -> list[str]:
    """Return each chat as text, through the tokenizer's own template."""
    return [str(tokenizer.apply_chat_template(chat, tokenize=False)) for chat in chats]


# Batches


class Stream:
    """Texts as one run of token ids, each text preceded by the end-of-text token."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, texts: Sequence[Sequence[str]]) -> None:
        """Encode texts, each given in pieces that are encoded apart."""
        pieces = [piece for text in texts for piece in (END_OF_TEXT, *text)]
        encoded: list[list[int]] = tokenizer(pieces, verbose=False)["input_ids"]
        end = token_id(tokenizer, END_OF_TEXT)
        self.ids = torch.tensor([token for piece in encoded for token in piece])
        self.starts = [int(place) + 1 for place in torch.nonzero(self.ids == end)]

    def anywhere(self, length: int, rng: random.Random) -> Tensor:
        """Return ``length`` ids from a position drawn over the whole stream."""
        return self._row(rng.randrange(len(self.ids)), length)

    def from_a_start(self, length: int, rng: random.Random) -> Tensor:
        """Return ``length`` ids from the first token of a text drawn at random."""
        return self._row(rng.choice(self.starts), length)

    def _row(self, start: int, length: int) -> Tensor:
        start = min(start, len(self.ids) - length)
        return self.ids[start : start + length]


@dataclass(frozen=True)
class Corpus:
    """The token streams that a run learns from and is measured on."""

    code: Stream
    chat: Stream
    held_out: Stream

    def batch(self, length: int, recipe: Recipe, rng: random.Random) -> Tensor:
        """Return rows of ``length`` ids, the recipe's share of them chats, of one batch's size."""
        return torch.stack(
            [
                self.chat.from_a_start(length, rng)
                if rng.random() < recipe.chat_share
                else self.code.anywhere(length, rng)
                for _ in range(recipe.batch_tokens // length)
            ]
        )


def build_corpus(recipe: Recipe, rng: random.Random) -> tuple[PreTrainedTokenizerFast, Corpus]:
    """Read the sources, train the tokenizer on the training part, and encode everything."""
    training, held_out = split(read_sources(), recipe.held_out_share, rng)
    tokenizer = train_tokenizer(training)
    code = [cut(text, rng) for text in training]
    chats = [[chat] for chat in render(tokenizer, conversations(training, rng))]
    streams = [Stream(tokenizer, texts) for texts in (code, chats, [[text] for text in held_out])]
    sizes = ", ".join(f"{len(stream.ids):,}" for stream in streams)
    print(f"tokens of code, chat and held-out code: {sizes}", flush=True)
    return tokenizer, Corpus(*streams)


# Model


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return an untrained Llama of about three million parameters."""
    end, turn_end, pad = (token_id(tokenizer, name) for name in (END_OF_TEXT, TURN_END, PAD))
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=end,
        eos_token_id=[end, turn_end],
        pad_token_id=pad,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=end, eos_token_id=[end, turn_end], pad_token_id=pad
    )
    return model


def build_optimizer(model: LlamaForCausalLM, recipe: Recipe) -> torch.optim.AdamW:
    """Return AdamW that decays the matrices and leaves the norms alone."""
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    norms = [weight for weight in model.parameters() if weight.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=True)


def learning_rate(progress: float, peak: float, warm_up: float) -> float:
    """Return the rate at ``progress`` in [0, 1]: a linear warm-up, then a cosine down to 2%."""
    if progress < warm_up:
        return peak * (progress + 1e-4) / warm_up
    along = (progress - warm_up) / (1 - warm_up)
    return peak * (0.02 + 0.98 * (1 + math.cos(math.pi * along)) / 2)


def row_length(progress: float, recipe: Recipe, rng: random.Random) -> int:
    """Return 512 for most of the run, and up to the whole context in its last part."""
    return 512 if progress < recipe.long_rows_from else rng.choice((512, 1024, 1024, CONTEXT))


# Training


class Trainer:
    """One training run: a model, its optimizer, and how far along its budget it is."""

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: PreTrainedTokenizerFast,
        corpus: Corpus,
        rng: random.Random,
    ) -> None:
        self.recipe, self.tokenizer, self.corpus, self.rng = recipe, tokenizer, corpus, rng
        self.model = build_model(tokenizer)
        self.optimizer = build_optimizer(self.model, recipe)
        self.began, self.saved, self.step = time.monotonic(), 0.0, 0
        self.loss = math.log(VOCABULARY)

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

    @property
    def tokens(self) -> int:
        """Tokens seen so far."""
        return self.step * self.recipe.batch_tokens

    def run(self) -> None:
        """Train until the budget is spent, with progress lines and early checkpoints."""
        while (progress := self.progress) < 1:
            self._learn(progress)
            if self.step % 50 == 0:
                self._report()
            if self._checkpoint_due():
                self.saved = self.minutes
                save(self.model, self.tokenizer, self.recipe.out)

    def _learn(self, progress: float) -> None:
        """Take one optimizer step and fold its loss into the running mean."""
        rate = learning_rate(progress, self.recipe.learning_rate, self.recipe.warm_up)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        length = row_length(progress, self.recipe, self.rng)
        loss = self._loss(self.corpus.batch(length, self.recipe, self.rng))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.loss += (loss.item() - self.loss) / min(self.step, 100)

    def _loss(self, ids: Tensor) -> Tensor:
        """Return the mean next-token loss of a batch."""
        with self._precision():
            loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        assert isinstance(loss, Tensor)
        return loss

    def _precision(self) -> AbstractContextManager[object]:
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.recipe.bf16)

    @torch.no_grad()
    def held_out_loss(self, length: int = 512) -> float:
        """Return the mean loss over the held-out code, in whole rows of ``length``."""
        ids = self.corpus.held_out.ids
        rows = ids[: len(ids) // length * length].view(-1, length)
        losses = [self._loss(row[None]).item() for row in rows]
        return sum(losses) / len(losses)

    def _checkpoint_due(self) -> bool:
        every = self.recipe.checkpoint_minutes
        return every > 0 and self.minutes - self.saved >= every

    def _report(self) -> None:
        spent, progress = self.minutes, max(self.progress, 1e-9)
        print(
            f"step {self.step:6d}  loss {self.loss:6.3f}  {self.tokens / spent / 60:8,.0f} tokens/s"
            f"  {max(0.0, spent / progress - spent):5.1f} min left",
            flush=True,
        )


# Output


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the checkpoint in bfloat16, each file replaced whole so that none is read in part."""
    out.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".staging-", dir=out))
    try:
        copy.deepcopy(model).bfloat16().save_pretrained(staging)
        config = staging / "config.json"  # its answers are to be the same on every CPU
        config.write_text(config.read_text().replace('"dtype": "bfloat16"', '"dtype": "float32"'))
        tokenizer.save_pretrained(staging, save_jinja_files=False)
        _widen_support(staging / "tokenizer_config.json")
        for path in sorted(staging.iterdir()):
            path.chmod(0o644)
            path.replace(out / path.name)
    finally:
        shutil.rmtree(staging)


def _widen_support(path: Path) -> None:
    """Name the tokenizer's class and extra tokens as every release of transformers reads them."""
    settings = json.loads(path.read_text("utf-8"))
    settings.pop("backend", None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    path.write_text(json.dumps(settings, indent=2) + "\n", "utf-8")


@torch.no_grad()
def continuation(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str, tokens: int
) -> str:
    """Return the prompt with up to ``tokens`` greedy tokens after it."""
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return str(tokenizer.decode(output[0]))


# Command line


def parse_arguments(argv: Sequence[str] | None = None) -> Recipe:
    """Return the recipe that the command line asks for."""
    options = _parser().parse_args(argv)
    return Recipe(**vars(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=textwrap.dedent("""\
            examples:
              train_tiny.py --out DIR --minutes 40 --seed 0   train for longer than the shipped one
              train_tiny.py --out DIR --minutes 1             see the whole path work, badly trained
              train_tiny.py --out DIR --steps 500             the same batches every time

            The seed fixes the tokenizer, the first weights and the order of the batches for one
            version of the standard library.  With --minutes, how many steps fit depends on the
            machine; with --steps it does not.
            """),
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for the checkpoint; made if missing")
    add("--minutes", type=float, default=40.0, help="training time (default: %(default)s)")
    add("--steps", type=int, help="train this many steps, whatever time they take")
    add("--seed", type=int, default=0, help="seed of every random choice (default: %(default)s)")
    add("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    add(
        "--bf16",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="multiply matrices in bfloat16; much faster where the CPU has instructions for it",
    )
    add(
        "--checkpoint-minutes",
        type=float,
        default=10.0,
        help="write the checkpoint this often while training; 0 for never (default: %(default)s)",
    )
    add("--learning-rate", type=float, default=3e-3, help="peak rate (default: %(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Train, save, and show the figures and a few greedy continuations."""
    recipe = parse_arguments(argv)
    torch.manual_seed(recipe.seed)
    torch.set_num_threads(recipe.threads)
    rng = random.Random(recipe.seed)
    trainer = Trainer(recipe, *build_corpus(recipe, rng), rng)
    trainer.run()
    save(trainer.model, trainer.tokenizer, recipe.out)
    print(
        f"{trainer.step} steps, {trainer.tokens:,} tokens, {trainer.minutes:.1f} minutes,"
        f" loss {trainer.loss:.3f}, held-out loss {trainer.held_out_loss():.3f}"
    )
    for prompt in SAMPLE_PROMPTS:
        print("-" * 80, continuation(trainer.model, trainer.tokenizer, prompt, 120), sep="\n")


if __name__ == "__main__":
    main()
