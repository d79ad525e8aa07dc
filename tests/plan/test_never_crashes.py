"""Whatever recipe, hostfile and model are made of, they compile or give a DsftError, never another exception."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from drawn_recipes import VALUES, WORDS, damaged, furnished, good, places
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from workshop import COMPLETE, CONFIG, Workshop, parameter_shapes

from dsft import cli
from dsft.compile import compile_plan
from dsft.errors import DsftError
from dsft.plan import make_plan, record
from dsft.plan.families import FAMILIES
from dsft.recipe import load_recipe, schema

__all__ = ["furnished"]

SETTINGS = settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
TEXT = json.dumps(COMPLETE, indent=2)
RICH = COMPLETE | {
    "extends": None,
    "data": COMPLETE["data"] | {"eval": {"split": 0.1}, "chat_template": None},
    "strategy": {"type": "deepspeed", "zero_stage": 2, "config": {"zero_optimization": {"overlap_comm": True}}},
    "checkpoint": {"output_dir": "out"},
}

PLANNED = COMPLETE | {
    "strategy": {"type": "auto"},
    "training": {"max_steps": 5, "global_batch_size": 16, "learning_rate": 1e-3},
    "cluster": {"gpu": "a100-80gb", "processes_per_node": 4},
}


def is_number(field: Any) -> bool:
    types = field.get("type", ()) if isinstance(field, dict) else ()
    return bool({"integer", "number"} & ({types} if isinstance(types, str) else set(types)))


def plan_of(workshop: Workshop, content: bytes, overrides=()) -> None:
    """Compiles the recipe as far as it goes."""
    path = workshop.folder / "recipe.json"
    path.write_bytes(content)
    try:
        recipe = load_recipe(path, overrides)
        plan = make_plan(recipe, versions={}, cwd=workshop.folder, memory=64 << 30)
    except DsftError as error:
        assert error.problems and error.exit_code == 2
        assert all(problem.where and problem.render().encode() for problem in error.problems)
        return
    assert record.from_json(record.to_json(plan)) == plan
    files = compile_plan(plan, recipe.to_json(plan.checkpoint.output_dir), "/build").files
    assert yaml.safe_load(files["accelerate.yaml"])["num_processes"] == plan.batch.world_size
    assert all(json.loads(text) for name, text in files.items() if name.endswith(".json"))


@SETTINGS
@given(st.binary(max_size=200))
def test_bytes(workshop, content):
    plan_of(workshop, content)


@SETTINGS
@given(st.integers(0, len(TEXT)), st.integers(0, 5), st.text("{}[]\",:\\'e0-.1 \n\t#/é", max_size=3))
def test_a_recipe_with_some_characters_changed(workshop, at, removed, inserted):
    plan_of(workshop, (TEXT[:at] + inserted + TEXT[at + removed :]).encode())


@SETTINGS
@given(st.lists(st.tuples(st.sampled_from(list(places(RICH))[1:]), VALUES, st.sampled_from(WORDS)), max_size=4))
def test_a_recipe_with_some_values_changed(workshop, changes):
    recipe = copy.deepcopy(RICH)
    for path, value, key in changes:
        inner = recipe
        try:
            for step in path[:-1]:
                inner = inner[step]
            inner[path[-1]] = value
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change has taken the place away
        if isinstance(inner, dict):
            inner[key] = value
    plan_of(workshop, json.dumps(recipe).encode())


@SETTINGS
@given(
    st.sampled_from([".".join(map(str, path)) for path in places(RICH)]), st.text(max_size=8) | VALUES.map(json.dumps)
)
def test_any_argument(workshop, key, value):
    plan_of(workshop, json.dumps(RICH).encode(), [f"{key}={value}"])


@SETTINGS
@given(st.binary(max_size=60) | st.text("n12 slots=0#@:.\n\r\t-[]", max_size=60).map(str.encode))
def test_any_hostfile(workshop, content):
    (workshop.folder / "hosts").write_bytes(content)
    plan_of(workshop, json.dumps(COMPLETE | {"cluster": {"hostfile": "hosts"}}).encode())


@pytest.mark.parametrize("kind", [[], {}, None, 3, True, "x", 1.5])
@pytest.mark.parametrize("path", list(places(RICH)), ids=str)
def test_every_place_of_every_type(workshop, path, kind):
    recipe = {"": copy.deepcopy(RICH)}
    inner, steps = recipe, ("", *path)
    for step in steps[:-1]:
        inner = inner[step]
    inner[steps[-1]] = kind
    plan_of(workshop, json.dumps(recipe[""]).encode())


def run(workshop: Workshop, content: bytes, *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command on a recipe."""
    path = workshop.folder / "recipe.json"
    path.write_bytes(content)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main([arguments[0], str(path), *arguments[1:]])
    assert "internal error" not in err.getvalue(), err.getvalue()
    return code, out.getvalue(), err.getvalue()


@settings(SETTINGS, max_examples=200)
@given(damaged())
def test_a_damaged_recipe(furnished, recipe):
    plan_of(furnished, json.dumps(recipe).encode())


@SETTINGS
@given(damaged(), st.sampled_from(["text", "json", "github"]))
def test_a_damaged_recipe_on_the_command_line(furnished, recipe, form):
    code, out, err = run(furnished, json.dumps(recipe).encode(), "check", "--format", form)
    if form == "text":
        assert code == (2 if "error[" in err else 0)
        return
    assert err == ""
    if form == "github":
        assert code == (2 if "::error " in out else 0) and all(line.startswith("::") for line in out.splitlines())
    else:
        said = json.loads(out)
        assert code == (0 if said["ok"] else 2) and (said["ok"] or said["problems"])


@SETTINGS
@given(good(), st.data())
def test_the_text_of_a_good_recipe_damaged(furnished, recipe, data):
    text = json.dumps(recipe, indent=data.draw(st.sampled_from([None, 1])))
    for _ in range(data.draw(st.integers(1, 3))):
        at, removed = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 5))
        text = text[:at] + data.draw(st.text("{}[]\",:\\'e0-.1 \n\t#/*é\0=", max_size=3)) + text[at + removed :]
    code, _, err = run(furnished, text.encode(), "check")
    assert code == (2 if "error[" in err else 0)


@SETTINGS
@given(st.binary(max_size=300))
def test_bytes_on_the_command_line(workshop, content):
    assert run(workshop, content, "check")[0] == 2


NUMBERS = [(*place, name) for place, name, field in schema._all_fields() if is_number(field)]


@pytest.mark.parametrize("path", NUMBERS, ids=".".join)
def test_every_number_at_its_ends(workshop, path):
    """A recipe is refused or planned at once: nothing counts up to what it says."""
    field = schema._field(path[:-1], path[-1])
    for value in (field.get("minimum", 5e-324), field.get("maximum", 2**63 - 1), 1e308):
        for recipe in (RICH, PLANNED | {"cluster": PLANNED["cluster"] | {"include": "localhost"}}):
            changed = copy.deepcopy(recipe)
            inner = changed
            for step in path[:-1]:
                inner = inner.setdefault(step, {})
            inner[path[-1]] = value
            plan_of(workshop, json.dumps(changed).encode())


# --- models ---

EDGES = st.sampled_from([0, -1, 1, 3, 2**31, 2**32 - 1, 2**63, 10**400, 1e308, 4.0, True, None, "", "4", [], {}])
METHODS = st.sampled_from([{"type": "full"}, {"type": "lora"}, {"type": "lora", "target_modules": ["q_proj"]}])
FIELDS = sorted({name for family in FAMILIES.values() for name in (*family.defaults, *family.aliases, "head_dim")})


def safetensors(header: bytes, data: int = 0) -> bytes:
    return len(header).to_bytes(8, "little") + header + b"\0" * data


def stored(shapes: dict[str, tuple[int, ...]]) -> dict[str, dict]:
    """The entries of a safetensors header."""
    entries, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    return entries


@settings(SETTINGS, max_examples=300)
@given(
    st.sampled_from(sorted(FAMILIES)) | VALUES,
    st.dictionaries(st.sampled_from(FIELDS), EDGES | VALUES, max_size=3),
    METHODS,
)
def test_any_configuration(workshop, model_type, changes, method):
    config = CONFIG | {"model_type": model_type, "num_local_experts": 4} | changes
    (workshop.folder / "model/config.json").write_text(json.dumps(config))
    plan_of(workshop, json.dumps(PLANNED | {"method": method}).encode())


SHAPES = st.lists(st.integers(0, 3) | st.sampled_from([2**31, 2**63]), max_size=4).map(tuple)
NAMES = st.sampled_from(
    [
        *parameter_shapes(CONFIG),
        "",
        "x",
        "h.0.weight",
        "lm_head.weight",
        "model.layers.99999999999.a.weight",
        "wte.weight",
    ]
)


def store(model: Path, entries: dict[str, Any], length: int) -> None:
    """A weights file with `length` bytes of data, but no more than what takes no room on a disk."""
    with open(model / "model.safetensors", "wb") as file:
        file.write(safetensors(json.dumps(entries).encode()))
        file.truncate(file.tell() + min(length, 2**40))


@SETTINGS
@given(
    st.sampled_from(["llama", "mixtral", "unheard_of"]), st.dictionaries(NAMES, SHAPES, max_size=5), METHODS, st.data()
)
def test_any_stored_tensors(workshop, model_type, shapes, method, data):
    changes = data.draw(st.dictionaries(st.sampled_from(FIELDS), EDGES, max_size=1))
    whole = parameter_shapes(CONFIG) if data.draw(st.booleans()) else {}
    shapes = whole | shapes
    length = 2 * sum(map(math.prod, shapes.values()))
    store(workshop.model(model_type=model_type, **changes), stored(shapes), length)
    plan_of(workshop, json.dumps(PLANNED | {"method": method}).encode())


@SETTINGS
@given(
    st.sampled_from(sorted(parameter_shapes(CONFIG))), st.sampled_from(["dtype", "shape", "data_offsets"]), st.data()
)
def test_any_entry_of_a_stored_tensor(workshop, name, field, data):
    entries = stored(parameter_shapes(CONFIG))
    length = max(entry["data_offsets"][1] for entry in entries.values())
    entries[name][field] = data.draw(EDGES | VALUES | st.lists(EDGES | st.integers(), min_size=2, max_size=2))
    store(workshop.model(model_type=data.draw(st.sampled_from(["llama", "mamba"]))), entries, length)
    plan_of(workshop, json.dumps(PLANNED).encode())


HEADER = safetensors(json.dumps(stored(parameter_shapes(CONFIG))).encode())
INDEX = json.dumps({"metadata": {}, "weight_map": dict.fromkeys(parameter_shapes(CONFIG), "model.safetensors")})
TOKENIZER = json.dumps({"chat_template": [{"name": "default", "template": "{{ messages }}"}]})
GGUF = b"GGUF\3\0\0\0" + (1).to_bytes(8, "little") * 2
FILES = {
    "config.json": json.dumps(CONFIG).encode(),
    "model.safetensors": HEADER + b"\0" * 1000,
    "model.safetensors.index.json": INDEX.encode(),
    "tokenizer_config.json": TOKENIZER.encode(),
    "tokenizer.json": b'{"model": {}}',
    "adapter_config.json": b"{}",
    "model.gguf": GGUF,
}


@settings(SETTINGS, max_examples=200)
@given(st.sampled_from(sorted(FILES)), st.data())
def test_any_bytes_in_a_file_of_the_model(workshop, name, data):
    content = FILES[name]
    for _ in range(data.draw(st.integers(1, 3))):
        at, removed = data.draw(st.integers(0, len(content))), data.draw(st.integers(0, 9))
        inserted = data.draw(st.binary(max_size=8) | st.text('{}[]",:\\0123456789e-', max_size=4).map(str.encode))
        content = content[:at] + inserted + content[at + removed :]
    shutil.rmtree(workshop.folder / "model")
    (workshop.model() / name).write_bytes(content)
    if name == "model.gguf" and data.draw(st.booleans()):
        (workshop.folder / "model/config.json").unlink()
    plan_of(workshop, json.dumps(PLANNED).encode())


@SETTINGS
@given(st.sampled_from(sorted(name for name in FILES if name.endswith(".json"))), VALUES)
def test_any_json_in_a_file_of_the_model(workshop, name, value):
    shutil.rmtree(workshop.folder / "model")
    (workshop.model() / name).write_text(json.dumps(value))
    plan_of(workshop, json.dumps(PLANNED).encode())
