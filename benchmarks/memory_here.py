"""The planner against this machine: `python benchmarks/memory_here.py [NAME ...]`.

Runs real jobs on the CPU, one after the other, and prints predicted / measured memory of a process. Exit code 1 where one
is off by more than 10 %. Names are parts of case names, as "fsdp" or "135m-lora"; without any, all cases are run.

Measured is VmHWM of /proc/PID/status, the most that was ever resident, of the rank with the most. It counts pages that two
ranks share (libraries, and weights that are read where the file is mapped) for each of them, as the planner does: what one
process shows in `top`, and an upper bound of its part of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dsft.compile import compile_plan, write
from dsft.plan import installed_versions, make_plan
from dsft.plan.record import Plan
from dsft.recipe import load_recipe

WITHIN = 0.10
TIMEOUT = 600  # seconds of one job
MIB = 1024**2

# One rank, which ends by saying its peak in KiB.
RANK = """
import os, re, sys
from dsft.train.__main__ import main
code = main(sys.argv[1:])
print("peak", re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1], flush=True)
os._exit(code)
"""

ENGINES = {
    "single": {"type": "single"},
    "ddp": {"type": "ddp"},
    "fsdp": {"type": "fsdp"},
    "zero1": {"type": "deepspeed", "zero_stage": 1},
    "zero2": {"type": "deepspeed", "zero_stage": 2},
    "zero3": {"type": "deepspeed", "zero_stage": 3},
}

# transformers' names; 135m has the shape of SmolLM2-135M;
MODELS = {
    "tiny": {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "30m": {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8,
            "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False},
    "gpt2-60m": {"model_type": "gpt2", "vocab_size": 8192, "n_embd": 768, "n_layer": 8, "n_head": 12, "n_positions": 1024,
                 "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "135m": {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
             "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    model: str
    method: str  # "full" | "lora"
    engine: str
    precision: str = "fp32"
    rows: int = 2
    length: int = 256
    accumulation: int = 1
    checkpointing: bool = False
    stored: str = "float32"

    @property
    def name(self) -> str:
        extras = [f"accumulation{self.accumulation}"] * (self.accumulation > 1)
        extras += ["recomputed"] * self.checkpointing + ["stored-bf16"] * (self.stored == "bfloat16")
        return "-".join([self.model, self.method, self.engine, self.precision, *extras, f"{self.rows}x{self.length}"])


def every_case() -> Iterator[Case]:
    for engine in ENGINES:
        yield Case("tiny", "lora", engine)
        yield Case("30m", "full", engine)
        yield Case("30m", "full", engine, "bf16")
        yield Case("135m", "lora", engine)
        yield Case("135m", "full", engine)
    for engine in ("single", "fsdp", "zero2", "zero3"):
        yield Case("135m", "lora", engine, "bf16", stored="bfloat16")
    for engine in ("single", "fsdp", "zero3"):
        for recomputed in (False, True):
            yield Case("30m", "full", engine, rows=4, length=512, checkpointing=recomputed)
    yield Case("135m", "lora", "ddp", rows=4, length=512)
    yield Case("135m", "lora", "ddp", rows=4, length=512, checkpointing=True)
    yield Case("gpt2-60m", "full", "ddp")
    yield Case("gpt2-60m", "lora", "single")
    yield Case("30m", "full", "fsdp", accumulation=2)
    yield Case("30m", "full", "zero2", accumulation=2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of the names of cases to run")
    parser.add_argument("--parts", action="store_true", help="print the parts of each prediction too")
    arguments = parser.parse_args()
    cases = [case for case in every_case() if not arguments.names or any(name in case.name for name in arguments.names)]
    if not cases:
        parser.error(f"no case's name has {' or '.join(arguments.names)} in it")
    print(f"  {'MiB':>6} {'planner':>7} {'error':>7}  run", flush=True)
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for at, case in enumerate(cases):
            plan, peak = run(case, Path(folder), f"job{at}")
            error = plan.estimate.device_bytes / peak - 1
            worst = max(worst, abs(error))
            print(f"  {peak / MIB:6.0f} {plan.estimate.device_bytes / MIB:7.0f} {error:+7.1%}  {case.name}", flush=True)
            if arguments.parts:
                parts = plan.estimate.memory.items()
                print("          " + ", ".join(f"{part} {size / MIB:.0f}" for part, size in parts if size), flush=True)
    print(f"\n{len(cases)} runs, the worst off by {worst:.1%} (target {WITHIN:.0%})")
    return int(worst > WITHIN)


def run(case: Case, folder: Path, name: str) -> tuple[Plan, int]:
    """Runs the job; its plan, and the peak of the rank with the most, in bytes."""
    plan, compiled = prepare(case, folder, name)
    return plan, max(launch(plan, compiled))


def prepare(case: Case, folder: Path, name: str) -> tuple[Plan, Path]:
    """The plan of three updates on rows as long as they may be, all but some tokens supervised; and its compiled folder."""
    model = make_model(folder, case.model, case.stored)
    processes = 1 if case.engine == "single" else 2
    rows = [{"instruction": "a", "output": "b" * 2 * case.length}] * (case.rows * case.accumulation * processes * 3)
    (folder / "rows.json").write_text(json.dumps(rows))
    recipe = {
        "name": name,
        "model": {"path": str(model), "gradient_checkpointing": case.checkpointing},
        "data": {"train": [{"path": "rows.json", "format": "alpaca"}], "max_length": case.length},
        "method": {"type": case.method},
        "strategy": ENGINES[case.engine],
        "training": {
            "max_steps": 3,
            "per_device_train_batch_size": case.rows,
            "gradient_accumulation_steps": case.accumulation,
            "learning_rate": 1e-4,
            "precision": case.precision,
        },
        "checkpoint": {"save_steps": 3},
        "cluster": {"device": "cpu", "processes_per_node": processes},
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(recipe))
    loaded = load_recipe(path)
    plan = make_plan(loaded, versions=installed_versions(), cwd=folder)
    compiled = folder / "build" / name
    write(compile_plan(plan, loaded.to_json(plan.checkpoint.output_dir), compiled), compiled)
    return plan, compiled


def launch(plan: Plan, compiled: Path) -> list[int]:
    """Each rank's peak in bytes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    size = str(plan.batch.world_size)
    ranks = []
    for rank in range(plan.batch.world_size):
        environment = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [sys.executable, "-c", RANK, str(compiled / "plan.json")]
        ranks.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    outputs = [rank.communicate(timeout=TIMEOUT)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit("\n".join(outputs))
    return [int(re.search(r"^peak (\d+)$", output, re.MULTILINE)[1]) * 1024 for output in outputs]


def make_model(folder: Path, name: str, stored: str) -> Path:
    """A model of random weights with a tokenizer of a token a byte."""
    path = folder / f"{name}-{stored}"
    if not path.exists():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        shape = {"model_type": "llama", **MODELS[name]}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape, eos_token_id=1, bos_token_id=0))
        model.to(getattr(torch, stored)).save_pretrained(path)
        bytewise_tokenizer().save_pretrained(path)
    return path


def bytewise_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<start>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({word: at for at, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    template = (
        "{% for message in messages %}<start>{{ message['role'] }} {{ message['content'] }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<start>assistant {% endif %}"
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<start>", eos_token="<end>", pad_token="<end>", chat_template=template
    )


if __name__ == "__main__":
    sys.exit(main())
