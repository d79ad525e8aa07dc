"""`extends`, `--set`, defaults, paths, and what a problem points at."""

from __future__ import annotations

import json
import os
import socket

import jsonschema
import pytest
from workshop import COMPLETE

from dsft.errors import DsftError
from dsft.plan import make_plan
from dsft.recipe import load_recipe, schema
from dsft.recipe.text import MAX_PROBLEMS


def problems(recipe):
    return [(str(problem.where), problem.kind, problem.message) for problem in recipe.problems]


def bind(name):
    socket.socket(socket.AF_UNIX).bind(name)


def errors(recipe):
    return [problem for problem in recipe.problems if problem.severity == "error"]


def refused(workshop, recipe, *overrides):
    """The one problem, whether anything further was looked at or not."""
    try:
        path = recipe if hasattr(recipe, "exists") else workshop.write("recipe.json", recipe)
        (problem,) = load_recipe(path, overrides).problems
    except DsftError as error:
        (problem,) = error.problems
    return problem


def test_the_schema_is_a_schema():
    jsonschema.Draft202012Validator.check_schema(schema.load_schema())


def test_every_word_the_schema_uses_has_an_error_text():
    def keywords(part):
        if isinstance(part, dict):
            for key, value in part.items():
                yield key
                if key in ("properties", "$defs"):
                    for inner in value.values():
                        yield from keywords(inner)
                elif key in ("items", "if", "then", "else"):
                    yield from keywords(value)

    silent = {"$schema", "$id", "title", "description", "examples", "default", "properties", "$defs", "$ref", "items"}
    silent |= {"if", "then", "else", "allOf", "x-path", "x-aliases", "x-refused"}
    checked = {"type", "enum", "const", "required", "additionalProperties", "minimum", "maximum", "exclusiveMinimum"}
    checked |= {"exclusiveMaximum", "minLength", "maxLength", "minItems", "uniqueItems", "pattern"}
    assert set(keywords(schema.load_schema())) <= silent | checked


def test_defaults_come_from_the_schema_at_every_depth(workshop):
    values = workshop.recipe().values
    properties = schema.load_schema()["properties"]
    assert values["checkpoint"] == {name: f["default"] for name, f in properties["checkpoint"]["properties"].items()}
    assert values["method"] == {
        "type": "lora", "r": 16, "lora_alpha": 32.0, "lora_dropout": 0.0, "target_modules": "all-linear"
    }  # fmt: skip
    assert workshop.recipe(strategy={"type": "fsdp"}).values["strategy"] == {
        "type": "fsdp",
        "reshard_after_forward": True,
        "cpu_offload": False,
        "hybrid_shard": False,
    }
    assert workshop.recipe(method={"type": "full"}).values["method"] == {"type": "full"}


def test_the_compiled_recipe_compiles_to_itself(workshop):
    recipe = workshop.recipe("training.warmup_ratio=0.5")
    text = recipe.to_json("/out")
    elsewhere = workshop.write("elsewhere/deep/recipe.json", text)
    assert load_recipe(elsewhere).to_json("/out") == text
    assert json.loads(text)["checkpoint"]["output_dir"] == "/out"


def test_whole_numbers_by_the_rule_of_json_schema(workshop):
    recipe = workshop.recipe("training.max_steps=8.0", "training.learning_rate=1")
    assert repr(recipe.get("training", "max_steps")) == "8"
    assert repr(recipe.get("training", "learning_rate")) == "1.0"
    assert [kind for _, kind, _ in problems(workshop.recipe("training.seed=true"))] == ["wrong-type"]


@pytest.mark.parametrize("name", ["a\n", "", ".hidden", "a b", "a/b", "é", "a" * 101])
def test_names_that_are_no_file_names(workshop, name):
    assert len(workshop.recipe(name=name).problems) == 1


# --- extends ---


def test_extends_merges_objects_and_replaces_the_rest(workshop):
    workshop.write("base/base.json", COMPLETE | {"logging": {"logging_steps": 7}})
    child = {
        "extends": "base/base.json",
        "name": "child",
        "training": {"learning_rate": 5e-4},
        "data": {"train": [{"path": "rows.json", "format": "messages"}]},
    }
    recipe = load_recipe(workshop.write("child.json", child))
    assert recipe.problems == ()
    assert recipe.get("name") == "child"
    assert (recipe.get("training", "learning_rate"), recipe.get("training", "max_steps")) == (5e-4, 5)
    assert recipe.get("data", "max_length") == 128
    assert recipe.get("logging", "logging_steps") == 7
    assert recipe.get("extends") is None


def test_a_path_is_relative_to_the_file_that_says_it(workshop, monkeypatch):
    workshop.write("base/base.json", COMPLETE)
    child = workshop.write("child.json", {"extends": "base/base.json", "checkpoint": {"output_dir": "out"}})
    monkeypatch.chdir(workshop.folder / "base")
    recipe = load_recipe(child, ["data.chat_template=t.jinja", "cluster.hostfile=~/hosts"])
    folder = str(workshop.folder)
    assert recipe.get("model", "path") == f"{folder}/base/model"
    assert recipe.get("data", "train", 0, "path") == f"{folder}/base/rows.json"
    assert recipe.get("checkpoint", "output_dir") == f"{folder}/out"
    assert recipe.get("data", "chat_template") == f"{folder}/base/t.jinja"
    assert recipe.get("cluster", "hostfile") == os.path.expanduser("~/hosts")


@pytest.mark.parametrize(
    ("said", "is_path"),
    [("model", True), ("./model", True), ("./absent", True), ("~/absent", True), ("/absent", True),
     ("absent", False), ("org/absent", False)],
)  # fmt: skip
def test_a_model_is_a_folder_or_a_hub_id(workshop, said, is_path):
    path = workshop.recipe(model={"path": said}).get("model", "path")
    assert os.path.isabs(path) if is_path else path == said


def test_problems_point_at_the_file_that_said_it(workshop, monkeypatch):
    monkeypatch.chdir(workshop.folder)
    workshop.write("base.json", '{"name": "tiny",\n "training": {"learning_rate": -1, "max_steps": 2}}')
    workshop.write("child.json", '{"extends": "base.json",\n "training": {\n  "max_steps": 0}}')
    found = problems(load_recipe("child.json", ["name=-", "logging.tensorbord=false"]))
    places = {place for place, _, message in found}
    assert "base.json:2:32" in places  # learning_rate
    assert "child.json:3:16" in places  # max_steps
    assert "--set name=-" in places
    assert "--set logging.tensorbord=false" in places
    assert ("child.json:1:1", "missing-key", '"model" is missing in the recipe') in found
    sources = dict.fromkeys(place.split(":")[0] for place, _, _ in found)
    assert list(sources) == ["child.json", "base.json", "--set name=-", "--set logging.tensorbord=false"]


@pytest.mark.parametrize(
    ("base", "change", "wanted"),
    [
        ({"method": {"type": "lora", "r": 4}}, {"method": {"type": "full"}}, {"type": "full"}),
        ({"method": {"type": "lora", "r": 4}}, {"method": {"type": "lora", "lora_alpha": 8}},
         {"type": "lora", "r": 4, "lora_alpha": 8}),
    ],
)  # fmt: skip
def test_another_type_replaces_the_object(workshop, base, change, wanted):
    workshop.write("base.json", COMPLETE | base)
    recipe = load_recipe(workshop.write("child.json", {"extends": "base.json", **change}))
    assert recipe.problems == ()
    assert {name: recipe.get("method", name) for name in wanted} == wanted


def test_a_file_to_evaluate_on_replaces_a_split(workshop):
    workshop.write("base.json", COMPLETE | {"data": COMPLETE["data"] | {"eval": {"split": 0.1}}})
    change = {"data": {"eval": {"path": "unseen.json", "format": "alpaca"}}}
    recipe = load_recipe(workshop.write("child.json", {"extends": "base.json", **change}))
    assert recipe.problems == () and recipe.get("data", "eval", "split") is None


def test_recipes_that_extend_each_other(workshop):
    workshop.write("a.json", {"extends": "b.json"})
    workshop.write("b.json", '{\n "extends": "./a.json"}')
    problem = refused(workshop, workshop.folder / "a.json")
    assert problem.kind == "extends-cycle" and "a.json -> b.json -> a.json" in problem.message
    assert str(problem.where) == f"{workshop.folder}/b.json:2:13"


def test_a_chain_of_bases_has_an_end(workshop):
    for at in range(30):
        workshop.write(f"{at}.json", {"extends": f"{at + 1}.json"})
    workshop.write("30.json", COMPLETE)
    assert not errors(load_recipe(workshop.folder / "14.json"))
    problem = refused(workshop, workshop.folder / "13.json")
    assert problem.kind == "extends-too-long" and problem.where.source.endswith("29.json")


def test_a_base_that_is_not_there(workshop):
    workshop.write("base.json", COMPLETE)
    problem = refused(workshop, {"extends": "bsae.json"})
    assert problem.kind == "file-not-found" and problem.where.line == 2 and "base.json" in problem.help


@pytest.mark.parametrize(
    ("base", "kind"),
    [(None, "file-not-found"), ("[1]", "wrong-type"), ("{]", "syntax"), ('{"extends": "no"}', "file-not-found")],
)
def test_of_a_recipe_without_its_base_all_else_is_checked(workshop, base, kind):
    if base:
        workshop.write("base.json", base)
    path = workshop.write(
        "top.json", {"extends": "base.json", "training": {"learning_rte": 1}, "method": {"type": "lor"}}
    )
    problems = errors(load_recipe(path))
    assert sorted(p.kind for p in problems) == sorted([kind, "unknown-key", "not-allowed-value"])


def test_a_base_behind_a_broken_link(workshop):
    (workshop.folder / "base.json").symlink_to("elsewhere.json")
    problem = refused(workshop, {"extends": "base.json"})
    assert problem.kind == "file-not-found" and problem.help.endswith("elsewhere.json, which is not there")


def test_a_base_that_is_no_json_is_reported_in_the_base(workshop):
    workshop.write("base.json", "{,}")
    problem = refused(workshop, {"extends": "base.json"})
    assert str(problem.where) == f"{workshop.folder}/base.json:1:2"


# --- --set ---


@pytest.mark.parametrize(
    ("argument", "path", "value"),
    [
        ("training.max_steps=7", ("training", "max_steps"), 7),
        ("training.learning_rate=5e-5", ("training", "learning_rate"), 5e-5),
        ("training.max_grad_norm=null", ("training", "max_grad_norm"), None),
        ("logging.tensorboard=false", ("logging", "tensorboard"), False),
        ("name=other", ("name",), "other"),
        ('name="other"', ("name",), "other"),
        ("name=1b", ("name",), "1b"),
        ("model.revision=a=b", ("model", "revision"), "a=b"),
        ('method.target_modules=["q_proj", "v_proj"]', ("method", "target_modules"), ["q_proj", "v_proj"]),
        ("strategy.type=single", ("strategy",), {"type": "single"}),
    ],
)
def test_set(workshop, argument, path, value):
    recipe = workshop.recipe(argument)
    assert all(problem.severity == "warning" for problem in recipe.problems) and recipe.get(*path) == value


@pytest.mark.parametrize("order", [1, -1])
def test_set_means_the_same_in_any_order(workshop, order):
    arguments = ["strategy.zero_stage=2", "strategy.type=deepspeed"][::order]
    recipe = workshop.recipe(*arguments)
    assert recipe.problems == () and recipe.get("strategy", "zero_stage") == 2


def test_the_last_of_two_sets_counts(workshop):
    assert workshop.recipe("training.seed=1", "training.seed=2").get("training", "seed") == 2


@pytest.mark.parametrize(
    "argument",
    ["name", "=3", "a..b=3", ".a=1", "", "name=\udcff", "extends=x.json", "name=[1,", 'name="x', "model={path: 3}"],
)
def test_set_refused(workshop, argument):
    assert refused(workshop, COMPLETE, argument).where.source.startswith("--set")


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(("key", "inner"), [("training", "training.max_steps"), ("data.eval", "data.eval.split")])
@pytest.mark.parametrize("value", ["null", "3", "[]"])
def test_a_value_and_a_field_in_it_are_not_both_set(workshop, key, inner, value, order):
    problem = refused(workshop, COMPLETE, *[f"{key}={value}", f"{inner}=1"][::order])
    assert problem.kind == "bad-override" and f'"{key}"' in problem.message


def test_every_argument_that_cannot_be_read_is_reported_and_the_recipe_too(workshop):
    path = workshop.write("recipe.json", '{"name": NaN')
    with pytest.raises(DsftError) as caught:
        load_recipe(path, ["name", "seed=1", "a=[1,"])
    assert [problem.where.source for problem in caught.value.problems] == [str(path), str(path), "--set", "--set a=[1,"]


def test_an_argument_does_not_take_the_blame_for_what_a_file_lacks(workshop):
    incomplete = {name: value for name, value in COMPLETE.items() if name != "method"}
    recipe = load_recipe(workshop.write("recipe.json", incomplete), ["name=other", "training.seed=3"])
    assert problems(recipe) == [
        (f"{workshop.folder}/recipe.json:1:1", "missing-key", '"method" is missing in the recipe')
    ]


# --- no follow-up errors ---


@pytest.mark.parametrize(
    "changes",
    [
        {"training": {"max_step": 5, "global_batch_size": 16, "per_device_train_batch_size": 4, "learning_rate": 1e-3}},
        {"training": {"max_steps": 5, "batch_size": 16, "per_device_train_batch_size": 4, "learning_rate": 1e-3}},
        {
            "training": {
                "max_steps": "5",
                "global_batch_size": 16,
                "per_device_train_batch_size": 4,
                "learning_rate": 1e-3,
            }
        },
        {"training": []},
        {"method": {"type": "lore", "r": 4}},
        {"strategy": {"type": "deepspeed", "zero_stag": 2}},
        {"data": {"train": [{"path": "rows.json", "formt": "alpaca"}], "max_length": 128}},
        {
            "data": {"train": [{"path": "rows.json", "format": "alpaca"}]},
            "training": COMPLETE["training"] | {"max_length": 128},
        },
        {"data": 3},
        {"cluster": {"processes_per_node": 0}},
        {"checkpoint": None},
        {"data": {"train": [{"pth": "rows.json", "format": "alpaca"}], "max_length": 128}},
        {"a\nb\u202e": 1},
    ],
)
def test_one_mistake_one_problem(workshop, changes):
    with pytest.raises(DsftError) as caught:
        workshop.plan(**changes)
    assert len(caught.value.problems) == 1, caught.value


@pytest.mark.parametrize("path", ["", "absent.json", ".", "a\0b", "x" * 5000, "/dev/zero"])
def test_files_that_are_no_recipe(workshop, path, monkeypatch):
    monkeypatch.chdir(workshop.folder)
    with pytest.raises(DsftError):
        load_recipe(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"max_steps": 5', '"max_steps": NaN'),
        ('"max_steps": 5', '"max_steps": 1e999'),
        ('"max_steps": 5', '"max_steps": None'),
        ('"max_steps": 5', '"max_steps": 5, "max_steps": 6'),
        ('"learning_rate": 0.001', '"learning_rate": .001'),
        ('"type": "lora"', '"type": lora'),
        ('"type": "ddp"', "\"type\": 'ddp'"),
        ('"name": "tiny"', '"name": "\\d"'),
        ('"format": "alpaca"', '"format": "\\ud800"'),
        ('"global_batch_size": 16,', '"global_batch_size": 016,'),
        ('"global_batch_size": 16,', '"global_batch_size": 16, // each'),
        ('"training": {', '"training": {,'),
        ('"strategy": {', '"method": {}, "strategy": {'),
    ],
)
def test_one_mistake_in_the_text_one_problem(workshop, old, new):
    text = json.dumps(COMPLETE, indent=2)
    assert text.count(old) == 1
    path = workshop.write("recipe.json", text.replace(old, new))
    with pytest.raises(DsftError) as caught:
        make_plan(load_recipe(path), versions={}, cwd=workshop.folder)
    assert len(caught.value.problems) == 1, caught.value


@pytest.mark.parametrize("extra", ['"xyz": 1,', '"learning_rate": -1,'])
def test_a_mistake_in_the_text_and_another_are_both_reported(workshop, extra):
    text = (
        json.dumps(COMPLETE, indent=2)
        .replace('"learning_rate": 0.001', '"seed": NaN')
        .replace('"max_steps"', extra + '"max_steps"')
    )
    recipe = load_recipe(workshop.write("recipe.json", text))
    assert len(errors(recipe)) == 2 + ("xyz" in extra)  # the learning rate that is missing


def test_more_problems_than_anyone_reads(workshop):
    recipe = workshop.recipe(training={f"key{at}": 1 for at in range(5000)}, method={"r": 0})
    assert len(recipe.problems) == MAX_PROBLEMS + 1
    assert [problem.kind for problem in recipe.problems].count("too-many-problems") == 1


@pytest.mark.parametrize("kind", ["recipe", "base", "rows", "hostfile", "chat_template"])
@pytest.mark.parametrize("make", [os.mkfifo, bind])
def test_a_pipe_or_a_socket_is_no_file(workshop, make, kind, monkeypatch):
    monkeypatch.chdir(workshop.folder)
    make("pipe")
    overrides = {
        "rows": ['data.train=[{"path": "pipe", "format": "alpaca"}]'],
        "hostfile": ["cluster.hostfile=pipe"],
        "chat_template": ["data.chat_template=pipe"],
    }.get(kind, [])
    path = workshop.write("recipe.json", COMPLETE | ({"extends": "pipe"} if kind == "base" else {}))
    with pytest.raises(DsftError) as caught:
        make_plan(load_recipe("pipe" if kind == "recipe" else path, overrides), versions={}, cwd=workshop.folder)
    assert len(caught.value.problems) == 1 and "a pipe, a device or a socket" in str(caught.value)


@pytest.mark.parametrize("order", [1, -1])
def test_a_file_and_a_part_of_the_rows_are_not_both_set(workshop, order):
    arguments = ['data.eval={"path": "rows.json", "format": "alpaca"}', "data.eval.split=0.5"][::order]
    problem = refused(workshop, COMPLETE, *arguments)
    assert problem.kind == "bad-override" and '"data.eval"' in problem.message


def test_problems_come_in_the_order_of_the_chain(workshop):
    """A recipe, the one it extends, and so on; then the arguments."""
    workshop.write("grand.json", COMPLETE | {"name": "grand", "wrong": 1})
    workshop.write("base.json", {"extends": "grand.json", "training": {"wrong": 1}})
    path = workshop.write("recipe.json", {"extends": "base.json", "model": {"wrong": 1}})
    found = load_recipe(path, ["data.wrong=1"]).problems
    assert [os.path.basename(problem.where.source) for problem in found] == [
        *("recipe.json", "base.json", "grand.json", "--set data.wrong=1")
    ]


def test_a_plan_is_no_recipe(workshop):
    path = workshop.write("plan.json", {"name": "tiny", "recipe_sha256": "0", "versions": {}, "files": []})
    with pytest.raises(DsftError) as caught:
        load_recipe(path)
    (problem,) = caught.value.problems
    assert problem.kind == "not-a-recipe" and problem.help == f"its recipe is {workshop.folder}/recipe.json"
