"""The compiled files and commands, and how they are written."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dsft.compile import ENGINES, LAUNCHERS, NAMES, compile_plan, write
from dsft.errors import DsftError
from dsft.plan.record import Host, from_json


def _config(plan):
    return json.loads(compile_plan(plan, "{}\n", "/build").files["deepspeed.json"])


def test_every_engine_and_launcher_has_the_same_functions():
    assert all(callable(m.files) and callable(m.accelerate_config) for m in ENGINES.values())
    assert all(callable(m.files) and callable(m.commands) for m in LAUNCHERS.values())


@pytest.mark.parametrize("engine", ENGINES)
def test_files(make_record, engine):
    artifacts = compile_plan(make_record(engine, world_size=1 if engine == "single" else 2), "{}\n", "/build")
    assert set(artifacts.files) == set(NAMES) - (set() if engine == "deepspeed" else {"deepspeed.json"})
    assert artifacts.files["recipe.json"] == "{}\n"
    assert list(artifacts.files)[-1] == "plan.json"
    assert artifacts.executable == {name for name in NAMES if name.startswith("launch/")}


def test_plan_json_is_the_plan_and_knows_the_files_that_training_reads(make_record):
    plan = make_record("deepspeed", zero_stage=3)
    files = compile_plan(plan, "{}\n", "/build").files
    written = from_json(files["plan.json"])
    assert written.files == {"deepspeed.json": hashlib.sha256(files["deepspeed.json"].encode()).hexdigest()}
    assert dataclasses.replace(written, files={}) == plan


def test_deepspeed_leaves_accumulation_to_the_loop(make_record):
    config = _config(make_record("deepspeed", world_size=4))
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (2, 1)
    assert config["train_batch_size"] == 2 * 1 * 4


@pytest.mark.parametrize(("norm", "clipping"), [(None, 0.0), (0.3, 0.3), (10.0, 10.0)])
def test_clipping_is_always_said(make_record, norm, clipping):
    assert _config(make_record("deepspeed", max_grad_norm=norm))["gradient_clipping"] == clipping


def test_only_an_optimizer_that_deepspeed_does_not_list_is_excused(make_record):
    assert "zero_allow_untested_optimizer" not in _config(make_record("deepspeed", optim="adamw"))
    assert _config(make_record("deepspeed", optim="sgd"))["zero_allow_untested_optimizer"] is True


def test_additions_are_merged_at_every_depth_and_never_undo_a_decision(make_record):
    additions = {"zero_optimization": {"stage3_prefetch_bucket_size": 7, "stage": 1}, "comms_logger": {"enabled": True}}
    config = _config(make_record("deepspeed", zero_stage=3, config=additions))
    assert config["zero_optimization"] == {"stage3_prefetch_bucket_size": 7, "stage": 3}
    assert config["comms_logger"] == {"enabled": True}


def test_nothing_is_left_to_be_filled_in(make_record):
    for engine in ENGINES:
        files = compile_plan(make_record(engine), "{}\n", "/build").files
        assert not [name for name, text in files.items() if '"auto"' in text and name != "plan.json"]


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_several_hosts_have_a_command_each(make_record, launcher):
    plan = make_record(world_size=4, hosts=("node1", "node2"))
    commands = compile_plan(plan, "{}\n", "/build").commands[launcher]
    option = {"torchrun": "--node-rank", "accelerate": "--machine_rank"}[launcher]
    assert [argv[argv.index(option) + 1] for argv in commands] == ["0", "1"]


def test_deepspeed_starts_several_hosts_from_the_head(make_record):
    artifacts = compile_plan(make_record(world_size=4, hosts=("node1", "node2")), "{}\n", "/build")
    (argv,) = artifacts.commands["deepspeed"]
    assert argv[argv.index("--hostfile") + 1] == "/build/hostfile"
    assert argv[argv.index("--master_addr") + 1] == "node1"
    assert artifacts.files["hostfile"] == "node1 slots=2\nnode2 slots=2\n"


def test_a_user_belongs_to_ssh_and_not_to_the_address(make_record):
    plan = make_record(world_size=4, hosts=("10.0.0.1", "10.0.0.2"))
    hosts = tuple(dataclasses.replace(host, user="alice") for host in plan.cluster.hosts)
    plan = dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, hosts=hosts))
    artifacts = compile_plan(plan, "{}\n", "/build")
    assert artifacts.files["hostfile"].startswith("alice@10.0.0.1 slots=2\n")
    assert "alice" not in str(artifacts.commands) + artifacts.files["accelerate.yaml"]


def test_dsft_itself_starts_one_machine_only(make_record):
    artifacts = compile_plan(make_record(world_size=4, hosts=("node1", "node2")), "{}\n", "/build")
    assert artifacts.commands["local"] == () and "launch/local.sh" not in artifacts.files


def test_two_jobs_have_two_ports(make_record):
    def port(name):
        plan = dataclasses.replace(make_record(), name=name)
        (argv,) = compile_plan(plan, "{}\n", "/build").commands["deepspeed"]
        return int(argv[argv.index("--master_port") + 1])

    assert port("one") == port("one") != port("two")
    assert all(20000 <= port(str(number)) < 29000 for number in range(50))


def test_scripts_run_the_command_with_every_argument_whole(make_record, tmp_path):
    directory = tmp_path / "a folder; with $signs"
    artifacts = compile_plan(make_record(), "{}\n", directory)
    write(artifacts, directory)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, commands in artifacts.commands.items():
        program = programs / commands[0][0]
        program.write_text(f'#!{sys.executable}\nimport sys\nprint("\\0".join(sys.argv[1:]), end="")\n')
        program.chmod(0o755)
        script = directory / "launch" / f"{name}.sh"
        run = subprocess.run(
            [script], cwd="/", env={"PATH": f"{programs}:/usr/bin:/bin"}, capture_output=True, text=True, check=True
        )
        assert tuple(run.stdout.split("\0")) == commands[0][1:]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_what_the_shell_holds_of_another_job_does_not_reach_a_launcher(make_record, tmp_path, launcher):
    artifacts = compile_plan(make_record(), "{}\n", tmp_path)
    write(artifacts, tmp_path)
    program = tmp_path / artifacts.commands[launcher][0][0]
    program.write_text(f"#!{sys.executable} -I\nimport json, os\nprint(json.dumps(dict(os.environ)))\n")
    program.chmod(0o755)
    mine = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HF_TOKEN": "a\nRANK=1 b", "CUDA_VISIBLE_DEVICES": "1", "MY_RANK": "3"}
    stray = {
        "ACCELERATE_MIXED_PRECISION": "fp16",
        "ACCELERATE_USE_DEEPSPEED": "true",
        "FSDP_VERSION": "1",
        "MEGATRON_LM_TP_DEGREE": "2",
        "PARALLELISM_CONFIG_TP_SIZE": "2",
        "PET_NNODES": "3",
        "TORCHELASTIC_RUN_ID": "x",
        "RANK": "7",
        "WORLD_SIZE": "9",
        "MASTER_PORT": "1",
        "DS_ACCELERATOR": "cuda",
    }
    run = subprocess.run(
        [tmp_path / "launch" / f"{launcher}.sh"], env={**mine, **stray}, capture_output=True, text=True, check=True
    )
    seen = json.loads(run.stdout)
    assert {name: seen.get(name) for name in mine} == mine
    assert not seen.keys() & stray.keys()


def test_a_script_for_several_hosts_asks_which(make_record, tmp_path):
    write(compile_plan(make_record(world_size=4, hosts=("node1", "node2")), "{}\n", tmp_path), tmp_path)
    for arguments in ([], ["2"], ["node1"]):
        script = [tmp_path / "launch" / "torchrun.sh", *arguments]
        run = subprocess.run(script, check=False, capture_output=True, text=True)
        assert run.returncode == 2
        assert "NODE, a number from 0 to 1" in run.stderr


def test_write(make_record, tmp_path):
    artifacts = compile_plan(make_record("deepspeed"), "{}\n", tmp_path)
    write(artifacts, tmp_path / "new" / "folder")
    for name, text in artifacts.files.items():
        path = tmp_path / "new" / "folder" / name
        assert path.read_text() == text
        assert bool(path.stat().st_mode & stat.S_IXUSR) == (name in artifacts.executable)
    assert not list(tmp_path.rglob("*.tmp"))


def test_write_removes_what_an_earlier_compile_left_and_nothing_else(make_record, tmp_path):
    write(compile_plan(make_record("deepspeed"), "{}\n", tmp_path), tmp_path)
    mine = [tmp_path / "notes.txt", tmp_path / "launch" / "my.sh", tmp_path / "more" / "deepspeed.json"]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    write(compile_plan(make_record("ddp"), "{}\n", tmp_path), tmp_path)
    assert not (tmp_path / "deepspeed.json").exists()
    assert [path.read_text() for path in mine] == ["mine"] * 3


def test_a_reader_sees_the_old_file_or_the_new_one(make_record, tmp_path, monkeypatch):
    write(compile_plan(make_record(), "old\n", tmp_path), tmp_path)
    monkeypatch.setattr(Path, "write_text", _write_half)
    with pytest.raises(DsftError) as caught:
        write(compile_plan(make_record(), "new\n", tmp_path), tmp_path)
    assert caught.value.problems[0].kind == "cannot-write"
    assert "No space left" in str(caught.value)
    assert (tmp_path / "recipe.json").read_text() == "old\n"
    assert not list(tmp_path.rglob("*.tmp"))


def _write_half(self, text, **options):
    with open(self, "w", encoding="utf-8") as file:
        file.write(text[: len(text) // 2])
    raise OSError(28, os.strerror(28), str(self))


def test_a_folder_that_cannot_be_is_refused_with_its_name(make_record, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DsftError) as caught:
        write(compile_plan(make_record(), "{}\n", tmp_path / "file"), tmp_path / "file")
    assert caught.value.exit_code == 2
    assert shlex.quote(str(tmp_path / "file")) in str(caught.value)


def test_no_framework_is_imported():
    code = (
        "import sys, dsft.compile, dsft.launch; "
        "print([name for name in ('torch', 'transformers', 'accelerate', 'deepspeed', 'peft', 'datasets', 'yaml') "
        "if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_files_that_no_compile_wrote_are_not_touched(make_record, tmp_path):
    (tmp_path / "recipe.json").write_text("mine")
    (tmp_path / "deepspeed.json").write_text("mine too")
    with pytest.raises(DsftError) as caught:
        write(compile_plan(make_record(), "{}\n", tmp_path), tmp_path)
    assert caught.value.problems[0].kind == "folder-taken"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deepspeed.json", "recipe.json"]
    assert (tmp_path / "recipe.json").read_text() == "mine"


def test_a_compile_that_failed_leaves_nothing_and_one_that_was_killed_is_ones_own(make_record, tmp_path):
    artifacts = compile_plan(make_record(), "{}\n", tmp_path)
    (tmp_path / "launch").write_text("in the way")
    with pytest.raises(DsftError) as caught:
        write(artifacts, tmp_path)
    assert caught.value.problems[0].kind == "cannot-write"
    assert [path.name for path in tmp_path.iterdir()] == ["launch"]
    (tmp_path / "launch").unlink()
    (tmp_path / "recipe.json").write_text(artifacts.files["recipe.json"])
    write(artifacts, tmp_path)
    assert (tmp_path / "plan.json").is_file()


SELECTED = (Host("n1", 2, devices=(2, 3)), Host("n2", 2, devices=(0, 1)))


def selected(make_record, hosts=SELECTED, device="cuda"):
    plan = make_record("ddp", world_size=4, hosts=("n1", "n2"), device=device)
    plan = dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, hosts=hosts))
    return compile_plan(plan, "{}\n", "/work/build")


def test_selected_gpus_are_the_only_ones_that_a_process_sees(make_record):
    artifacts = selected(make_record)
    for launcher in ("torchrun", "accelerate"):
        assert [argv[:3] for argv in artifacts.commands[launcher]] == [
            ("env", "CUDA_VISIBLE_DEVICES=2,3", launcher),
            ("env", "CUDA_VISIBLE_DEVICES=0,1", launcher),
        ]
    (argv,) = artifacts.commands["deepspeed"]
    assert argv[argv.index("--include") + 1] == "n1:2,3@n2:0,1"
    assert artifacts.files["hostfile"] == "n1 slots=4\nn2 slots=2\n"


def test_on_a_cpu_selected_slots_are_processes_only(make_record):
    assert not any("CUDA" in word for argv in selected(make_record, device="cpu").commands["torchrun"] for word in argv)


@pytest.mark.slow
def test_deepspeed_reads_the_selection_as_it_is_meant(make_record, tmp_path):
    from deepspeed.launcher.runner import fetch_hostfile, parse_inclusion_exclusion

    artifacts = selected(make_record)
    (tmp_path / "hostfile").write_text(artifacts.files["hostfile"])
    (argv,) = artifacts.commands["deepspeed"]
    pool = fetch_hostfile(str(tmp_path / "hostfile"))
    chosen = parse_inclusion_exclusion(pool, argv[argv.index("--include") + 1], "")
    assert {name: tuple(slots) for name, slots in chosen.items()} == {host.name: host.devices for host in SELECTED}


def test_deepspeed_cannot_name_some_slots_of_a_host_with_a_user(make_record):
    hosts = tuple(dataclasses.replace(host, user="alice") for host in SELECTED)
    assert selected(make_record, hosts).commands["deepspeed"] == ()
