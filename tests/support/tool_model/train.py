"""Train the tool model: a small Llama that calls tools, in two formats.

    python -m tests.support.tool_model.train --out tests/support/tool_model/checkpoint

It learns `conversations.py`, rendered by either chat template of this folder; the template is all
that tells it the format. The loss is of the assistant's tokens alone. At the end it prints how many
held-out conversations the model answers exactly, greedily, in each format.
"""

import argparse
import json
import math
import random
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from tests.support.tool_model import FORMATS, template_of
from tests.support.tool_model.conversations import Conversation, Drawer

SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
)
END_OF_TEXT, PAD = SPECIAL_TOKENS[:2]
TURN_ENDS = ("<|im_end|>", "<|eot_id|>")
VOCABULARY = 1024
CONTEXT = 2048

# A name begins with a capital, and is the same tokens wherever it stands, without a space before.
TOKEN_BORDERS = r" ?[\p{Ll}_]+|\p{L}+|\p{N}{1,2}|\n+|[^\p{L}_\p{N}\n]+"
ANSWERS = re.compile(
    r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)"
    r"|assistant<\|end_header_id\|>\n\n(.*?<\|eot_id\|>)",
    re.DOTALL,
)
COMPACT_SHARE = 0.15  # of the calls; grammars may force either

BATCH = 16
DRAWN_AT_ONCE = 32 * BATCH
WARM_UP = 50
MUON_RATE = 0.02


def rendered(conversation: Conversation, name: str) -> str:
    """Returns a conversation as the template of a format writes it."""
    tools = [{"type": "function", "function": {"name": tool}} for tool in conversation.tools]
    (text,), _ = render_jinja_template(
        [list(conversation.messages)], tools=tools or None, chat_template=template_of(name)
    )
    return str(text)


def compacted(text: str, rng: random.Random) -> str:
    """Returns the text with some calls without spaces: around the arguments, within, or both."""

    def compact(call: re.Match[str]) -> str:
        head, arguments = call[1], call[2]
        if rng.random() < 0.5:
            head = head.replace('": ', '":').replace(', "', ',"')
        if rng.random() < 0.7:
            arguments = arguments.replace('": ', '":').replace(', "', ',"')
        return head + arguments

    call = r'(\{"name": "\w+", "(?:arguments|parameters)": )(\{[^}]*\})'
    return re.sub(call, lambda m: compact(m) if rng.random() < COMPACT_SHARE else m[0], text)


def train_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer in which each number of up to two digits is a token."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(TOKEN_BORDERS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    numbers = " ".join(f"{number:02}" for number in range(100))
    core.train_from_iterator(
        [*texts, *[numbers] * (len(texts) // 4)],
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Returns an untrained Llama of about 0.4 million parameters."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    special = {
        "bos_token_id": ids[END_OF_TEXT],
        "eos_token_id": [ids[END_OF_TEXT], *(ids[end] for end in TURN_ENDS)],
        "pad_token_id": ids[PAD],
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=224,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        **special,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**special)
    return model


# Token ids, and which of them the assistant wrote.
Row: TypeAlias = tuple[list[int], list[bool]]


class Rows:
    """Conversations as rows of tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer

    def row(self, text: str, *, is_forced: bool) -> Row:
        encoded = self._tokenizer(text, return_offsets_mapping=True)
        places: list[tuple[int, int]] = encoded["offset_mapping"]
        spans = [
            span for found in ANSWERS.finditer(text) for span in (found.span(1), found.span(2))
        ]
        learned = [any(start <= place < end for start, end in spans) for place, _ in places]
        if is_forced:
            learned[learned.index(True)] = False
        return encoded["input_ids"], learned

    def batch(
        self, rows: Sequence[tuple[list[int], list[bool]]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ids and labels, [rows, longest]; a label is -100 where nothing is learned."""
        longest = max(len(ids) for ids, _ in rows)
        shape = len(rows), longest
        inputs = torch.full(shape, self._tokenizer.pad_token_id)
        labels = torch.full(shape, -100)
        for place, (ids, learned) in enumerate(rows):
            inputs[place, : len(ids)] = torch.tensor(ids)
            labels[place, : len(ids)] = torch.tensor(ids).where(torch.tensor(learned), -100)
        return inputs, labels


def batches(rows: Rows, rng: random.Random) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields batches of conversations of similar lengths, without end."""
    drawer = Drawer(rng)
    while True:
        drawn = []
        for _ in range(DRAWN_AT_ONCE):
            conversation = drawer.conversation()
            text = compacted(rendered(conversation, rng.choice(FORMATS)), rng)
            drawn.append(rows.row(text, is_forced=conversation.is_forced))
        drawn.sort(key=lambda row: len(row[0]))
        cut = [drawn[start : start + BATCH] for start in range(0, len(drawn), BATCH)]
        rng.shuffle(cut)
        yield from map(rows.batch, cut)


def logits_and_labels(
    model: LlamaForCausalLM, inputs: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns logits [learned tokens, vocabulary], their tokens, and the row of each."""
    hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state[:, :-1]
    where = labels[:, 1:] != -100
    return model.lm_head(hidden[where]), labels[:, 1:][where], where.nonzero()[:, 0]


@torch.no_grad()
def exact_share(model: LlamaForCausalLM, rows: Rows, name: str, count: int, seed: int) -> float:
    """Returns the share of conversations of which greedy decoding writes every answer exactly."""
    drawer = Drawer(random.Random(seed))
    texts = [rendered(drawer.conversation(forced=False), name) for _ in range(count)]
    num_exact = 0
    for start in range(0, count, BATCH):
        drawn = [rows.row(text, is_forced=False) for text in texts[start : start + BATCH]]
        logits, expected, places = logits_and_labels(model, *rows.batch(drawn))
        wrong = set(places[logits.argmax(-1) != expected].tolist())
        num_exact += len(drawn) - len(wrong)
    return num_exact / count


def train(
    model: LlamaForCausalLM, rows: Rows, steps: int, learning_rate: float, rng: random.Random
) -> None:
    """Trains matrices with Muon, the embedding and norms with AdamW. The rates rise linearly, then
    fall by a cosine to nothing."""
    matrices = [w for name, w in model.named_parameters() if w.dim() == 2 and "embed" not in name]
    others = [w for name, w in model.named_parameters() if w.dim() == 1 or "embed" in name]
    optimizers = (
        (torch.optim.Muon(matrices, weight_decay=0.05), MUON_RATE),
        (torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0, fused=True), learning_rate),
    )
    began, mean_loss = time.monotonic(), math.log(VOCABULARY)
    for step, batch in zip(range(steps), batches(rows, rng), strict=False):
        progress = max(0.0, step - WARM_UP) / max(1, steps - WARM_UP)
        rate = min(1.0, (step + 1) / WARM_UP) * (1 + math.cos(math.pi * progress)) / 2
        for optimizer, peak in optimizers:
            optimizer.param_groups[0]["lr"] = peak * rate
        logits, expected, _ = logits_and_labels(model, *batch)
        loss = cross_entropy(logits, expected)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, _ in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        mean_loss += (loss.item() - mean_loss) / min(step + 1, 50)
        if step % 50 == 49:
            minutes = (time.monotonic() - began) / 60
            line = f"step {step + 1:5}  loss {mean_loss:.4f}  {minutes:.1f} minutes"
            if step % 200 == 199:
                line += f"  exact {exact_share(model, rows, FORMATS[0], 96, 1):.2f}"
            print(line, flush=True)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Writes the checkpoint in bfloat16, without a chat template."""
    model.bfloat16().save_pretrained(out)
    config = out / "config.json"  # its answers are to be the same on every CPU
    config.write_text(config.read_text().replace('"dtype": "bfloat16"', '"dtype": "float32"'))
    tokenizer.save_pretrained(out)
    path = out / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings.pop("backend", None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--steps", type=int, default=7000, help="default 7000")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="peak; default 0.003")
    parser.add_argument("--seed", type=int, default=0, help="of every random choice; default 0")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; default 1")
    parser.add_argument(
        "--check", type=int, default=2000, help="held-out conversations of each format"
    )
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    rng = random.Random(options.seed)
    drawer = Drawer(rng)
    texts = [rendered(drawer.conversation(), rng.choice(FORMATS)) for _ in range(4000)]
    tokenizer = train_tokenizer(texts)
    rows, model = Rows(tokenizer), build_model(tokenizer)
    print(f"{model.num_parameters():,} parameters", flush=True)
    train(model, rows, options.steps, options.learning_rate, rng)
    options.out.mkdir(parents=True, exist_ok=True)
    save(model, tokenizer, options.out)
    model = LlamaForCausalLM.from_pretrained(options.out, dtype=torch.float32)
    for name in FORMATS:
        share = exact_share(model, rows, name, options.check, options.seed + 1)
        print(f"{name}: {share:.2%} of {options.check} held-out conversations exact")


if __name__ == "__main__":
    main()
