"""What `auto` chooses, and what is said where nothing fits: published models, known GPUs."""

from __future__ import annotations

import dataclasses
import re

import pytest
from workshop import COMPLETE

from dsft.errors import DsftError
from dsft.plan.choose import DOUBT
from dsft.plan.cost import Cost
from dsft.plan.describe import strategy_name
from dsft.plan.outlook import ALIKE, RESERVE, Outlook, fastest

GIB = 2**30


@pytest.fixture
def job(workshop):
    """A function that writes a recipe of which strategy, recomputation and division of the batch are left open."""

    def recipe(
        name: str, gpu: str | None, machines: int = 1, processes: int = 8, *, rows: int = 64, length=2048, **said
    ):
        cluster = {"device": "cuda", "gpu": gpu} if gpu else {"device": "cpu"}
        if machines == 1:
            cluster["processes_per_node"] = processes
        else:
            workshop.write("hosts", "".join(f"node{number} slots={processes}\n" for number in range(machines)))
            cluster["hostfile"] = "hosts"
        training = {"max_steps": 5, "global_batch_size": rows, "learning_rate": 1e-5}
        sections = {
            "model": {"path": workshop.published(name)},
            "data": {"train": [{"path": "rows.json", "format": "alpaca"}], "max_length": length},
            "method": {"type": "full"},
            "strategy": {"type": "auto"},
            "cluster": cluster,
            "training": training,
        }
        workshop.write("rows.json", "[" + ",".join(['{"instruction": "a", "output": "b"}'] * rows) + "]")
        return {section: fields | said.get(section, {}) for section, fields in sections.items()}

    return recipe


# Each step of the order: DDP where it fits; optimizer and gradients sharded; weights too, inside far machines first;
# activations recomputed; offloaded.
@pytest.mark.parametrize(
    ("model", "gpu", "machines", "processes", "said", "strategy", "recomputes"),
    [
        ("Qwen/Qwen2.5-0.5B", "h100-80gb", 1, 8, {}, "ddp", False),
        ("meta-llama/Llama-3.1-8B", "h100-80gb", 1, 8, {"method": {"type": "lora"}}, "ddp", False),
        ("meta-llama/Llama-3.1-8B", "rtx-4090", 1, 1, {"method": {"type": "lora"}}, "single", True),
        ("meta-llama/Llama-3.1-8B", "h100-80gb", 1, 8, {}, "fsdp, weights kept gathered", False),
        ("meta-llama/Llama-3.1-70B", "h100-80gb", 1, 8, {"method": {"type": "lora"}}, "fsdp", True),
        ("Qwen/Qwen2.5-7B", "a100-80gb", 1, 1, {}, "deepspeed ZeRO-2, optimizer in host memory", False),
    ],
)
def test_the_fastest_that_fits(workshop, job, model, gpu, machines, processes, said, strategy, recomputes):
    plan = workshop.plan(**job(model, gpu, machines, processes, **said))
    assert (strategy_name(plan.strategy), plan.model.gradient_checkpointing) == (strategy, recomputes)
    assert plan.batch.per_device * plan.batch.accumulation * machines * processes == plan.batch.global_batch_size == 64
    assert plan.estimate.device_bytes <= (1 - RESERVE) * plan.estimate.capacity_bytes
    assert sum(plan.estimate.memory.values()) == pytest.approx(plan.estimate.device_bytes, abs=100)


def test_between_far_machines_weights_stay_inside_each(workshop, job):
    """Where the network is slow and full sharding would send every weight over it."""
    sections = job("Qwen/Qwen3-32B", "a100-80gb", 4, 8, rows=32, length=4096)
    recipe = workshop.recipe(**sections | {"method": {"type": "lora"}})
    (hybrid, whole) = (
        workshop.plan(**sections | {"method": {"type": "lora"}, "strategy": {"type": "fsdp", "hybrid_shard": hybrid}})
        for hybrid in (True, False)
    )
    assert hybrid.estimate.seconds_per_update < whole.estimate.seconds_per_update
    assert recipe.get("strategy", "type") == "auto"
    assert workshop.plan(**sections | {"method": {"type": "lora"}}).strategy == hybrid.strategy


def test_what_the_recipe_says_is_taken(workshop, job):
    sections = job("meta-llama/Llama-3.2-1B", "h100-80gb")
    plan = workshop.plan("strategy.type=fsdp", "model.gradient_checkpointing=true", **sections)
    assert (plan.strategy.engine, plan.model.gradient_checkpointing) == ("fsdp", True)
    plan = workshop.plan("training.per_device_train_batch_size=2", **sections)
    assert plan.batch.per_device == 2 and plan.batch.accumulation == 4
    plan = workshop.plan("strategy.type=fsdp", **sections)
    assert plan.batch.accumulation * plan.batch.per_device == 8 and plan.estimate.reason is None


def test_nothing_is_recomputed_where_nothing_is_known(workshop, job):
    sections = job("openai-community/gpt2", "h200", length=512)
    sections["cluster"].pop("gpu")
    plan = workshop.plan("strategy.type=ddp", "training.per_device_train_batch_size=1", **sections)
    assert plan.estimate is None and plan.model.gradient_checkpointing is False


@pytest.mark.parametrize("changes", [{"cluster": {"gpu": None}}, {"model": {"path": "org/name"}}])
def test_auto_needs_to_know_model_and_gpu(workshop, job, changes):
    with pytest.raises(DsftError) as caught:
        workshop.plan(**job("meta-llama/Llama-3.2-1B", "h100-80gb", **changes))
    assert [problem.kind for problem in caught.value.problems] == ["not-known"]
    with pytest.raises(DsftError, match="what fits is not known"):
        workshop.plan("strategy.type=ddp", **job("meta-llama/Llama-3.2-1B", "h100-80gb", **changes))
    workshop.plan("strategy.type=ddp", "training.per_device_train_batch_size=1",
                  **job("meta-llama/Llama-3.2-1B", "h100-80gb", **changes))  # fmt: skip


def refusal(workshop, sections, *overrides: str):
    with pytest.raises(DsftError) as caught:
        workshop.plan(*overrides, **sections)
    (problem,) = caught.value.problems
    assert problem.kind == "does-not-fit" and caught.value.exit_code == 2
    return problem


def test_more_gpus_or_lora_would_fit(workshop, job):
    """What is said to fit does, and one GPU less would not."""
    limited = {"memory_gib": 71}  # too little to offload to
    problem = refusal(workshop, job("meta-llama/Llama-3.2-3B", "l4", 1, 1, rows=60, cluster=limited))
    assert problem.where.line is not None and "the recipe says 71.0 GiB" in problem.message
    more, lora = problem.help.removeprefix("this would fit: ").split("; or ")
    assert lora == '"method": {"type": "lora"}'
    gpus = int(re.fullmatch(r"1 machine with (\d+) l4 each", more)[1])
    workshop.plan(**job("meta-llama/Llama-3.2-3B", "l4", 1, gpus, rows=60, cluster=limited))
    workshop.plan("method.type=lora", **job("meta-llama/Llama-3.2-3B", "l4", 1, 1, rows=60, cluster=limited))
    refusal(workshop, job("meta-llama/Llama-3.2-3B", "l4", 1, gpus - 1, rows=60, cluster=limited))


def test_more_machines_would_fit(workshop, job):
    limited = {"memory_gib": 116}
    problem = refusal(
        workshop, job("meta-llama/Llama-3.2-3B", "t4", 1, 8, rows=64, cluster=limited, training={"precision": "fp32"})
    )
    machines = int(re.search(r"(\d+) machines with 8 t4 each", problem.help)[1])
    workshop.plan(
        **job("meta-llama/Llama-3.2-3B", "t4", machines, 8, rows=64, cluster=limited, training={"precision": "fp32"})
    )


def test_fewer_processes_would_fit(workshop, job):
    """Each loads the whole model into its machine's memory. What is said to fit does."""
    sections = job("Qwen/Qwen3-8B", "h100-80gb", 1, 8, method={"type": "lora"}, cluster={"memory_gib": 100})
    problem = refusal(workshop, sections)
    fewer = int(re.search(r"(\d+) processes on each machine", problem.help)[1])
    workshop.plan(f"cluster.processes_per_node={fewer}", "training.global_batch_size=60", **sections)


def test_fewer_processes_on_the_same_machine(workshop, job):
    """A machine of which the recipe uses two GPUs of eight has all of its memory, where the recipe says so."""
    sections = job("meta-llama/Llama-3.1-70B", "h100-80gb", 1, 8, length=2048, rows=64)
    problem = refusal(workshop, sections)
    fewer, gib = re.search(r'(\d+) process(?:es)? on each machine, and "memory_gib": (\d+)', problem.help).groups()
    try:
        workshop.plan(f"cluster.processes_per_node={fewer}", f"cluster.memory_gib={gib}", **sections)
    except DsftError as error:  # of a machine with too small a disk for a result of this size
        assert [problem.kind for problem in error.problems] == ["disk-space"]


def test_a_shorter_length_would_fit(workshop, job):
    """The longest in steps of 64 tokens: the next one does not fit."""
    sections = job("meta-llama/Llama-3.1-8B", "l4", 1, 1, rows=16, length=32768, method={"type": "lora"})
    problem = refusal(workshop, sections)
    shorter = int(re.fullmatch(r'this would fit: "max_length": (\d+)', problem.help)[1])
    workshop.plan(f"data.max_length={shorter}", **sections)
    (warning,) = workshop.warnings(f"data.max_length={shorter + 64}", **sections)
    assert warning.kind == "memory-tight"


def test_a_strategy_that_is_said_and_does_not_fit(workshop, job):
    """Another one that would fit is named, and fits."""
    sections = job("meta-llama/Llama-3.1-8B", "h100-80gb")
    problem = refusal(workshop, sections, "strategy.type=ddp")
    assert problem.where.source == "--set strategy.type=ddp"
    assert problem.message.startswith("ddp needs about 1") and "79.2 GiB" in problem.message
    assert problem.help.startswith("this would fit: fsdp, weights kept gathered, 64 rows = ")


def test_what_would_fit_is_said_of_what_the_recipe_says(workshop, job):
    """Where no strategy fits, a length is one at which the recipe's own strategy does."""
    sections = job("Qwen/Qwen2.5-0.5B", "l4", 1, 2, rows=16, length=32768, cluster={"memory_gib": 100})
    said = ("strategy.type=ddp", "model.gradient_checkpointing=false", "training.per_device_train_batch_size=1")
    problem = refusal(workshop, sections, *said)
    shorter = int(re.search(r'"max_length": (\d+)$', problem.help)[1])
    plan = workshop.plan(f"data.max_length={shorter}", *said, **sections)
    assert plan.strategy.engine == "ddp" and not workshop.warnings(f"data.max_length={shorter}", *said, **sections)


def test_what_would_fit_only_another_way_says_the_way(workshop, job):
    """At no length does DDP fit: the length comes with a strategy that does."""
    sections = job("meta-llama/Llama-3.2-3B", "l4", 1, 8, rows=16, length=65536)
    problem = refusal(workshop, sections, "strategy.type=ddp", "training.per_device_train_batch_size=1")
    for remedy in problem.help.removeprefix("this would fit: ").split("; or "):
        assert re.search(r" with (fsdp|deepspeed|single).*, 16 rows = 1 per device x ", remedy), remedy


def test_a_strategy_that_is_said_may_use_what_is_doubtful(workshop, job):
    """Estimates err: what a person spells out is refused only where it cannot be."""
    sections = job("meta-llama/Llama-3.2-1B", "h100-80gb", strategy={"type": "ddp"})
    needs = workshop.plan(
        "training.per_device_train_batch_size=8", "model.gradient_checkpointing=false", **sections
    ).estimate
    assert 1.0 < needs.device_bytes / needs.capacity_bytes / (1 - RESERVE) < DOUBT
    (warning,) = workshop.warnings(
        "training.per_device_train_batch_size=8", "model.gradient_checkpointing=false", **sections
    )
    assert (warning.kind, warning.severity) == ("memory-tight", "warning")
    assert "10% should stay free" in warning.message and warning.help.startswith("this would fit: ")


def test_no_machine_has_the_memory_to_offload_a_giant(workshop, job):
    problem = refusal(workshop, job("meta-llama/Llama-3.1-405B", "h100-80gb"))
    assert "of each machine's own memory; machines with 8 h100-80gb are taken to have 1863 GiB" in problem.message
    assert problem.help.startswith('if the machines have more, say it in "cluster.memory_gib"; ')


def test_a_machines_own_memory_limits_offloading(workshop, job):
    sections = job("Qwen/Qwen2.5-7B", "a100-80gb", 1, 1)
    assert "host memory" in strategy_name(workshop.plan("cluster.memory_gib=256", **sections).strategy)
    problem = refusal(workshop, sections, "cluster.memory_gib=64")
    assert "the recipe says 64.0 GiB" in problem.message and "lora" in problem.help


def test_on_cpus_the_simplest_that_fits(workshop):
    auto = {"strategy": {"type": "auto"}, "training": {"max_steps": 5, "global_batch_size": 16, "learning_rate": 1e-3}}
    plan = workshop.plan("cluster.memory_gib=4", **auto)
    assert (plan.strategy.engine, plan.batch.per_device, plan.estimate.seconds_per_update) == ("ddp", 8, None)
    assert plan.estimate.capacity_bytes == 2 * GIB
    (warning,) = workshop.warnings("cluster.memory_gib=1", **auto)
    assert warning.kind == "memory-tight" and "the recipe says 512 MiB for each" in warning.message


def test_differences_below_what_estimates_tell_do_not_count(workshop, job):
    """Of ways about as fast the first, which is the simplest, is taken."""
    cost = Cost(compute=1.0, communication=0, hidden=0, optimizer=0, offload=0, flops=0, sent=0)
    outlook = Outlook(None, None, cost, None)
    slightly, much = (
        dataclasses.replace(outlook, cost=dataclasses.replace(cost, compute=1 - part))
        for part in (ALIKE / 2, 1.5 * ALIKE)
    )
    assert fastest([outlook, slightly]) is outlook
    assert fastest([outlook, much]) is much
    assert fastest([dataclasses.replace(outlook, lacks="device memory"), much]) is much
    assert fastest([dataclasses.replace(outlook, lacks="host memory")]) is None


def test_more_machines_with_a_batch_that_they_can_divide(workshop, job):
    """No more than six processes can divide six rows."""
    changes = {"cluster": {"memory_gib": 116}, "training": {"precision": "fp32"}}
    problem = refusal(workshop, job("meta-llama/Llama-3.2-3B", "t4", 1, 6, rows=6, **changes))
    machines, batch = re.search(r'(\d+) machines with 8 t4 each and "global_batch_size": (\d+)', problem.help).groups()
    workshop.plan(**job("meta-llama/Llama-3.2-3B", "t4", int(machines), 8, rows=int(batch), **changes))


def test_fewer_processes_on_cpus(workshop):
    auto = {"strategy": {"type": "auto"}, "training": {"max_steps": 5, "global_batch_size": 16, "learning_rate": 1e-3}}
    (warning,) = workshop.warnings("cluster.memory_gib=1", **auto)
    assert warning.help.startswith("this would fit: 1 process on each machine")
    assert workshop.warnings("cluster.memory_gib=1", "cluster.processes_per_node=1", **auto) == []


def test_a_smaller_rank_would_fit(workshop, job):
    changes = {"cluster": {"memory_gib": 30}, "training": {"precision": "fp32"}}
    sections = job("meta-llama/Llama-3.2-3B", "t4", 1, 1, rows=1, length=64, **changes)
    sections |= {"method": {"type": "lora", "r": 2000}}
    problem = refusal(workshop, sections)
    rank = int(re.search(r'"r": (\d+)', problem.help)[1])
    workshop.plan(f"method.r={rank}", **sections)


def test_a_cpu_job_is_refused_where_the_recipe_says_the_memory(workshop):
    """Of this machine's memory it is warned only: the job may run on another one."""
    auto = {"strategy": {"type": "auto"}, "training": {"max_steps": 5, "global_batch_size": 16, "learning_rate": 1e-3}}
    cluster = {"device": "cpu", "processes_per_node": 8, "memory_gib": 1}
    assert refusal(workshop, COMPLETE | auto | {"cluster": cluster}).message.startswith("fsdp")
