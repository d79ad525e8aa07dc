"""Time and memory of the commands that start nothing: `python benchmarks/compile_speed.py`.

Each case is a process of its own, as a user starts it. "cold" is the first start after an installation: dsft has no
bytecode yet, and every file that the command reads has left the page cache (posix_fadvise; the interpreter itself is in
use here and stays). All others are starts after the first.

Exit code 1 where a target is missed: by the best time, since the others are what the machine does beside it, and by the
largest peak of resident memory, which is never less than this benchmark's own 30 MB: Linux counts that of the process
which starts it. "cpu" is the least time of the processor, which a busy machine changes less.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ("dsft", "schemas", "docs")  # what an installation has

# Llama-3.1-8B and -70B: config.json, and files of the weights that have all of the size and only the header on disk.
LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
SIZES = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class Case:
    """`seconds` and `megabytes` (10^6 bytes) are the targets; `code` is the exit code that is right."""

    name: str
    arguments: tuple[str, ...]
    seconds: float
    megabytes: float | None = None
    cold: bool = False
    code: int = 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=7, metavar="N", help="starts of each case (default: 7)")
    repeat = parser.parse_args().repeat
    missed = False
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for name in SHIPPED:
            shutil.copytree(ROOT / name, work / name, ignore=shutil.ignore_patterns("__pycache__"))
        cases = prepare(work)
        print(f"{'best':>7} {'median':>7} {'target':>7} {'cpu':>8}   {'peak':>6} {'target':>6}")
        for case in cases:
            run(case, work)  # what it reads is in the page cache then, and dsft's bytecode on disk
            runs = [run(case, work) for _ in range(repeat)]
            seconds, cpu, megabytes = zip(*runs)
            miss = min(seconds) > case.seconds or max(megabytes) > (case.megabytes or math.inf)
            missed |= miss
            print(
                f"{min(seconds):6.3f}s {statistics.median(seconds):6.3f}s {case.seconds:6.2f}s {min(cpu):7.3f}s   "
                + f"{max(megabytes):4.0f}MB {f'{case.megabytes:4.0f}MB' if case.megabytes else '':6}   "
                + f"{case.name}{'   MISSED' if miss else ''}",
                flush=True,
            )
    return int(missed)


def prepare(work: Path) -> list[Case]:
    """Writes models, hostfile and recipes into `work`; the cases over them."""
    for name, sizes in SIZES.items():
        write_model(work / name, LLAMA | sizes)
    (work / "hosts").write_text("".join(f"node{number} slots=8\n" for number in range(10_000)))
    shutil.copy(ROOT / "data/alpaca_en_demo.json", work / "rows.json")
    write_recipe(work, "auto", "8b", 512, cluster={"gpu": "h100-80gb", "processes_per_node": 8})
    t4 = {"gpu": "t4", "processes_per_node": 1}
    write_recipe(work, "too-large", "70b", 720, cluster=t4, precision="fp32", max_length=131072)
    write_recipe(work, "hosts", "8b", 320_000, cluster={"hostfile": "hosts"}, strategy="fsdp", per_device=4)
    write_recipe(work, "hosts-auto", "8b", 320_000, cluster={"hostfile": "hosts", "gpu": "h100-80gb"})
    recipe = json.loads((work / "auto.json").read_text())
    recipe["training"] |= {f"learning_rate_{number}": number for number in range(1000)}
    (work / "errors.json").write_text(json.dumps(recipe, indent=2))

    def compiles(name: str) -> tuple[str, ...]:
        return "compile", f"{name}.json", "-o", f"out-{name}"

    return [
        Case("dsft --help", ("--help",), 0.15),
        Case("dsft --help, cold", ("--help",), 0.15, cold=True),
        Case("compile, strategy auto, 8B on 8 GPUs", compiles("auto"), 0.35, 60),
        Case("compile, strategy auto, 8B on 8 GPUs, cold", compiles("auto"), 0.35, 60, cold=True),
        Case("plan, the same", ("plan", "auto.json"), 1),
        Case(
            "compile, nothing fits: 70B on a T4, 131,072 tokens, 30 divisions of the batch",
            compiles("too-large"),
            1,
            code=2,
        ),
        Case("compile, 10,000 machines", compiles("hosts"), 1),
        Case("compile, 10,000 machines, strategy auto", compiles("hosts-auto"), 1),
        Case("check, 1,000 errors", ("check", "errors.json"), 1, code=2),
    ]


def write_recipe(
    work: Path,
    name: str,
    model: str,
    global_batch_size: int,
    *,
    cluster: dict[str, Any],
    strategy: str = "auto",
    per_device: int | None = None,
    precision: str = "bf16",
    max_length: int = 2048,
) -> None:
    recipe = {
        "name": name,
        "model": {"path": f"./{model}"},
        "data": {"train": [{"path": "rows.json", "format": "alpaca"}], "max_length": max_length},
        "method": {"type": "lora"},
        "strategy": {"type": strategy},
        "training": {
            "max_steps": 100,
            "global_batch_size": global_batch_size,
            "per_device_train_batch_size": per_device,
            "learning_rate": 1e-4,
            "precision": precision,
        },
        "cluster": cluster,
    }
    (work / f"{name}.json").write_text(json.dumps(recipe, indent=2))


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """A model's folder in shards, each as long as its header says, without data."""
    from dsft.plan.families import layout  # of this checkout

    shards: list[dict[str, Any]] = [{}]
    at = 0
    for name, (rows, *columns) in layout(config).shapes().items():
        size = 2 * rows * (columns[0] if columns else 1)
        if at + size > SHARD_BYTES:
            shards.append({})
            at = 0
        shards[-1][name] = {"dtype": "BF16", "shape": [rows, *columns], "data_offsets": [at, at + size]}
        at += size
    folder.mkdir()
    weight_map = {}
    for number, tensors in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        header = json.dumps(tensors).encode()
        (folder / file).write_bytes(len(header).to_bytes(8, "little") + header)
        os.truncate(folder / file, 8 + len(header) + max(one["data_offsets"][1] for one in tensors.values()))
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))


def run(case: Case, work: Path) -> tuple[float, float, float]:
    """Seconds, seconds of the processor, and peak megabytes of one start."""
    if case.cold:
        for folder in list((work / "dsft").rglob("__pycache__")):
            shutil.rmtree(folder)
        forget([*modules(case, work), *(path for path in work.rglob("*") if path.is_file())])
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "dsft", *case.arguments],
        cwd=work, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != case.code:
        raise SystemExit(f"{case.name}: exit code {process.returncode}, and not {case.code}: nothing is measured")
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6


def environment() -> dict[str, str]:
    """The copy's own dsft is loaded, by the working directory; bytecode is kept, whatever the environment says here."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def modules(case: Case, work: Path) -> list[Path]:
    """The files of all modules that the command loads, their bytecode too; dsft's own is not written."""
    script = """if True:
        import atexit, sys
        from dsft.cli import main
        loaded = lambda: [file for module in sys.modules.values() for name in ("__file__", "__cached__")
                          if (file := getattr(module, name, None))]
        atexit.register(lambda: print(*loaded(), sep="\\n", file=sys.stderr))
        main(sys.argv[1:])
    """
    process = subprocess.run(
        [sys.executable, "-B", "-c", script, *case.arguments],
        cwd=work, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return [Path(line) for line in process.stderr.splitlines() if os.path.isfile(line)]


def forget(files: Iterable[Path]) -> None:
    """Has the contents of `files` leave the page cache."""
    for path in files:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)  # only what is on the disk can leave
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


if __name__ == "__main__":
    raise SystemExit(main())
