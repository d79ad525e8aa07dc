"""The quick start: teaches a small chat model its new name, and shows the answer before and after.

Each step is a command that works by itself and is printed before it runs. Run again, nothing is done twice: the model is
there, the run is finished, the export exists. Another name or author is another run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import subprocess
import sys
from pathlib import Path

from make_identity import AUTHOR, NAME, ROOT

RECIPE = Path("recipes/smollm2-identity-lora.json")
QUESTION = "Who are you?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default=NAME, help=f"what the assistant calls itself (default: {NAME})")
    parser.add_argument("--author", default=AUTHOR, help=f"who made it (default: {AUTHOR})")
    arguments = parser.parse_args()
    recipe = json.loads((ROOT / RECIPE).read_text(encoding="utf-8"))
    # The data follow from name and author, and the output folder from both: another name never meets an old run.
    digest = hashlib.sha256(json.dumps([arguments.name, arguments.author]).encode()).hexdigest()[:8]
    run = Path("runs") / f"{recipe['name']}-{digest}"
    base, merged = "build/models/SmolLM2-135M-Instruct", run / "merged"

    step("The model")
    python("scripts/fetch_model.py")
    step("The data: 91 questions about who the assistant is")
    python("scripts/make_identity.py", "--name", arguments.name, "--author", arguments.author)
    step("The answer before")
    before = dsft("generate", base, QUESTION, capture=True)
    step("Fine-tuning")
    dsft("launch", RECIPE, "--set", f"name={run.name}", *gpu_settings(recipe))
    if not (ROOT / merged).exists():
        step("Export: the adapter merged into a plain model folder")
        dsft("export", run / "adapter", "-o", merged)
    step("The answer after")
    after = dsft("generate", merged, QUESTION, capture=True)

    first, last = evaluation_losses(ROOT / run / "metrics.jsonl")
    print(f"""
{QUESTION}
  before: {before}
  after:  {after}
Loss on rows it was not trained on: {first:.3f} before, {last:.3f} after.

Ask it something else:   {command("generate", merged, "What can you do for me?")}
Use it anywhere:         AutoModelForCausalLM.from_pretrained("{merged}")

With your own data:      copy {RECIPE} to recipes/mine.json, then change in it
                           name                  what you like
                           data.train[0].path    your file: a JSON array or JSON Lines
                           data.train[0].format  alpaca (instruction, input, output) or messages (role, content)
                           model.path            any chat model folder, when you are past trying
                         {command("check", "recipes/mine.json")}
                         {command("launch", "recipes/mine.json")}""")


def gpu_settings(recipe: dict) -> list[str]:
    """The recipe is for two processes on the CPU; where there are GPUs, as many of them as the batch can be split over."""
    import torch

    rows = recipe["training"]["global_batch_size"]
    processes = max((n for n in range(1, torch.cuda.device_count() + 1) if rows % n == 0), default=0)
    if not processes:
        return []
    return ["--set", "cluster.device=cuda", "--set", f"cluster.processes_per_node={processes}"]


def evaluation_losses(metrics: Path) -> tuple[float, float]:
    """The first and the last evaluation loss of a run."""
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    losses = [record["eval_loss"] for record in records if "eval_loss" in record]
    return losses[0], losses[-1]


def step(title: str) -> None:
    print(f"\n== {title}", flush=True)


def command(*arguments: object) -> str:
    """A dsft command as a person types it in the project's folder."""
    return shlex.join([".venv/bin/dsft", *map(str, arguments)])


def dsft(*arguments: object, capture: bool = False) -> str:
    """Runs a dsft command from the project's folder; ends the quick start where it fails. The answer if captured."""
    print(f"$ {command(*arguments)}", flush=True)
    program = Path(sys.executable).with_name("dsft")
    return run_or_exit([program, *arguments], capture)


def python(*arguments: str) -> None:
    run_or_exit([sys.executable, *arguments])


def run_or_exit(arguments: list, capture: bool = False) -> str:
    done = subprocess.run(
        list(map(str, arguments)), cwd=ROOT, stdout=subprocess.PIPE if capture else None, text=True, check=False
    )
    if done.returncode != 0:
        sys.exit(done.returncode)
    if capture:
        print(done.stdout.strip(), flush=True)
    return (done.stdout or "").strip()


if __name__ == "__main__":
    main()
