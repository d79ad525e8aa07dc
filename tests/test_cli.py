"""What a user sees of each command: output, errors and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from workshop import COMPLETE, Workshop

import dsft
from dsft import cli
from dsft.recipe.schema import load_schema


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    Workshop(tmp_path).write("recipe.json", COMPLETE)
    monkeypatch.chdir(tmp_path)
    return "recipe.json"


def test_check(recipe, capsys):
    assert cli.main(["check", recipe]) == 0
    assert "16 rows = 4 per device x 2 accumulation x 2 processes" in capsys.readouterr().out


def test_check_of_a_wrong_recipe(recipe, capsys):
    assert cli.main(["check", recipe, "--set", "training.max_step=3", "--set", "strategy.type=dp"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert 'did you mean "max_steps"?' in err and 'write "ddp"' in err and err.count("error[") == 2


def test_check_as_json(recipe, capsys):
    assert cli.main(["check", recipe, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ok": True, "problems": []}
    assert cli.main(["check", recipe, "--json", "--set", "nmae=x"]) == 2
    out, err = capsys.readouterr()
    (problem,) = json.loads(out)["problems"]
    assert (problem["kind"], problem["help"], err) == ("unknown-key", 'did you mean "name"?', "")
    assert problem["where"] == {
        "file": None, "argument": "--set nmae=x", "line": None, "column": None, "end": None
    }  # fmt: skip


def test_check_as_json_gives_places(recipe, tmp_path, capsys):
    text = (tmp_path / recipe).read_text()
    (tmp_path / recipe).write_text(text.replace('"max_length": 128', '"max_length": 1.5'))
    assert cli.main(["check", recipe, "--format", "json"]) == 2
    said = json.loads(capsys.readouterr().out)
    (problem,) = said["problems"]
    assert said["ok"] is False
    assert (problem["severity"], problem["kind"]) == ("error", "wrong-type")
    where = problem["where"]
    line = (tmp_path / recipe).read_text().split("\n")[where["line"] - 1]
    assert (where["file"], line[where["column"] - 1 : where["end"] - 1]) == (recipe, "1.5")


def test_check_for_github(recipe, tmp_path, capsys):
    text = (tmp_path / recipe).read_text()
    (tmp_path / "a,b:c%.json").write_text(text.replace('"max_steps": 5', '"max_stps": 5'))
    assert cli.main(["check", "a,b:c%.json", "--format", "github", "--set", "strategy.type=dp"]) == 2
    out, err = capsys.readouterr()
    first, second = out.splitlines()
    assert err == ""
    assert first == (
        '::error file=a%2Cb%3Ac%25.json,line=22,col=5,endColumn=15,title=unknown-key::unknown key "max_stps" in '
        '"training"%0Ahelp: did you mean "max_steps"?'
    )
    assert second.startswith(
        '::error title=not-allowed-value::--set strategy.type=dp: "strategy.type" cannot be "dp"%0A'
    )


WARNS = ["--set", "training.optim=sgd", "--set", "training.adam_beta1=0.5"]


def test_a_warning_is_no_failure(recipe, tmp_path, capsys):
    for command in (["check", recipe], ["compile", recipe, "-o", "out"], ["launch", recipe, "--dry-run"]):
        assert cli.main([*command, *WARNS]) == 0
        out, err = capsys.readouterr()
        assert "tiny" in out and "warning[" not in out
        assert err.startswith("--set training.adam_beta1=0.5: warning[no-effect]") and err.count("warning[") == 1
    assert cli.main(["check", recipe, *WARNS, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] is True and [problem["severity"] for problem in said["problems"]] == ["warning"]
    assert cli.main(["check", recipe, *WARNS, "--format", "github"]) == 0
    assert capsys.readouterr().out.startswith("::warning title=no-effect::")


def test_warnings_are_reported_with_errors(recipe, capsys):
    assert cli.main(["check", recipe, *WARNS, "--set", "nmae=x"]) == 2
    err = capsys.readouterr().err
    assert err.count("warning[") == 1 and err.count("error[") == 1


def test_check_writes_nothing(recipe, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    cli.main(["check", recipe])
    cli.main(["launch", recipe, "--dry-run"])
    assert sorted(tmp_path.rglob("*")) == before


def test_compile(recipe, tmp_path, capsys):
    assert cli.main(["compile", recipe, "-o", "out"]) == 0
    out = capsys.readouterr().out
    for said in ("ddp", "16 rows = 4 per device x 2 accumulation x 2 processes", "runs/tiny", "plan.json", "torchrun"):
        assert said in out
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert plan["versions"]["python"] == f"{sys.version_info[0]}.{sys.version_info[1]}"


def test_compile_tells_the_memory_of_a_gpu_and_of_its_machine(recipe, capsys):
    for device, machine in ((["--set", "cluster.device=cuda", "--set", "cluster.gpu=l4"], True), ([], False)):
        assert cli.main(["compile", recipe, *device]) == 0
        out = capsys.readouterr().out
        assert "  memory    about " in out and ("of each machine's own memory" in out) == machine


def test_compile_goes_to_build(recipe, tmp_path):
    assert cli.main(["compile", recipe]) == 0
    assert (tmp_path / "build" / "tiny" / "plan.json").is_file()


def test_what_was_compiled_compiles_to_the_same_from_elsewhere(recipe, tmp_path, monkeypatch):
    cli.main(["compile", recipe, "-o", "out"])
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.is_file()}
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert cli.main(["compile", "../out/recipe.json", "-o", "../out"]) == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.is_file()} == before


def test_launch_dry_run(recipe, capsys):
    assert cli.main(["launch", recipe, "--dry-run"]) == 0
    assert capsys.readouterr().out.count("-m dsft.train") == 2


def test_launch_of_what_can_only_be_planned(recipe, tmp_path, capsys):
    (tmp_path / "model" / "pytorch_model.bin").unlink()
    assert cli.main(["compile", recipe]) == 0 and "warning[model-partial]" in capsys.readouterr().err
    assert cli.main(["launch", recipe, "--dry-run", "-o", "new"]) == 0 and "warning[" in capsys.readouterr().err
    assert cli.main(["launch", recipe, "-o", "new"]) == 2 and "error[model-partial]" in capsys.readouterr().err
    assert not (tmp_path / "new").exists() and not (tmp_path / "runs").exists()


def test_launch_into_the_folder_of_something_else(recipe, tmp_path, capsys):
    (tmp_path / "runs" / "tiny" / "checkpoints").mkdir(parents=True)
    assert cli.main(["check", recipe]) == 0 and "warning[folder-taken]" in capsys.readouterr().err
    assert cli.main(["launch", recipe, "-o", "new"]) == 2 and "error[folder-taken]" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_launch_into_a_folder_that_cannot_be_written_to(recipe, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o555)
    lowered = "-dac_override,-dac_read_search"  # by which root may write everywhere
    as_user = ["setpriv", f"--bounding-set={lowered}", f"--inh-caps={lowered}"] if os.getuid() == 0 else []
    said = ["--set", "checkpoint.output_dir=closed/below"]
    for command, code, severity in ((["check"], 0, "warning"), (["launch", "-o", "new"], 2, "error")):
        argv = [*as_user, sys.executable, "-m", "dsft", *command, recipe, *said]
        run = subprocess.run(argv, check=False, capture_output=True, text=True, cwd=tmp_path, timeout=60)
        assert run.returncode == code and f"{severity}[cannot-write]" in run.stderr, run.stderr
    assert not (tmp_path / "new").exists()


def test_schema(capsys):
    assert cli.main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == load_schema()


@pytest.mark.parametrize("arguments", [[], ["chek"], ["check"], ["compile", "a", "--no"], ["export", "a"]])
def test_usage(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: dsft" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["0", "-1", "x", "1.5", "9" * 5000])
def test_a_count_is_a_whole_number_above_0(number, capsys):
    with pytest.raises(SystemExit):
        cli.main(["plan", "recipe.json", f"--nodes={number}"])
    assert "is not a whole number above 0" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert (caught.value.code, capsys.readouterr().out) == (0, f"dsft {dsft.__version__}\n")


def test_interrupted(recipe, monkeypatch):
    monkeypatch.setattr("dsft.plan.make_plan", interrupt)
    assert cli.main(["check", recipe]) == 130


def interrupt(*arguments, **options):
    raise KeyboardInterrupt


def test_a_fault_of_dsft_is_one_line_and_a_trace_with_debug(recipe, monkeypatch, capsys):
    monkeypatch.setattr("dsft.plan.make_plan", lambda *a, **k: 1 / 0)
    assert cli.main(["check", recipe]) == 1
    err = capsys.readouterr().err
    assert err.startswith("internal error: ZeroDivisionError") and err.count("\n") == 1 and "--debug" in err
    for arguments in (["check", recipe, "--debug"], ["--debug", "check", recipe]):
        with pytest.raises(ZeroDivisionError):
            cli.main(arguments)


@pytest.mark.parametrize(
    "arguments",
    [["schema"], ["check", "recipe.json"], ["check", "recipe.json", "--set", "nme=1", "--format", "json"]],
    ids=["long", "short", "errors"],
)
def test_a_reader_that_has_gone_away(recipe, arguments):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "dsft", *arguments]
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}  # so that a short text is only written at the end
    process = subprocess.run(command, check=False, stdout=write, stderr=subprocess.PIPE, env=buffered)
    os.close(write)
    assert (process.returncode, process.stderr) == (1, b"")


@pytest.mark.parametrize("format", ["json", "github"])
def test_errors_that_cannot_be_written(recipe, format):
    command = f"{sys.executable} -m dsft check recipe.json --set nme=1 --format {format} >/dev/full"
    process = subprocess.run(command, check=False, shell=True, capture_output=True)
    assert process.returncode == 1
    assert process.stderr == b"error[cannot-write]: cannot write to standard output: No space left on device\n"


@pytest.mark.parametrize("arguments", ["schema", "check recipe.json"])
@pytest.mark.parametrize(
    ("output", "code", "said"),
    [
        (">&-", 0, b""),
        (">/dev/full", 1, b"error[cannot-write]: cannot write to standard output: No space left on device\n"),
    ],
)
def test_output_that_cannot_be_written(recipe, arguments, output, code, said):
    command = f"{sys.executable} -m dsft {arguments} {output}"
    process = subprocess.run(command, check=False, shell=True, capture_output=True)
    assert (process.returncode, process.stderr) == (code, said)


def test_a_working_directory_that_was_deleted(recipe, tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert cli.main(["check", str(tmp_path / recipe)]) == 2
    assert (
        "error[no-folder]: the folder that this command was started in is not there any more" in capsys.readouterr().err
    )


@pytest.mark.parametrize("arguments", [["compile", "recipe.json", "-o", "ol\udce9"], ["check", "ol\udce9.json"]])
def test_a_path_that_is_not_utf_8(recipe, tmp_path, monkeypatch, capsys, arguments):
    assert cli.main(arguments) == 2
    assert r"error[not-utf-8]: ol\udce9" in capsys.readouterr().err
    (tmp_path / "ol\udce9").mkdir()
    monkeypatch.chdir(tmp_path / "ol\udce9")
    assert cli.main(["check", str(tmp_path / "recipe.json")]) == 2
    assert r"ol\udce9 is not UTF-8" in capsys.readouterr().err


def test_text_that_the_terminal_cannot_show(recipe):
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "dsft", "compile", recipe, "--set", "checkpoint.output_dir=é"]
    right = subprocess.run(command, check=False, capture_output=True, env=environment)
    wrong = subprocess.run([*command, "--set", "naïve=1"], check=False, capture_output=True, env=environment)
    assert (right.returncode, wrong.returncode) == (0, 2)
    assert rb"\xe9" in right.stdout and b"unknown-key" in wrong.stderr
