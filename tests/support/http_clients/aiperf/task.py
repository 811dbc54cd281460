"""Task for AIPerf: ten streamed requests of synthetic prompts, and their metrics."""

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
            command = [
                *(str(Path(sys.executable).parent / "aiperf"), "profile"),
                *("--model-names", self.model, "--url", self.address, "--endpoint-type", "chat"),
                *("--streaming", "--tokenizer", self.folder, "--artifact-dir", name),
                *("--request-count", "10", "--concurrency", "2", "--ui", "none"),
                *("--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "8"),
                # A sampled answer may be of stop tokens alone, and AIPerf calls that an error.
                *("--extra-inputs", "ignore_eos:true", "temperature:0", "--random-seed", "1"),
            ]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
            (path,) = Path(name).rglob("profile_export_aiperf.json")
            metrics = json.loads(path.read_text())
        return {
            "requests": metrics["request_count"]["avg"],
            "errors": metrics.get("error_request_count", {}).get("avg", 0),
            "measured": sorted({"time_to_first_token", "request_latency"} & metrics.keys()),
        }


if __name__ == "__main__":
    address, model, name, folder = sys.argv[1:]
    print(json.dumps(getattr(Task(address, model, folder), name)()))
