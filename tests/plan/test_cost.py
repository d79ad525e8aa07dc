"""The time of an update: its parts against numbers worked out by hand, and the order of ways."""

from __future__ import annotations

import dataclasses
import json

import pytest

from dsft.plan import cost
from dsft.plan.facts import read_facts
from dsft.plan.gpus import GPUS
from dsft.plan.memory import Workload

H100 = GPUS["h100-80gb"]


@pytest.fixture
def llama(workshop):
    return read_facts(workshop.published("meta-llama/Llama-3.1-8B"))


def work(engine: str = "single", **said) -> Workload:
    trained = 8_030_261_248
    world = said.get("world_size", 1)
    defaults = {"rows": 1, "length": 4096, "trained": trained, "processes_per_node": min(world, 8), "shards": world}
    return Workload(engine, **defaults | said)


def test_operations_are_six_a_weight_and_token(llama):
    """Kaplan et al. 2020, table 1; the embedding is looked up and not multiplied."""
    multiplied = llama.parameters - llama.embedding_parameters
    assert cost.matrix_flops(llama, work()) == pytest.approx(6 * multiplied * 4096, rel=1e-6)
    recomputed = cost.matrix_flops(llama, work(checkpointing="full"))
    layers = multiplied - llama.head_parameters
    assert recomputed == pytest.approx((6 * multiplied + 2 * layers) * 4096, rel=1e-6)


def test_of_frozen_weights_no_gradients_are_computed(llama):
    lora = cost.matrix_flops(llama, work(full=False, trained=10_000_000))
    assert lora == pytest.approx(4 * (llama.parameters - llama.embedding_parameters) * 4096 + 6e7 * 4096, rel=1e-6)


def test_attention_grows_with_the_square_of_the_length(llama):
    once, twice = (cost.attention_flops(llama, work(length=length)) for length in (4096, 8192))
    assert twice == 4 * once
    # Forward, causal: 2 x length^2 x width a layer; backward 2.5 times that (Dao 2023, section 4.1).
    assert once == 3.5 * 32 * 2 * 4096**2 * 4096


@pytest.mark.parametrize(
    ("engine", "said", "weights"),
    [
        ("ddp", {}, 2 * 7 / 8 * 4),  # fp32 gradients, all-reduced
        ("deepspeed", {"zero_stage": 1}, 7 / 8 * (2 * 4 + 2)),  # gradients all-reduced, bf16 weights gathered
        ("deepspeed", {"zero_stage": 2, "accumulation": 2}, 7 / 8 * (2 * 2 * 4 + 2)),
        ("fsdp", {"reduce_every_pass": True}, 7 / 8 * (2 * 2 + 4)),  # weights twice, gradients once
        ("fsdp", {"reduce_every_pass": True, "reshard": False}, 7 / 8 * (2 + 4)),
        ("fsdp", {"reduce_every_pass": True, "accumulation": 2}, 2 * 7 / 8 * (2 * 2 + 4)),
        ("fsdp", {"accumulation": 2}, 7 / 8 * (2 * 2 * 2 + 4)),
        ("deepspeed", {"zero_stage": 3, "accumulation": 2}, 2 * 7 / 8 * (2 * 2 + 4)),
    ],
)
def test_bytes_sent_a_weight(llama, engine, said, weights):
    """Rajbhandari et al. 2019, section 7: rings over eight ranks."""
    sent = cost.step_time(llama, work(engine, world_size=8, **said), H100, 1).sent
    assert sent == pytest.approx(weights * llama.parameters, rel=0.01)


def test_a_hybrid_sends_only_shares_of_gradients_between_machines(llama):
    hybrid = work("fsdp", world_size=32, shards=8, processes_per_node=8, reduce_every_pass=True, accumulation=3)
    links = {link: size for link, size, _ in cost.sent(llama, hybrid, 4)}
    assert links["between"] == pytest.approx(2 * 3 / 4 * 4 * llama.parameters / 8)
    assert links["inside"] == pytest.approx(3 * 7 / 8 * (2 * 2 + 4) * llama.parameters)


def test_what_takes_longer(llama):
    """A slower GPU, a slower link, recomputation, offloading."""

    def seconds(gpu=H100, nodes=1, **said):
        return cost.step_time(llama, work("fsdp", world_size=16, **said), gpu, nodes).seconds

    base = seconds()
    assert seconds(GPUS["a100-80gb"]) > base
    assert seconds(nodes=2, processes_per_node=8) > base
    assert seconds(checkpointing="full") > base
    assert seconds(offload_optimizer=True) > base
    assert seconds(dataclasses.replace(H100, inside=1e9)) > 2 * base
    assert seconds(rows=4) > 3 * base


def test_fp32_is_slower_than_bf16(llama):
    bf16, fp32 = (cost.step_time(llama, work(compute_bytes=size), H100, 1).compute for size in (2, 4))
    assert fp32 > 5 * bf16


def test_a_plan_says_seconds_as_the_model_gives_them(workshop):
    """End to end: the number in plan.json is this model's, of the plan's own batch."""
    plan = workshop.plan(
        "cluster.gpu=h100-80gb", "cluster.device=cuda", model={"path": workshop.published("Qwen/Qwen2.5-0.5B")}
    )
    assert plan.estimate.seconds_per_update > 0
    slower = workshop.plan(
        "cluster.gpu=l4", "cluster.device=cuda", model={"path": workshop.published("Qwen/Qwen2.5-0.5B")}
    )
    assert slower.estimate.seconds_per_update > plan.estimate.seconds_per_update
    assert json.loads(json.dumps(plan.estimate.seconds_per_update)) == plan.estimate.seconds_per_update
