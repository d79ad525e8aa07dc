"""Numbers of a plan, rules between fields, and files."""

from __future__ import annotations

import hashlib
import json

import pytest
from workshop import COMPLETE

from dsft.errors import DsftError
from dsft.plan import record
from dsft.plan.data import held_out
from dsft.plan.training import warmup


def kinds(workshop, *overrides, **changes):
    with pytest.raises(DsftError) as caught:
        workshop.plan(*overrides, **changes)
    return [problem.kind for problem in caught.value.problems]


def training(**fields):
    return {"training": {"learning_rate": 1e-3, "max_steps": 5, **fields}}


def batch(total=None, per_device=None, accumulation=None):
    return training(
        global_batch_size=total, per_device_train_batch_size=per_device, gradient_accumulation_steps=accumulation
    )


@pytest.mark.parametrize(
    ("processes", "said", "batch_is"),
    [
        (2, (8, 2, None), (2, 2, 2, 8)),
        (2, (8, None, 2), (2, 2, 2, 8)),
        (2, (None, 2, 2), (2, 2, 2, 8)),
        (2, (8, 2, 2), (2, 2, 2, 8)),
        (1, (4, 4, None), (1, 4, 1, 4)),
    ],
)
def test_two_of_the_batch_and_the_world_give_the_rest(workshop, processes, said, batch_is):
    plan = workshop.plan(f"cluster.processes_per_node={processes}", **batch(*said))
    assert plan.batch == record.Batch(*batch_is)


@pytest.mark.parametrize(
    ("processes", "said", "text"),
    [
        (1, (8, 2, 2), "8 != 2*2*1"),
        (1, (7, None, 2), "7 != 3*2*1"),
        (2, (12, 4, None), "12 != 4*1*2"),
        (2, (2, 4, None), "2 != 4*1*2"),
        (1, (None, None, None), "not determined"),
    ],
)
def test_a_batch_that_does_not_come_out(workshop, processes, said, text):
    with pytest.raises(DsftError, match="batch-size") as caught:
        workshop.plan(f"cluster.processes_per_node={processes}", **batch(*said))
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "total", "warm"),
    [
        ({"max_steps": 5}, 5, 0),
        ({"max_steps": None, "num_train_epochs": 2}, 6, 0),  # 40 rows in batches of 16: 3 updates
        ({"max_steps": 5, "num_train_epochs": 2}, 5, 0),
        ({"max_steps": 7, "num_train_epochs": 2}, 6, 0),
        ({"max_steps": 100, "warmup_ratio": 0.07}, 100, 7),
        ({"max_steps": 5, "warmup_ratio": 0.1}, 5, 1),
        ({"max_steps": 5, "warmup_steps": 4}, 5, 4),
        ({"max_steps": 1, "warmup_ratio": 0.03}, 1, 0),
        ({"max_steps": 5, "warmup_ratio": 0.99}, 5, 4),
        ({"max_steps": 5, "warmup_steps": 0}, 5, 0),
    ],
)
def test_updates(workshop, fields, total, warm):
    plan = workshop.plan(**training(global_batch_size=16, gradient_accumulation_steps=1, **fields))
    assert (plan.training.updates_per_epoch, plan.training.total_updates) == (3, total)
    assert plan.training.warmup_updates == warm


def test_parts_are_taken_of_the_decimal_as_written():
    assert held_out(100, 0.29) == 29  # 0.29 * 100 is 28.999…
    assert held_out(91, 0.1) == 9
    assert held_out(5, 0.1) == 1
    assert warmup(100, 0.07) == 7  # 0.07 * 100 is 7.000…01
    assert warmup(30, 0.1) == 3
    assert warmup(1, 0.5) == 1
    assert warmup(0, 0.5) == 0
    assert held_out(10**6, 1e-7) == 1


# each rule: a recipe that is right, one that is wrong, and the kind of problem
RULES = [
    ("training.num_train_epochs=1", "training.max_steps=null", "missing-key"),
    ("training.warmup_ratio=0.1", "training.warmup_ratio=0.1 training.warmup_steps=1", "said-twice"),
    ("training.warmup_steps=4", "training.warmup_steps=5", "out-of-range"),
    ("training.eval_steps=1 data.eval.split=0.1", "training.eval_steps=1", "missing-key"),
    ("model.attn_implementation=flash_attention_2 cluster.device=cuda", "model.attn_implementation=flash_attention_2",
     "incompatible"),
    ("model.attn_implementation=eager training.precision=fp32",
     "model.attn_implementation=flash_attention_2 cluster.device=cuda training.precision=fp32", "incompatible"),
    ("strategy.type=single cluster.processes_per_node=1", "strategy.type=single", "contradiction"),
    ("data.eval.split=0.9", "data.eval.split=0.9 data.train=[{\"path\":\"one.json\",\"format\":\"alpaca\"}]",
     "too-few-rows"),
    ("strategy.type=deepspeed strategy.zero_stage=3 strategy.config.zero_optimization.overlap_comm=true",
     "strategy.type=deepspeed strategy.zero_stage=3 strategy.config.zero_optimization.stage=3", "refused-key"),
    ("cluster.hostfile=two cluster.processes_per_node=2", "cluster.hostfile=two cluster.processes_per_node=4",
     "contradiction"),
    ("checkpoint.output_dir=new/out", "checkpoint.output_dir=rows.json/out", "not-a-directory"),
    ("model.path=org/name", "model.path=a/b/c", "model-not-found"),
    ("model.path=./model", "model.path=./modle", "model-not-found"),
]  # fmt: skip


@pytest.mark.parametrize(("right", "wrong", "kind"), RULES)
def test_rules(workshop, monkeypatch, right, wrong, kind):
    monkeypatch.chdir(workshop.folder)
    workshop.write("one.json", '[{"instruction": "a", "output": "b"}]')
    workshop.write("two", "n1 slots=2\nn2 slots=2\n")
    changes = {
        "training": COMPLETE["training"] | {"per_device_train_batch_size": None, "gradient_accumulation_steps": 1}
    }
    workshop.plan(*right.split(), **changes)
    assert kinds(workshop, *wrong.split(), **changes) == [kind]


# what is done as the recipe says, and what is done too, with a word about it
WARNINGS = [
    ("checkpoint.save_steps=2 checkpoint.keep=3", "checkpoint.keep=3", "no-effect"),
    ("checkpoint.save_steps=5", "checkpoint.save_steps=6", "no-effect"),
    ("checkpoint.keep=2", "checkpoint.keep=1", "no-effect"),
    ("training.learning_rate=0.09", "training.learning_rate=0.1", "unlikely-value"),
    ("training.learning_rate=0.5 training.optim=sgd", "training.learning_rate=2e4", "unlikely-value"),
    (
        "model.attn_implementation=sdpa cluster.device=cuda",
        "model.attn_implementation=flash_attention_2 cluster.device=cuda training.precision=bf16",
        "not-installed",
    ),
    ("training.optim=adamw training.adam_beta2=0.95", "training.optim=sgd training.adam_beta2=0.95", "no-effect"),
    ("training.optim=sgd training.adam_beta2=0.999", "training.optim=sgd training.adam_epsilon=1e-6", "no-effect"),
    ("model.path=org/name model.revision=main", "model.revision=main", "no-effect"),
    ("data.eval.split=0.1 training.eval_steps=5", "data.eval.split=0.1 training.eval_steps=6", "no-effect"),
    ("training.global_batch_size=40", "training.global_batch_size=42", "few-rows"),
    (
        'data.eval={"path":"one.json","format":"alpaca"}',
        'data.eval={"path":"rows.json","format":"alpaca"}',
        "same-data",
    ),
    (
        'data.eval={"path":"one.json","format":"alpaca"}',
        'data.eval={"path":"copy.json","format":"alpaca"}',
        "same-data",
    ),
    ("", 'data.train=[{"path":"rows.json","format":"alpaca"},{"path":"copy.json","format":"alpaca"}]', "same-data"),
    ("", 'data.train=[{"path":"rows.json","format":"alpaca"},{"path":"./rows.json","format":"alpaca"}]', "same-data"),
]


@pytest.mark.parametrize(("right", "doubtful", "kind"), WARNINGS)
def test_warnings(workshop, monkeypatch, right, doubtful, kind):
    monkeypatch.chdir(workshop.folder)
    workshop.write("one.json", '[{"instruction": "a", "output": "b"}]')
    workshop.write("copy.json", (workshop.folder / "rows.json").read_text())
    changes = {
        "training": {"max_steps": 5, "learning_rate": 1e-3, "global_batch_size": 2, "gradient_accumulation_steps": 1}
    }
    assert kind not in [problem.kind for problem in workshop.warnings(*right.split(), **changes)]
    assert [problem.kind for problem in workshop.warnings(*doubtful.split(), **changes)] == [kind]


def test_a_gpu_says_what_it_is_only_where_there_are_gpus(workshop):
    assert kinds(workshop, "cluster.gpu=h200") == ["contradiction"]
    assert workshop.plan("cluster.gpu=h200", "cluster.device=cuda").cluster.gpu == "h200"


def test_data_files_are_counted_and_hashed(workshop):
    row = b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
    content = row + b"\r\n\n" + row
    (workshop.folder / "eval.jsonl").write_bytes(content)
    data = COMPLETE["data"] | {"eval": {"path": "eval.jsonl", "format": "messages"}}
    plan = workshop.plan(data=data)
    sha256 = hashlib.sha256(content).hexdigest()
    assert plan.data.eval == record.DataFile(f"{workshop.folder}/eval.jsonl", "messages", 2, sha256)
    assert (plan.data.train_rows, plan.data.eval_rows, plan.data.eval_split_rows) == (40, 2, 0)
    split = workshop.plan("data.eval.split=0.25").data
    assert (split.train_rows, split.eval_rows, split.eval_split_rows) == (30, 10, 10)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", None),
        (b"\n\n", None),
        (b"[]", None),
        (b'{"instruction": "a", "output": "b"}\n{"a": ', 2),
        (b'{"instruction": "a", "output": "b"}\n{"a": "\xe9"}', 2),
        (b"[1, 2", 1),
    ],
)
def test_data_files_that_are_wrong(workshop, content, line):
    (workshop.folder / "rows.json").write_bytes(content)
    with pytest.raises(DsftError) as caught:
        workshop.plan()
    (problem,) = caught.value.problems
    assert problem.where.source.endswith("rows.json" if line else "recipe.json")
    assert problem.where.line == (line or problem.where.line) is not None
    assert caught.value.exit_code == 2


def test_hosts(workshop):
    workshop.write("two", "n1 slots=4\nbob@n2 slots=4\n")
    plan = workshop.plan(cluster={"hostfile": "two", "device": "cpu"}, **batch(16, 2))
    assert plan.cluster.hosts == (record.Host("n1", 4), record.Host("n2", 4, "bob"))
    assert (plan.cluster.processes_per_node, plan.batch.world_size) == (4, 8)


def test_plan_is_complete_and_reads_back(workshop):
    plan = workshop.plan('method.target_modules=["q_proj"]')
    assert record.from_json(record.to_json(plan)) == plan
    assert plan.versions == {"python": "3.11"}
    assert plan.checkpoint.output_dir == f"{workshop.folder}/runs/tiny"
    text = workshop.recipe('method.target_modules=["q_proj"]').to_json(plan.checkpoint.output_dir)
    assert plan.recipe_sha256 == hashlib.sha256(text.encode()).hexdigest()
    assert json.loads(text)["method"]["target_modules"] == ["q_proj"]


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("batch", "per_device", "4"),
        ("batch", "per_device", 4.0),
        ("batch", "per_device", True),
        ("batch", "per_device", None),
        ("training", "learning_rate", "1e-3"),
        ("training", "learning_rate", True),
        ("method", "target_modules", 5),
        ("method", "target_modules", [5]),
        ("data", "train", "rows.json"),
        ("data", "train", [[]]),
        ("data", "eval", []),
        ("strategy", "config", []),
        ("checkpoint", "output_dir", {}),
        ("logging", "tensorboard", 1),
    ],
)
def test_a_plan_that_was_changed_by_hand_to_another_type(workshop, part, field, value):
    plan = json.loads(record.to_json(workshop.plan()))
    plan[part][field] = value
    with pytest.raises(ValueError, match="not a plan of this version of dsft"):
        record.from_json(json.dumps(plan))


@pytest.mark.parametrize(
    ("part", "value"), [("batch", []), ("batch", None), ("versions", {"python": 3}), ("files", "x")]
)
def test_a_part_of_a_plan_that_was_changed_by_hand(workshop, part, value):
    plan = json.loads(record.to_json(workshop.plan()))
    with pytest.raises(ValueError, match="not a plan of this version of dsft"):
        record.from_json(json.dumps(plan | {part: value}))


def test_a_missing_data_file_does_not_hide_the_warm_up(workshop):
    missing = {"data": COMPLETE["data"] | {"train": [{"path": "nope.json", "format": "alpaca"}]}}
    assert sorted(kinds(workshop, "training.warmup_steps=5", **missing)) == ["file-not-found", "out-of-range"]
    assert kinds(workshop, "training.warmup_steps=5") == ["out-of-range"]


@pytest.mark.parametrize("place", ["dangling", "dangling/below", "x" * 256])
def test_where_no_results_can_be(workshop, place):
    (workshop.folder / "dangling").symlink_to("nowhere")
    assert kinds(workshop, checkpoint={"output_dir": place}) == ["not-a-directory"]


def test_hpz_has_no_more_ranks_than_there_are(workshop):
    zero = {"type": "deepspeed", "zero_stage": 3, "config": {"zero_optimization": {"zero_hpz_partition_size": 8}}}
    changes = {"cluster": {"device": "cuda", "gpu": "h200", "processes_per_node": 2}}
    wide = workshop.plan(strategy=zero, **changes).estimate
    zero["config"]["zero_optimization"]["zero_hpz_partition_size"] = 2
    assert workshop.plan(strategy=zero, **changes).estimate == wide
