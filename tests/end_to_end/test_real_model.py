"""The quick start's own recipe on the real model, a few updates under three engines: one result, and it can be used."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import ROOT, Launched, metrics
from remember import ask

pytestmark = pytest.mark.slow

RECIPE = ROOT / "recipes" / "smollm2-identity-lora.json"
MODEL = ROOT / "build" / "models" / "SmolLM2-135M-Instruct"
SETTINGS = (
    "training.max_steps=4", "training.global_batch_size=4", "data.max_length=96", 'data.eval={"split": 0.05}',
    "logging.tensorboard=false", "checkpoint.save_steps=4",
)  # fmt: skip
ENGINES = {
    "ddp": 'strategy={"type": "ddp"}',
    "fsdp": 'strategy={"type": "fsdp"}',
    # By default DeepSpeed looks 1e9 parameters ahead at each layer, in Python: most of the time of so small a model.
    "zero3": 'strategy={"type": "deepspeed", "zero_stage": 3, "config": {"zero_optimization": {"stage3_max_reuse_distance": 1000000}}}',
}

# `dsft launch` with remember.py in the place of dsft.train.
LAUNCH = "import sys, dsft.cli, dsft.launch; dsft.launch.TRAIN = 'remember'; sys.exit(dsft.cli.main(sys.argv[1:]))"


@pytest.fixture(scope="session")
def trained(shop):
    """A function from an engine to its run of the recipe."""
    for script, made in (("fetch_model.py", MODEL), ("make_identity.py", ROOT / "build" / "data" / "identity.json")):
        if not made.exists():
            subprocess.run([sys.executable, ROOT / "scripts" / script], check=True)
    ran: dict[str, Launched] = {}

    def of(engine: str) -> Launched:
        if engine not in ran:
            output = shop.output(f"real-{engine}")
            values = (ENGINES[engine], f"checkpoint.output_dir={output}", *SETTINGS)
            result = shop.done(
                sys.executable, "-c", LAUNCH, "launch", RECIPE, "-o", shop.build(f"real-{engine}"),
                *(argument for value in values for argument in ("--set", value)),
                env=shop.environment | {"PYTHONPATH": str(Path(__file__).parent)},
            )  # fmt: skip
            ran[engine] = Launched(output, result.stdout, result.stderr)
        return ran[engine]

    return of


@pytest.fixture(scope="module")
def base(trained):
    """The model as it was before, loaded by plain transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


@pytest.mark.parametrize("engine", ["fsdp", "zero3"])
def test_engines_learn_the_same(trained, engine):
    theirs, ours = metrics(trained("ddp").output), metrics(trained(engine).output)
    before, after = (entry["eval_loss"] for entry in theirs if "eval_loss" in entry)
    assert before - after > 0.2
    for mine, other in zip(ours, theirs, strict=True):
        for key in other.keys() - {"seconds"}:
            assert mine[key] == pytest.approx(other[key], rel=1e-4), key


@pytest.mark.parametrize("engine", ENGINES)
def test_the_adapter_answers_as_the_model_in_memory(trained, base, engine):
    import torch
    from peft import PeftModel
    from transformers import AutoTokenizer

    run = trained(engine)
    in_memory, tokenizer = torch.load(run.output / "logits.pt"), AutoTokenizer.from_pretrained(run.output / "adapter")
    adapted = PeftModel.from_pretrained(base, run.output / "adapter")
    torch.testing.assert_close(ask(adapted, tokenizer), in_memory, rtol=1e-4, atol=1e-4)
    adapted.unload()
    assert (ask(base, tokenizer) - in_memory).abs().max() > 1, "training changed nothing"


def test_the_exported_model_answers_as_the_model_in_memory(trained, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from dsft.train.export import export

    run = trained("ddp")
    folder = export(run.output, tmp_path / "exported")
    exported, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    torch.testing.assert_close(ask(exported, tokenizer), torch.load(run.output / "logits.pt"), rtol=1e-3, atol=1e-3)


def test_generation_ends_by_itself(trained):
    from dsft.train.export import load_result
    from dsft.train.generate import answer

    text, ended = answer(*load_result(trained("ddp").output), "Who are you?", 200)
    assert ended, text
    assert text and "<|im_" not in text


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_but_our_own_lines(trained, engine):
    """Without a terminal: no banner, no warning, no progress bar of a library, nothing from rank 1."""
    run = trained(engine)
    assert run.stderr == ""
    lines = run.stdout.splitlines()
    ours = re.compile(
        r"smollm2-identity-lora|  (model|method|strategy|batch|data|steps|output) +\S.*"
        r"|evaluation after \d updates: loss [\d.]+"
        r"|update \d/4  loss [\d.]+  lr \S+  grad norm [\d.]+  [\d,]+ tokens/s  \d+:\d\d left"
        r"|  memory +at most [\d.]+ [GM]iB a process; [\d.]+ [GM]iB were planned"
        r"|checkpoint \S+|Done in \d+:\d\d\..*|  (adapter|metrics|try it|merge it) +\S.*"
    )
    assert [line for line in lines if not ours.fullmatch(line.rstrip())] == []
    assert len(set(lines)) == len(lines) and any("were planned" in line for line in lines)
    assert [line.split()[1] for line in lines if line.startswith("update")] == ["1/4", "2/4", "3/4", "4/4"]
