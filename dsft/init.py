"""`dsft init`: a first recipe from a few answers, checked before it is written."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dsft.errors import DsftError, Problem, refused
from dsft.plan import installed_versions, make_plan
from dsft.plan.cluster import read_hostfile
from dsft.plan.data import held_out
from dsft.plan.facts import ModelFacts, read_facts
from dsft.plan.formats import FORMATS, formats_of
from dsft.plan.gpus import GPUS
from dsft.plan.model import HUB_ID, WITHOUT_SDPA
from dsft.plan.rows import read_rows
from dsft.recipe.load import checked, nearby
from dsft.recipe.schema import description, load_schema, schema_path
from dsft.recipe.text import Source, parse

SPLIT = 0.05  # of the rows, kept for evaluation
BATCH = 16  # rows an update, where there are rows for some updates
EPOCH = 8  # updates an epoch that a small data set should still give
LONGEST = 2048  # tokens; longer rows are seldom worth their memory
LEARNING_RATES = {"lora": 2e-4, "full": 2e-5}
SCHEMA = "recipe.schema.json"
# What another answer does not change, and a line of the recipe or another machine does.
TO_MEND = {"disk-space", "does-not-fit", "no-chat-template"}
GUESS = 'The strategy is a guess. Where the model is on this machine and --gpu names the GPU, "auto" chooses what fits.'


def init(file: Path, said: Mapping[str, Any], ask: bool) -> tuple[str, list[Problem]]:
    """Writes a recipe to `file`; returns what it says, each field with its meaning, and what is left to mend in it.

    `said` are the flags: model, data, format, method, cpu, gpu, gpus_per_node, hostfile, None where not given. What is
    missing is asked for on the terminal if `ask`. Raises DsftError, with nothing written, where an answer is missing or
    wrong, and where `file` is there already.
    """
    if os.path.lexists(file):
        raise refused("target-exists", f"{file} is already there", help="name another file, or remove it")
    if not file.parent.is_dir():
        raise refused("no-folder", f"{file.parent} is not a folder", help="make it first")
    answers = dict(said)
    if ask:
        _ask_for_missing(answers)
    _refuse_missing(answers)
    answers["format"] = answers["format"] or _format(answers["data"])
    recipe = compose(answers, file)
    text = _text(recipe)
    problems = _left_to_mend(file, text)
    _write(file, text)
    guess = [] if recipe["strategy"]["type"] == "auto" else ["", GUESS]
    return "\n".join(
        [f"{file}", *_explained(recipe), *guess, "", f"Next: dsft check {shlex.quote(str(file))}"]
    ), problems


def _left_to_mend(file: Path, text: str) -> list[Problem]:
    """Errors and warnings about the recipe `text`. Raises DsftError where one comes of an answer."""
    recipe = checked(parse(Source(str(file), file.absolute().parent, text)))
    warnings: list[Problem] = []
    try:
        make_plan(recipe, versions=installed_versions(), cwd=Path.cwd(), warn=warnings.append)
    except DsftError as error:
        if all(problem.kind in TO_MEND or problem.severity == "warning" for problem in error.problems):
            return list(error.problems)
        raise
    return warnings


# --- answers ------------------------------------------------------------------------------------------------------


def _refuse_missing(answers: Mapping[str, Any]) -> None:
    missing = [f"--{name}" for name in ("model", "data", "method") if answers[name] is None]
    if not any(answers[name] for name in ("cpu", "gpu", "gpus_per_node", "hostfile")):
        missing.append("one of --cpu, --gpu, --gpus-per-node and --hostfile")
    if missing:
        help = "as in: dsft init --model org/name --data rows.json --method lora --gpu h100-80gb"
        raise refused("missing-flag", "nobody to ask, and not given: " + ", ".join(missing), help=help)


def _ask_for_missing(answers: dict[str, Any]) -> None:
    """Fills in what no flag says. An answer that cannot be is asked for again."""
    try:
        if answers["model"] is None:
            answers["model"] = _answer("Model", description(("model", "path")), _a_model)
        if answers["data"] is None:
            answers["data"] = _answer("Data", "One file of rows, a JSON array or JSON Lines.", _format)
        if answers["method"] is None:
            about = description(("method", "type"))
            answers["method"] = _answer("Method", about, _one_of("lora", "full"), default="lora")
        if not any(answers[name] for name in ("cpu", "gpu", "gpus_per_node", "hostfile")):
            gpus = [name for name in load_schema()["properties"]["cluster"]["properties"]["gpu"]["enum"] if name]
            about = f"cpu, or the kind of GPU: {', '.join(gpus)}; gpu for another one."
            device = _answer("Hardware", about, _one_of("cpu", "gpu", *gpus))
            answers["cpu"], answers["gpu"] = device == "cpu", device if device in gpus else None
            if device != "cpu":
                about = description(("cluster", "processes_per_node"))
                answers["gpus_per_node"] = int(_answer("GPUs in this machine", about, _a_count, default="1"))
    except EOFError:  # Ctrl-D: no further answers
        print()


def _answer(name: str, about: str, check: Callable[[str], object], default: str = "") -> str:
    print(f"{name}. {about}")
    while True:
        answer = input(f"  [{default}] > " if default else "  > ").strip() or default
        try:
            if answer:
                check(answer)
                return answer
        except DsftError as error:
            print("\n".join(f"  {problem.message}. {problem.help or ''}".rstrip() for problem in error.problems))


def _a_model(answer: str) -> None:
    if _is_path(answer):
        read_facts(os.path.abspath(os.path.expanduser(answer)), trusted=True)
    elif not HUB_ID.fullmatch(answer):
        raise refused("model-not-found", f'"{answer}" is neither a folder here nor a hub id such as org/name')


def _one_of(*names: str) -> Callable[[str], None]:
    def check(answer: str) -> None:
        if answer not in names:
            raise refused("not-allowed-value", f"{answer} is none of {', '.join(names)}")

    return check


def _a_count(answer: str) -> None:
    most = load_schema()["properties"]["cluster"]["properties"]["processes_per_node"]["maximum"]
    if not re.fullmatch("[1-9][0-9]{0,3}", answer) or int(answer) > most:
        raise refused("out-of-range", f"{answer} is not a number from 1 to {most}")


def _format(data: str) -> str:
    """The format of a data file's first row. Raises DsftError where there is no such file, or no such format."""
    path = Path(os.path.expanduser(data))
    if path.is_dir():
        raise refused("not-a-file", f"{path} is a directory, not a data file", help="name one of its files")
    if not path.is_file():
        raise refused("file-not-found", f"no data file at {path}", help=nearby(path))
    row = next(read_rows(path), None)
    formats = formats_of(row.value) if row else []
    if not formats:
        found = "the first row is in no known format" if row else "there is no row"
        raise refused("wrong-format", f"{path}: {found}", help=f"known are {' and '.join(FORMATS)}")
    return formats[0]


# --- the recipe ---------------------------------------------------------------------------------------------------


def compose(answers: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """A recipe of all that is usually said, its paths relative to `file`."""
    rows, longest = _measure(answers["data"])
    facts = _facts(answers["model"])
    if facts and facts.max_positions:
        longest = min(longest, facts.max_positions)
    cluster, processes = _cluster(answers, file)
    training_rows = rows - held_out(rows, SPLIT) if rows > 1 else rows
    batch = processes * max(1, _power_of_two(min(BATCH, max(1, training_rows // EPOCH))) // processes)
    epochs = 1 if training_rows >= 1000 else 3
    updates = -(-training_rows // batch) * epochs
    gpu = GPUS.get(answers["gpu"])
    plannable = facts is not None and (answers["cpu"] or gpu)
    training = {
        "num_train_epochs": epochs,
        "global_batch_size": batch,
        **({} if plannable else {"per_device_train_batch_size": math.gcd(batch // processes, 4)}),
        "learning_rate": LEARNING_RATES.get(answers["method"], LEARNING_RATES["full"]),
        "warmup_ratio": 0.03,
        "precision": "fp32" if answers["cpu"] or gpu and not gpu.bf16 else "bf16",
    }
    return {
        "$schema": schema_place(file),
        "name": _name(answers),
        "model": {
            "path": _model(answers["model"], file),
            **({"attn_implementation": "eager"} if facts and facts.model_type in WITHOUT_SDPA else {}),
        },
        "data": {
            "train": [{"path": _relative(answers["data"], file), "format": answers["format"]}],
            **({"eval": {"split": SPLIT}} if rows > 1 else {}),
            "max_length": longest,
        },
        "method": {"type": answers["method"]},
        "strategy": {"type": "auto" if plannable else "single" if processes == 1 else "ddp"},
        "training": training,
        "checkpoint": {"save_steps": max(1, min(100, updates // 4))},
        "cluster": cluster,
    }


def _measure(data: str) -> tuple[int, int]:
    """Number of rows, and a max_length for them: the power of two of tokens that holds the longest row, by three bytes
    of text a token (English has about four), from 128 to `LONGEST`."""
    rows, longest = 0, 0
    for row in read_rows(os.path.expanduser(data)):
        rows += 1
        longest = max(longest, len(json.dumps(row.value, ensure_ascii=False).encode("utf-8", "replace")))
    return rows, min(LONGEST, max(128, 2 * _power_of_two(max(1, longest // 3))))


def _facts(model: str) -> ModelFacts | None:
    """What is known of the model here; None for one that is not on this machine."""
    path = os.path.abspath(os.path.expanduser(model)) if _is_path(model) else model
    if os.path.isabs(path) and not os.path.isfile(os.path.join(path, "config.json")):
        return None  # what is wrong with it, the plan says
    return read_facts(path, trusted=True)


def _power_of_two(number: int) -> int:
    """The largest one up to `number`."""
    return 1 << (number.bit_length() - 1)


def _cluster(answers: Mapping[str, Any], file: Path) -> tuple[dict[str, Any], int]:
    """The section `cluster`, and the number of processes."""
    cluster: dict[str, Any] = {"device": "cpu" if answers["cpu"] else "cuda"}
    if answers["gpu"]:
        cluster["gpu"] = answers["gpu"]
    processes = answers["gpus_per_node"] or 1
    if answers["hostfile"]:
        cluster["hostfile"] = _relative(answers["hostfile"], file)
        hosts = read_hostfile(Path(os.path.expanduser(answers["hostfile"])))
        processes = len(hosts) * hosts[0].slots
    if answers["gpus_per_node"] or not answers["hostfile"]:
        cluster["processes_per_node"] = answers["gpus_per_node"] or 1
    return cluster, processes


def _name(answers: Mapping[str, Any]) -> str:
    parts = [os.path.basename(os.path.normpath(answers["model"])), Path(answers["data"]).stem, answers["method"]]
    return re.sub("[^a-z0-9._-]+", "-", "-".join(parts).lower()).strip("._-")[:100] or "mine"


def _is_path(model: str) -> bool:
    return model.startswith((".", "/", "~")) or os.path.lexists(model)


def _model(model: str, file: Path) -> str:
    """A folder beside or below the recipe starts with a point, so that it is no hub id where it is missing."""
    if not _is_path(model):
        return model
    path = _relative(model, file)
    return path if path.startswith((".", "/", "~")) else f"./{path}"


def _relative(path: str, file: Path) -> str:
    """`path`, said relative to the working directory, as `file` has to say it; what is absolute stays so."""
    if path.startswith(("/", "~")):
        return path
    return os.path.relpath(path, file.absolute().parent)


def schema_place(file: Path) -> str:
    """Where the recipe finds the schema: in the checkout that it belongs to, or in a copy beside it."""
    checkout = schema_path().parent.parent
    if file.absolute().is_relative_to(checkout):
        return os.path.relpath(schema_path(), file.absolute().parent)
    return SCHEMA


def _text(recipe: Mapping[str, Any]) -> str:
    """JSON with a line for each field of a section; what is within a field stays in its line."""
    sections = []
    for name, value in recipe.items():
        if isinstance(value, dict) and len(value) > 1:
            fields = ",\n".join(f"    {json.dumps(field)}: {_json(inner)}" for field, inner in value.items())
            sections.append(f"  {json.dumps(name)}: {{\n{fields}\n  }}")
        else:
            sections.append(f"  {json.dumps(name)}: {_json(value)}")
    return "{\n" + ",\n".join(sections) + "\n}\n"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _write(file: Path, text: str) -> None:
    try:
        with open(file, "x", encoding="utf-8") as stream:
            stream.write(text)
        beside = file.parent / SCHEMA
        if f'"$schema": "{SCHEMA}"' in text and not beside.exists():
            beside.write_bytes(schema_path().read_bytes())
    except FileExistsError as error:
        raise refused("target-exists", f"{file} is already there") from error
    except OSError as error:
        raise refused("cannot-write", f"cannot write {error.filename}: {error.strerror}") from error


def _explained(value: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Each written field, its value and its meaning."""
    for name, inner in value.items():
        if isinstance(inner, dict):
            yield from _explained(inner, (*path, name))
        else:
            yield f"  {'.'.join((*path, name))}: {_json(inner)}"
            yield f"      {description((*path, name))}"
