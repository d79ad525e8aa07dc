"""What README.md says is so: its commands are run or looked up, its examples compiled, its names found in the code."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from workshop import TOKENIZER, WEIGHTS

from dsft import cli, errors
from dsft.compile import NAMES
from dsft.plan.formats import FORMATS
from dsft.recipe.schema import load_schema

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "README.md"
README = FILE.read_text(encoding="utf-8")
EXAMPLE = "recipes/smollm2-alpaca-lora.json"
PLANNED = "recipes/qwen3-8b.json"
COMMIT = "0" * 40
SLIPS = {'"learning_rate"': '"learning_rte"', '"ddp"': '"dp"', '"global_batch_size": 16': '"global_batch_size": 18'}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def section(title: str) -> str:
    """From a heading to the next."""
    return re.search(rf"^#+ {title}\n(.*?)(?=^#+ |\Z)", README, re.DOTALL | re.MULTILINE)[1]


def rows(title: str) -> list[list[str]]:
    """The cells of the tables in a section, without their heads."""
    bodies = re.sub(r"^\|.*\n\| ---.*\n", "", section(title), flags=re.MULTILINE)
    lines = [line.strip("|").split("|") for line in bodies.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines]


def code(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


COMMANDS = [line for block in blocks("sh") for line in block.splitlines()]
INLINE = code(re.sub(r"^```.*?^```$", "", README, flags=re.DOTALL | re.MULTILINE))


def commands(program: str) -> list[list[str]]:
    return [argv for argv in map(shlex.split, COMMANDS) if argv[0] == program]


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Path:
    """A copy of what the commands read, of models all but true weights; the working directory."""
    for folder in ("recipes", "hostfiles", "data"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "build" / "data").mkdir(parents=True)
    shutil.copy(ROOT / "data" / "identity.json", tmp_path / "build" / "data")
    published = json.loads((ROOT / "tests" / "plan" / "configs" / "published.json").read_text())
    configs = {each["name"]: json.dumps(each["config"]) for each in published}
    model = tmp_path / "build" / "models" / "SmolLM2-135M-Instruct"
    model.mkdir(parents=True)
    (model / "config.json").write_text(configs["HuggingFaceTB/SmolLM2-135M"])
    (model / "pytorch_model.bin").write_bytes(WEIGHTS)
    (model / "tokenizer.json").write_text(TOKENIZER)
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    cached = tmp_path / "hub" / "models--Qwen--Qwen3-8B"  # as `hf download` leaves it
    (cached / "snapshots" / COMMIT).mkdir(parents=True)
    (cached / "snapshots" / COMMIT / "config.json").write_text(configs["Qwen/Qwen3-8B"])
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(COMMIT)
    (tmp_path / PLANNED).write_text(next(block for block in blocks("json") if '"qwen3-8b"' in block))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_command_is_of_a_kind_that_is_tested():
    known = {"make", "dsft", "torchrun", "accelerate", "deepspeed", "hf", ".venv/bin/python", "python3", ".", "pip"}
    assert {shlex.split(line)[0] for line in COMMANDS} == known


@pytest.mark.parametrize("argv", commands("dsft"), ids=" ".join)
def test_dsft_commands(argv, repository):
    """Those that load no torch are run, a launch as far as what it would start; of the others the usage is checked."""
    arguments = argv[1:]
    if arguments[0] in ("check", "compile", "diff", "explain", "init", "plan"):
        assert cli.main(arguments) == 0
    elif arguments[0] == "launch":
        assert cli.main([*arguments, "--dry-run"]) == 0
    else:
        cli._parser().parse_args(arguments)


def test_commands_within_sentences():
    parser = cli._parser()
    for text in INLINE:
        words = shlex.split(text)
        if words[0] == "dsft":
            takes_recipe = words[1] in ("check", "compile", "launch") and not any("/" in word for word in words)
            parser.parse_args([*words[1:], *["recipe.json"] * takes_recipe])


def test_flags_within_sentences():
    """Flags that stand alone are of the command that the section is about."""
    for title, command in (("Your own data", ["init"]), ("Errors", ["check", "r"]), ("What fits", ["plan", "r"])):
        for text in code(section(title)):
            if text.startswith("--"):
                cli._parser().parse_args([*command, *shlex.split(text)])


def test_start_commands_are_those_that_compile_writes(repository):
    assert cli.main(["compile", EXAMPLE]) == 0
    build = repository / "build" / Path(EXAMPLE).stem
    for launcher in ("torchrun", "accelerate"):
        (argv,) = commands(launcher)
        script = (build / "launch" / f"{launcher}.sh").read_text().replace(f"{repository}/", "")
        assert f"exec {shlex.join(argv)}\n" in script
    (argv,) = commands("deepspeed")  # started as it stands in tests/end_to_end
    assert all((repository / word).is_file() for word in argv if "/" in word)
    hosts = [(repository / name).read_text().splitlines()[-1] for name in (argv[2], build / "hostfile")]
    assert hosts[0] == hosts[1], "the hostfile fits the example"
    assert "--no_ssh_check --master_addr 127.0.0.1" in (build / "launch" / "deepspeed.sh").read_text()


def test_make_and_pytest_commands():
    makefile = (ROOT / "Makefile").read_text()
    inline = [shlex.split(text) for text in INLINE if text.startswith("make ")]
    for _, target, *variables in [*commands("make"), *inline]:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
        for variable in variables:
            assert re.search(rf"^{variable.partition('=')[0]} \??=", makefile, re.MULTILINE), variable
    for argv in commands(".venv/bin/python"):
        assert argv[1:3] == ["-m", "pytest"]
        assert all((ROOT / word).exists() for word in argv if word.startswith("tests/"))
    marker = next(argv[argv.index("-m", 2) + 1] for argv in commands(".venv/bin/python") if argv.count("-m") > 1)
    assert f"'{marker}'" in makefile, "make test-unit leaves out what README says"


def test_versions():
    said = set(re.findall(r"torch==([0-9.]+[0-9])", README))
    assert said == {re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]}


def test_the_recipe_is_the_file():
    assert blocks("json")[0] == (ROOT / EXAMPLE).read_text()


def test_every_line_of_the_recipe_is_explained():
    recipe = json.loads((ROOT / EXAMPLE).read_text())
    lines = {
        f"{part}.{field}" if isinstance(value, dict) and part != "data.eval" else part
        for part, value in recipe.items()
        for field in (value if isinstance(value, dict) else [""])
    }
    explained = {name for row in rows("A recipe") for name in code(row[0])}
    assert lines == explained


def test_fields_are_in_the_schema():
    schema = load_schema()
    dotted = re.compile(rf"({'|'.join(schema['properties'])})\.([a-z_]+)")
    found = [match.groups() for text in INLINE for match in dotted.finditer(text) if not text.endswith(".json")]
    assert len(found) > 15
    for part, field in found:
        text = json.dumps(schema["properties"][part])
        assert f'"{field}": {{' in text or f'"{field}": true' in text, f"{part}.{field}"


def test_batch_arithmetic(repository, capsys):
    assert cli.main(["check", EXAMPLE]) == 0
    assert "16 rows = 4 per device x 2 accumulation x 2 processes; 60 updates" in capsys.readouterr().out
    assert "49\nare kept for evaluation, and 950 / 16 makes 60 updates" in README
    assert (999 - 49, -(-950 // 16), 950 % 16) == (950, 60, 6)


def test_example_rows():
    alpaca, messages = (json.loads(block) for block in blocks("json")[1:3])
    assert [message["role"] for message in FORMATS["alpaca"](alpaca)] == ["system", "user", "assistant"]
    assert len(FORMATS["messages"](messages)) == 2


def test_errors_are_what_a_user_sees(repository, capsys):
    text = (ROOT / EXAMPLE).read_text()
    for right, wrong in SLIPS.items():
        assert text.count(right) == 1
        text = text.replace(right, wrong)
    Path("recipes/mine.json").write_text(text)
    assert cli.main(["check", "recipes/mine.json"]) == errors.EXIT_USAGE
    assert capsys.readouterr().err == blocks("text")[0]


def test_the_plan_is_what_a_user_sees(repository, capsys, update_golden):
    assert cli.main(["plan", PLANNED]) == 0
    shown, said = blocks("text")[1], capsys.readouterr().out
    if update_golden:
        FILE.write_text(README.replace(shown, said), encoding="utf-8")
    else:
        assert shown == said, "if the change is meant: pytest --update-golden"


def test_plans_for_other_machines(repository, capsys):
    (inline,) = [shlex.split(text) for text in INLINE if text.startswith("dsft plan")]
    assert cli.main([*inline[1:], "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["cluster"]["hosts"]) == 2


def test_exit_codes():
    said = [int(row[0]) for row in rows("Errors")]
    assert said == [0, errors.EXIT_FAILED, errors.EXIT_USAGE, errors.EXIT_INTERRUPTED]


def test_compiled_files_are_all_named():
    assert [code(row[0])[0] for row in rows("Compile")] == list(NAMES)


def test_strategies_are_all_named(repository):
    properties = load_schema()["properties"]["strategy"]
    stages = properties["then"]["properties"]["zero_stage"]["enum"]
    named = [json.loads(code(row[0])[0]) for row in rows("Strategies") if len(row) == 7]
    plain = [{"type": name} for name in properties["properties"]["type"]["enum"] if name not in ("auto", "deepspeed")]
    zero = [{"type": "deepspeed", "zero_stage": stage} for stage in stages]
    assert sorted(map(json.dumps, named)) == sorted(map(json.dumps, plain + zero))
    assert '`{"type": "auto"}`' in section("Strategies")
    for strategy in [*named, {"type": "auto"}]:
        one = ["--set", "cluster.processes_per_node=1"] if strategy["type"] == "single" else []
        assert cli.main(["check", EXAMPLE, "--set", f"strategy={json.dumps(strategy)}", *one]) == 0


def test_fields_of_strategies_are_all_named(repository, capsys):
    """Each in a row of its own, with the strategies that take it."""
    fields = [row for row in rows("Strategies") if len(row) == 4]
    named = [json.loads(f"{{{code(row[0])[0]}}}") for row in fields]
    schema = load_schema()["properties"]["strategy"]
    branches = [schema["then"], schema["else"]["then"]]
    assert sorted(name for field in named for name in field) == sorted(
        name for branch in branches for name in branch["properties"] if name not in ("type", "zero_stage", "config")
    )
    two = ["--set", "cluster.device=cuda", "--set", "cluster.hostfile=hostfiles/two_nodes"]
    for row, field in zip(fields, named, strict=True):
        stage = {"zero_stage": 3} if "deepspeed" in row[1] else {}
        strategy = {"type": code(row[1])[0], **stage, **field}
        assert cli.main(["check", EXAMPLE, "--set", f"strategy={json.dumps(strategy)}", *two]) == 0
        assert capsys.readouterr().err == ""


def test_machines_are_selected_as_said(repository, capsys):
    (said,) = [json.loads(f"{{{text}}}") for text in INLINE if text.startswith('"include"')]
    cluster = {"device": "cuda", "hostfile": "hostfiles/two_nodes", "processes_per_node": None} | said
    assert cli.main(["check", EXAMPLE, "--set", f"cluster={json.dumps(cluster)}"]) == 0
    assert "2 processes on 2 machines" in capsys.readouterr().out


def test_metrics_fields():
    fields = code(next(row[1] for row in rows("What a run shows and leaves") if "metrics.jsonl" in row[0]))
    report = ast.parse((ROOT / "dsft" / "train" / "report.py").read_text())
    calls = [node for node in ast.walk(report) if isinstance(node, ast.Call)]
    written = [call.args[0] for call in calls if ast.unparse(call.func) == "self._write"]
    assert fields == [key.value for record in written for key in record.keys]


def test_files_exist():
    folders = ("dsft", "tests", "recipes", "hostfiles", "scripts", "schemas", "data", "docs", ".ci")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    named = [text for text in INLINE if text.split("/")[0] in folders and "/" in text and " " not in text]
    assert len(links) > 5 and len(named) > 10
    for name in (*links, *named):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_links_of_other_pages(page):
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert "://" in link or (page.parent / link).exists(), link


def test_links_within_the_page():
    titles = {title.lower().replace(" ", "-") for title in re.findall(r"^#+ (.*)$", README, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]+)\)", README)) <= titles


def test_functions_and_lines_to_add_to():
    """An engine's and a launcher's functions by name and arguments; the lines as the code has them."""
    text = section("Contribute")
    said = {tuple(re.match(r"(\w+)\((.*)\)$", name).groups()) for name in code(text) if re.match(r"\w+\(.*\)$", name)}
    modules = ("compile/engines/deepspeed.py", "compile/launchers/torchrun.py", "train/engines/deepspeed.py")
    assert said == {function for module in modules for function in functions(ROOT / "dsft" / module)}
    for line in re.findall(r"^   `(.*)`$", text, re.MULTILINE):
        sources = [ROOT / "dsft" / "compile" / "__init__.py", ROOT / "dsft" / "train" / "engines" / "__init__.py"]
        assert any(line in map(str.strip, source.read_text().splitlines()) for source in sources), line


def functions(module: Path) -> set[tuple[str, str]]:
    """Name and arguments of a module's public functions."""
    defined = [node for node in ast.parse(module.read_text()).body if isinstance(node, ast.FunctionDef)]
    return {
        (node.name, ", ".join(argument.arg for argument in node.args.args))
        for node in defined
        if not node.name.startswith("_")
    }
