"""Task for GuideLLM: ten streamed requests of synthetic prompts, and their metrics."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


class Task:
    def __init__(self, address: str, model: str, folder: str) -> None:
        self.address, self.model, self.folder = address, model, folder

    def load(self) -> Any:
        with tempfile.TemporaryDirectory() as name:
            report = Path(name, "report.json")
            command = [
                *(str(Path(sys.executable).parent / "guidellm"), "run", "--disable-console"),
                *("--backend", f"kind=openai_http,target={self.address},model={self.model}"),
                *("--profile", "kind=concurrent,streams=2"),
                *("--constraint", "kind=max_requests,count=10"),
                *("--tokenizer", f"kind=huggingface_auto,model={self.folder}"),
                *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"),
                *("--output", f"kind=json,path={report}"),
            ]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
            (benchmark,) = json.loads(report.read_text())["benchmarks"]
        totals = benchmark["metrics"]["request_totals"]
        return {key: totals[key] for key in ("successful", "errored")}


if __name__ == "__main__":
    address, model, name, folder = sys.argv[1:]
    print(json.dumps(getattr(Task(address, model, folder), name)()))
