"""dsft init, as a user calls it: by flags, and in a dialogue on a terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from workshop import Workshop

from dsft import cli
from dsft.recipe.schema import load_schema

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ["--model", "model", "--data", "rows.json", "--method", "lora"]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The working directory: a model's folder, alpaca rows in rows.json, two machines in hosts, and no terminal."""
    Workshop(tmp_path).write("hosts", "node1 slots=4\nnode2 slots=4\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def init(*arguments: str) -> int:
    with open(os.devnull) as nothing, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", nothing)
        return cli.main(["init", *arguments])


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize(
    "hardware",
    [
        ["--cpu"],
        ["--cpu", "--gpus-per-node", "2"],
        ["--gpu", "h100-80gb"],
        ["--gpu", "t4", "--gpus-per-node", "3"],
        ["--gpus-per-node", "1"],
        ["--gpus-per-node", "8"],
        ["--hostfile", "hosts"],
        ["--hostfile", "hosts", "--gpu", "l4", "--gpus-per-node", "4"],
        ["--hostfile", "hosts", "--cpu"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("model", ["model", "org/name"])
def test_what_is_written_compiles(folder, model, hardware, method, capsys):
    assert init("--model", model, *FLAGS[2:-1], method, *hardware) == 0
    out, err = capsys.readouterr()
    assert err.count("warning[") == err.count("warning[model-not-cached]") == (model == "org/name")
    known = model == "model" and ("--gpu" in hardware or "--cpu" in hardware)
    strategy = json.loads(Path("recipe.json").read_text())["strategy"]["type"]
    assert (strategy == "auto") == known == ("The strategy is a guess." not in out)
    assert cli.main(["check", "recipe.json", "--json"]) == 0
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert [problem["kind"] for problem in problems] == ["model-not-cached"] * (model == "org/name")
    assert cli.main(["compile", "recipe.json", "-o", "out"]) == 0
    assert jsonschema.Draft202012Validator(load_schema()).is_valid(json.loads(Path("recipe.json").read_text()))


def test_a_family_without_sdpa_gets_eager_attention(folder, capsys):
    path = Workshop(folder).published("google/gemma-2-2b")
    assert init("--model", path, *FLAGS[2:-1], "lora", "--gpu", "h100-80gb") == 0
    assert json.loads(Path("recipe.json").read_text())["model"]["attn_implementation"] == "eager"
    assert cli.main(["check", "recipe.json"]) == 0


def test_several_machines(folder):
    assert init(*FLAGS, "--hostfile", "hosts") == 0
    recipe = json.loads(Path("recipe.json").read_text())
    assert recipe["cluster"] == {"device": "cuda", "hostfile": "hosts"}
    assert recipe["training"]["global_batch_size"] == 8


def test_what_only_the_recipe_can_mend_is_reported_and_the_recipe_written(folder, capsys):
    """A base model without a chat template; one that is too large; fewer rows than processes."""
    workshop = Workshop(folder)
    workshop.model("base", template=None)
    workshop.model("large", vocab_size=2**28)
    assert init("base.json", "--model", "base", *FLAGS[2:], "--cpu") == 2
    assert "base.json:4:21: error[no-chat-template]" in capsys.readouterr().err
    recipe = json.loads(Path("base.json").read_text())
    recipe["data"]["chat_template"] = "chatml.jinja"
    workshop.write("base.json", recipe)
    workshop.write("chatml.jinja", "{{ messages }}")
    assert cli.main(["check", "base.json"]) == 0
    assert init("large.json", "--model", "large", *FLAGS[2:], "--gpu", "l4") == 2
    assert "error[does-not-fit]" in capsys.readouterr().err and Path("large.json").exists()
    workshop.write("rows.json", [{"instruction": "Hi", "output": "Hello"}] * 3)
    assert init("few.json", *FLAGS, "--gpu", "l4", "--gpus-per-node", "8") == 0
    assert "warning[few-rows]" in capsys.readouterr().err


def test_every_field_is_printed_with_its_meaning(folder, capsys):
    assert init(*FLAGS, "--cpu") == 0
    lines = capsys.readouterr().out.splitlines()
    assert '  model.path: "./model"' in lines
    described = [
        (field, lines[at + 1]) for at, field in enumerate(lines[:-2]) if field.startswith("  ") and field[2] != " "
    ]
    written = json.loads(Path("recipe.json").read_text())
    assert [field.split(":")[0].strip() for field, _ in described] == list(leaves(written))
    assert all(meaning.startswith("      ") and meaning.endswith(".") for _, meaning in described)


def leaves(value: dict, path: str = ""):
    for name, inner in value.items():
        if isinstance(inner, dict):
            yield from leaves(inner, f"{path}{name}.")
        else:
            yield path + name


@pytest.mark.parametrize("format", ["alpaca", "messages"])
def test_the_format_is_that_of_the_first_row(folder, format):
    row = {
        "alpaca": {"instruction": "Name a colour.", "output": "Blue"},
        "messages": {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
    }[format]
    Path("rows.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
    assert init(*FLAGS[:2], "--data", "rows.jsonl", "--method", "lora", "--cpu") == 0
    assert json.loads(Path("recipe.json").read_text())["data"]["train"][0]["format"] == format


def test_rows_and_the_model_decide_the_length(folder):
    rows = [{"instruction": "Tell me more.", "output": "word " * 300}] * 3  # 1,500 bytes of text
    Path("rows.json").write_text(json.dumps(rows))
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 64}
    for positions, length in ((4096, 1024), (256, 256)):
        sizes = {"n_positions": positions, "n_embd": 32, "n_layer": 2, "n_head": 2}
        Path("model/config.json").write_text(json.dumps(config | sizes))
        assert init(f"{positions}.json", *FLAGS, "--cpu") == 0
        assert json.loads(Path(f"{positions}.json").read_text())["data"]["max_length"] == length


def test_paths_are_relative_to_the_recipe(folder, monkeypatch, capsys):
    (folder / "jobs").mkdir()
    assert init("jobs/mine.json", *FLAGS, "--cpu") == 0
    recipe = json.loads(Path("jobs/mine.json").read_text())
    assert (recipe["model"]["path"], recipe["data"]["train"][0]["path"]) == ("../model", "../rows.json")
    elsewhere = shutil.copytree(folder, folder / "elsewhere")
    monkeypatch.chdir(elsewhere)
    assert cli.main(["check", "jobs/mine.json"]) == 0
    schema = elsewhere / "jobs" / recipe["$schema"]
    assert json.loads(schema.read_text()) == load_schema(), "the copy goes with the recipe"


def test_in_a_checkout_the_schema_is_not_copied(folder):
    from dsft.init import schema_place

    assert schema_place(ROOT / "recipes" / "mine.json") == "../schemas/recipe.schema.json"
    assert schema_place(folder / "mine.json") == "recipe.schema.json"


def test_nothing_is_overwritten(folder, capsys):
    Path("recipe.json").write_text("mine")
    Path("recipe.schema.json").write_text("mine too")
    assert init(*FLAGS, "--cpu") == 2
    assert "error[target-exists]: recipe.json is already there" in capsys.readouterr().err
    assert init("other.json", *FLAGS, "--cpu") == 0
    assert Path("recipe.json").read_text() == "mine"
    assert Path("recipe.schema.json").read_text() == "mine too"


def test_all_missing_flags_are_named_where_nobody_can_be_asked(folder, capsys):
    before = sorted(folder.rglob("*"))
    assert init() == 2
    err = capsys.readouterr().err
    assert all(flag in err for flag in ("--model", "--data", "--method", "--cpu", "--gpu", "--hostfile"))
    assert init("--model", "model", "--cpu") == 2
    assert "not given: --data, --method\n" in capsys.readouterr().err
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        (["--model", "./modle"], "model-not-found"),
        (["--data", "row.json"], "file-not-found"),
        (["--data", "model/config.json"], "wrong-format"),
        (["--method", "qlora"], "not-allowed-value"),
        (["--format", "sharegpt"], "not-allowed-value"),
        (["--gpu", "h1000"], "not-allowed-value"),
        (["--cpu", "--gpu", "t4"], "contradiction"),
        (["--hostfile", "no-such-file"], "file-not-found"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_a_wrong_answer_is_said_and_nothing_written(folder, changed, kind, capsys):
    before = sorted(folder.rglob("*"))
    hardware = [] if {"--gpu", "--hostfile"} & set(changed) else ["--cpu"]
    assert init(*FLAGS, *hardware, *changed) == 2
    assert f"error[{kind}]" in capsys.readouterr().err
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("hardware", "precision"), [(["--cpu"], "fp32"), (["--gpu", "t4"], "fp32"), (["--gpu", "l4"], "bf16")], ids=str
)
def test_precision_is_one_that_the_device_has(folder, hardware, precision):
    assert init(*FLAGS, *hardware) == 0
    assert json.loads(Path("recipe.json").read_text())["training"]["precision"] == precision


def dialogue(folder: Path, *answers: str | Callable[[], str]) -> tuple[int, str]:
    """`dsft init` on a terminal, each answer given when it is asked for: the exit code and all that was shown."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "dsft", "init"]
    process = subprocess.Popen(command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown, left = b"", list(answers)
    while select.select([ours], [], [], 30)[0]:
        try:
            shown += os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if shown.endswith(b"> ") and left:
            answer = left.pop(0)
            answer = answer if isinstance(answer, str) else answer()
            os.write(ours, answer.encode() if answer == "\x04" else f"{answer}\n".encode())
            shown += b"\n"
    os.close(ours)
    return process.wait(60), shown.decode()


def test_a_dialogue(folder):
    answers = ("./modle", "not a model", "./model", "", "model", "rows.json", "qlora", "", "cpu")
    code, shown = dialogue(folder, *answers)
    assert code == 0, shown
    assert f"did you mean {folder / 'model'}?" in shown and "neither a folder here nor a hub id" in shown
    assert "model is a directory, not a data file" in shown and "qlora is none of lora, full" in shown
    assert "Model. A folder with config.json" in shown and "Next: dsft check recipe.json" in shown
    recipe = json.loads((folder / "recipe.json").read_text())
    assert recipe["method"] == {"type": "lora"} and recipe["cluster"]["device"] == "cpu"


def test_a_dialogue_about_gpus(folder):
    code, shown = dialogue(folder, "org/name", "rows.json", "full", "h100-80gb", "none", "9999", "8")
    assert code == 0, shown
    recipe = json.loads((folder / "recipe.json").read_text())
    assert recipe["cluster"] == {"device": "cuda", "gpu": "h100-80gb", "processes_per_node": 8}
    assert recipe["model"] == {"path": "org/name"}


def test_a_dialogue_overwrites_nothing(folder):
    file = folder / "recipe.json"

    def meanwhile() -> str:
        file.write_text("mine")
        return "cpu"

    code, shown = dialogue(folder, "./model", "rows.json", "lora", meanwhile)
    assert code == 2 and "error[target-exists]" in shown and file.read_text() == "mine"
    code, shown = dialogue(folder)
    assert code == 2 and "error[target-exists]" in shown and "> " not in shown, "said before anything is asked"


def test_a_dialogue_that_is_left(folder):
    before = sorted(folder.rglob("*"))
    code, shown = dialogue(folder, "./model", "\x04")
    assert code == 2 and "error[missing-flag]" in shown and "--data, --method" in shown
    assert sorted(folder.rglob("*")) == before
