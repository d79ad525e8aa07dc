"""`dsft plan` and `dsft diff`: alternatives of one job side by side, and two jobs."""

from __future__ import annotations

import json

import pytest
from workshop import COMPLETE, Workshop

from dsft import cli
from dsft.plan.describe import MOMENTS

AUTO = {"max_steps": 5, "global_batch_size": 32, "learning_rate": 1e-5}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    workshop = Workshop(tmp_path)
    cluster = {"gpu": "h100-80gb", "processes_per_node": 8}
    job = {"model": {"path": workshop.published("meta-llama/Llama-3.1-8B")}, "training": AUTO, "cluster": cluster}
    workshop.write("auto.json", COMPLETE | job | {"strategy": {"type": "auto"}, "method": {"type": "full"}})
    workshop.write("ddp.json", COMPLETE | job | {"strategy": {"type": "ddp"}, "method": {"type": "full"}})
    workshop.write("small.json", COMPLETE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows(out: str) -> list[str]:
    head, *lines = out.split("\n\n")[1].split("\n")
    assert head.split() == [
        "strategy",
        "recompute",
        "rows",
        "x",
        "passes",
        "memory",
        "part",
        "s/update",
        "host",
        "memory",
    ]
    return lines


def test_plan_shows_every_strategy_and_the_one_chosen(folder, capsys):
    assert cli.main(["plan", "auto.json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("LlamaForCausalLM, 8.03 billion parameters; full, bf16, 32 rows of up to 128 tokens\n")
    names = [line[2:].partition("  ")[0] for line in rows(out)]
    assert names == [
        "ddp",
        "deepspeed ZeRO-1",
        "deepspeed ZeRO-2",
        "fsdp, weights kept gathered",
        "fsdp",
        "deepspeed ZeRO-3",
        "deepspeed ZeRO-2, optimizer in host memory",
        "fsdp, weights and optimizer in host memory",
        "deepspeed ZeRO-3, weights and optimizer in host memory",
    ]
    (chosen,) = [line for line in rows(out) if line.startswith(">")]
    (ddp,) = [line for line in rows(out) if line.startswith("  ddp")]
    assert "too little device memory" in ddp and "too little" not in chosen
    assert "\nChosen: " in out and "too large: ddp" in out


def test_the_table_and_the_numbers_are_of_one_thing(folder, capsys):
    cli.main(["plan", "auto.json", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert said["chosen"] in said["alternatives"] and said["chosen"]["fits"]
    assert said["chosen"]["device_bytes"] <= (1 - said["reserve"]) * said["capacity_bytes"]
    fastest = min(each["seconds_per_update"] for each in said["alternatives"] if each["fits"])
    assert fastest <= said["chosen"]["seconds_per_update"] <= 1.1 * fastest
    assert {each["lacks"] for each in said["alternatives"] if not each["fits"]} == {"device memory"}
    cli.main(["compile", "auto.json", "-o", "build"])
    compiled = json.loads((folder / "build" / "plan.json").read_text())
    assert compiled["strategy"] == said["chosen"]["strategy"] and compiled["batch"] == said["chosen"]["batch"]
    assert compiled["estimate"]["memory"] == said["chosen"]["memory"]


def test_plan_for_other_gpus_and_machines(folder, capsys):
    assert cli.main(["plan", "auto.json", "--gpu", "a100-40gb", "--nodes", "4"]) == 0
    out = capsys.readouterr().out
    assert "4 machines with 8 processes each on a100-40gb; 39.4 GiB a process" in out
    assert any("fsdp hybrid" in line for line in rows(out))
    assert cli.main(["plan", "small.json", "--gpu", "t4", "--set", "training.precision=fp32"]) == 0
    assert "1 machine with 2 processes each on t4" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", "auto.json", "--nodes", "999999999"])
    assert stopped.value.code == 2 and "more than 10000" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", "auto.json", "--gpu", "h1000"])
    assert stopped.value.code == 2 and "argument --gpu: 'h1000' is none of " in capsys.readouterr().err


def test_plan_of_what_does_not_fit_shows_the_table_and_the_error(folder, capsys):
    assert cli.main(["plan", "ddp.json"]) == 2
    out, err = capsys.readouterr()
    assert not any(line.startswith(">") for line in rows(out)) and "Chosen" not in out
    assert "error[does-not-fit]: ddp needs about" in err and "this would fit: " in err
    assert cli.main(["plan", "ddp.json", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["chosen"] is None


def test_plan_on_cpus_has_no_times(folder, capsys):
    assert cli.main(["plan", "small.json"]) == 0
    out = capsys.readouterr().out
    assert "on cpu" in out and any(line.startswith("> ddp") for line in rows(out))
    assert cli.main(["plan", "small.json", "--json"]) == 0
    assert {each["seconds_per_update"] for each in json.loads(capsys.readouterr().out)["alternatives"]} == {None}


def test_plan_without_the_kind_of_gpu(folder, capsys):
    assert cli.main(["plan", "auto.json", "--set", "cluster.gpu=null"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "error[not-known]" in err and '"gpu": "h100-80gb"' in err


def test_no_difference(folder, capsys):
    assert cli.main(["diff", "auto.json", "auto.json"]) == 0
    assert capsys.readouterr().out.startswith("plan\n  no difference\n")
    cli.main(["diff", "auto.json", "auto.json", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert (said["plan"], said["files"]) == ({}, {})
    assert all(old == new for old, new in said["memory"].values())


def test_diff_shows_plan_files_and_memory(folder, capsys):
    text = (folder / "auto.json").read_text()
    for stage in (2, 3):
        changed = text.replace('"type": "auto"', f'"type": "deepspeed", "zero_stage": {stage}')
        (folder / f"zero{stage}.json").write_text(changed)
    assert cli.main(["diff", "zero2.json", "zero3.json"]) == 0
    out = capsys.readouterr().out
    assert "\n  strategy.zero_stage: 2 -> 3\n" in out and "--- a/deepspeed.json" in out
    assert cli.main(["diff", "ddp.json", "zero3.json"]) == 2
    assert "error[does-not-fit]" in capsys.readouterr().err
    cli.main(["diff", "zero2.json", "zero3.json", "--json"])
    said = json.loads(capsys.readouterr().out)
    old, new = said["memory"]["weights"]
    assert new == pytest.approx(old / 8, rel=0.01)
    assert said["memory"]["in all"][1] < said["memory"]["in all"][0]
    assert f"memory of a process {MOMENTS[said['moments'][1]]}" in out
    assert said["plan"]["strategy.zero_stage"][1] == 3


def test_diff_of_folders_that_were_compiled(folder, capsys):
    for name in ("one", "two"):
        cli.main(["compile", "small.json", "-o", name, "--set", f"training.seed={len(name) + (name == 'two')}"])
    capsys.readouterr()
    assert cli.main(["diff", "one", "two"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("plan\n  training.seed: 3 -> 4\n") and '+    "seed": 4' in out
    assert cli.main(["diff", "one", "nowhere"]) == 2
    assert "error[" in capsys.readouterr().err
