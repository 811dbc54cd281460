"""Task for lm-eval: likelihoods and generated text of prompts from a file, scored."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

CHOICES = """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
"""
WRITTEN = """
task: written
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["."], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
"""
ROWS = [
    {"question": "The weather in", "choices": [" Paris", " xyzzy"]},
    {"question": "I am a small", "choices": [" model", " xyzzy"]},
]


class Task:
    def __init__(self, address: str, model: str, folder: str) -> None:
        self.options: Any = {
            "model": model,
            "base_url": f"{address}/v1/completions",
            "tokenizer": folder,
            "tokenizer_backend": "huggingface",
            "num_concurrent": 2,
            "max_retries": 1,
            "eos_string": "<|endoftext|>",
        }

    def text(self) -> Any:
        with tempfile.TemporaryDirectory() as name:
            rows = Path(name, "rows.jsonl")
            rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
            for task, text in (("choices", CHOICES), ("written", WRITTEN)):
                Path(name, f"{task}.yaml").write_text(text.replace("FILE", str(rows)))
            results = lm_eval.simple_evaluate(
                model="local-completions",
                model_args=self.options,
                tasks=["choices", "written"],
                task_manager=TaskManager(include_path=name, include_defaults=False),
                bootstrap_iters=0,
            )
        written = results["samples"]["written"]
        return {
            "accuracy": results["results"]["choices"]["acc,none"],
            "num_samples": {task: len(s) for task, s in results["samples"].items()},
            "written": {s["doc"]["question"]: s["resps"][0][0] for s in written},
        }


if __name__ == "__main__":
    address, model, name, folder = sys.argv[1:]
    print(json.dumps(getattr(Task(address, model, folder), name)()))
