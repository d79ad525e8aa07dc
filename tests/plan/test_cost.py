"""The time of an update: whole jobs and single terms against numbers worked out by hand from docs/planner.md, "Time",
and the papers named in dsft/plan/cost.py; a published measurement; and the order of ways.

The jobs are of Llama-3.1-8B. A layer's matrices have 4096 x (2 x 4096 + 2 x 1024 + 3 x 14336) = 218.1 million weights,
32 layers 6.980 billion; embedding and head have 128256 x 4096 = 0.5253 billion each, together 8.030 billion. Multiplied
are the layers and the head: 7.505 billion. Weights travel in 33 groups: 32 layers, and what is in none.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest

from dsft.plan import cost
from dsft.plan.facts import read_facts
from dsft.plan.gpus import GPUS
from dsft.plan.memory import layer_saved
from dsft.plan.workload import Workload

H100 = GPUS["h100-80gb"]  # 989 TFLOPS in bf16 and 67 in fp32, 3.35 TB/s, NVLink 450 GB/s, network 50 GB/s, PCIe 48 GB/s
A100 = GPUS["a100-80gb"]  # 312 TFLOPS, 2.039 TB/s, NVLink 300 GB/s, PCIe 24 GB/s
L40S = GPUS["l40s"]  # 362 TFLOPS, 0.864 TB/s, PCIe 24 GB/s, network 6.25 GB/s

WEIGHTS = 8_030_261_248
near = functools.partial(pytest.approx, rel=1e-3)


@pytest.fixture
def llama(workshop):
    return read_facts(workshop.published("meta-llama/Llama-3.1-8B"))


def work(engine: str = "single", stage: int | None = None, **said) -> Workload:
    """In bf16 with fp32 gradients and moments; a row of 4096 tokens; all weights trained."""
    world = said.get("world_size", 1)
    defaults = {"rows": 1, "length": 4096, "trained": WEIGHTS, "processes_per_node": min(world, 8), "shards": world}
    return Workload(engine, stage, **defaults | said)


# Whole jobs ----------------------------------------------------------------------------------------------------------


def test_one_process_computes_and_updates(llama):
    """A row of 4096 tokens in one process on an H100."""
    job = work()
    found = cost.step_time(llama, job, H100, 1)
    # 6 x 7.505e9 x 4096 = 184.4e12 operations, at half of 989e12 a second.
    matrices = 0.3730
    # 3.5 x 32 layers x 2 x 4096 (length) x 4096 (width) x 4096 (tokens) = 15.39e12, at 35 % of 989e12.
    attention = 0.04447
    # What a layer saves is written, read, and has a gradient that is written and read.
    elementwise = 4 * 4096 * 32 * layer_saved(llama, job) / 3.35e12
    assert found.flops == near(184.4e12 + 15.39e12)
    assert found.compute == near(matrices + attention + elementwise)
    # Weights, gradients and two moments, 4 bytes each, are read and written: 2 x 16 x 8.030e9 bytes at 3.35e12.
    assert found.optimizer == near(0.07671)
    assert (found.communication, found.sent, found.offload) == (0, 0, 0)
    assert found.seconds == near(matrices + attention + elementwise + 0.07671)


def test_adapters_under_ddp_hardly_communicate(llama):
    """LoRA of rank 8 on queries and values, 32 x 8 x (4096 + 4096 + 4096 + 1024) = 3,407,872 weights, on eight A100 of
    a machine: four passes of 2 rows of 2048."""
    job = work("ddp", world_size=8, rows=2, length=2048, accumulation=4, full=False, trained=3_407_872,
               rank=8, targets=("q_proj", "v_proj"))  # fmt: skip
    found = cost.step_time(llama, job, A100, 1)
    # Frozen matrices have no gradients of their own: 4 x 7.505e9 x 4096 = 122.96e12 operations, and adapters
    # 6 x 3.408e6 x 4096 = 0.08e12, at half of 312e12; attention 3.5 x 32 x 2 x 2048 x 4096 x 4096 = 7.697e12 at 35 %.
    one_pass = 0.7887 + 0.07048 + 4 * 4096 * 32 * layer_saved(llama, job) / 2.039e12
    assert found.flops == near(4 * (123.04e12 + 7.697e12)) and found.compute == near(4 * one_pass)
    # All-reduced over a ring, once: 2 x 7/8 x 3.408e6 x 4 = 23.86 MB at three quarters of 300e9; 33 starts of 30 us.
    communication = 0.000106 + 0.00099
    assert found.sent == near(23.86e6) and found.communication == near(communication)
    # 2 x (4 + 4 + 8) x 3.408e6 bytes at 2.039e12.
    assert found.optimizer == near(53.48e-6)
    assert found.seconds == near(found.compute + communication / 4 + 53.48e-6)


def test_zero_2_over_two_machines(llama):
    """Sixteen H100 in two machines, four passes of 2 rows of 2048; DeepSpeed's bf16 weights with fp32 masters."""
    job = work("deepspeed", 2, world_size=16, rows=2, length=2048, accumulation=4, trained_bytes=2, master_bytes=4,
               overlap_comm=False)  # fmt: skip
    found = cost.step_time(llama, job, H100, 2)
    # As in one process, but attention over half the length.
    one_pass = 0.3730 + 0.02223 + 4 * 4096 * 32 * layer_saved(llama, job) / 3.35e12
    assert found.compute == near(4 * one_pass)
    # fp32 gradients all-reduced in each pass, bf16 weights gathered once: 15/16 x 8.030e9 x (4 x 2 x 4 + 2) = 256.0e9
    # bytes. Eight GPUs' 50e9 a second of the network are less than NVLink's 450e9; three quarters of 400e9 are reached.
    # Five times 33 starts of 30 us.
    communication = 0.8532 + 0.00495
    assert found.sent == near(256.0e9) and found.communication == near(communication)
    # A sixteenth of the weights, 2 x (2 + 4 + 4 + 8) x 0.5019e9 bytes at 3.35e12.
    assert found.optimizer == near(0.005393)
    # DeepSpeed's default below stage 3: each bucket is waited for.
    assert found.hidden == 0 and found.seconds == near(4 * one_pass + communication + 0.005393)
    overlapping = cost.step_time(llama, dataclasses.replace(job, overlap_comm=True), H100, 2)
    # Of the gradients' 0.8031 + 0.00396 seconds three quarters go beside the backward pass; the weights' never.
    assert overlapping.hidden == near(3 / 4 * 0.8071) and overlapping.communication == found.communication


def test_zero_3_with_everything_offloaded(llama):
    """Eight A100 of a machine, two passes of a row of 4096, layers recomputed."""
    job = work("deepspeed", 3, world_size=8, accumulation=2, trained_bytes=2, master_bytes=4, checkpointing="full",
               offload_optimizer=True, offload_weights=True)  # fmt: skip
    found = cost.step_time(llama, job, A100, 1)
    # Layers once more forward: (6 x 7.505e9 + 2 x 6.980e9) x 4096 = 241.6e12 at half of 312e12; attention 4.5 / 3.5 of
    # 15.39e12 at 35 % of it; half of what is elementwise again.
    one_pass = 1.5488 + 0.18124 + 4 * 1.5 * 4096 * 32 * layer_saved(llama, job) / 2.039e12
    assert found.compute == near(2 * one_pass)
    # Weights gathered forward and backward, gradients reduced, in each pass: 2 x 7/8 x 8.030e9 x (2 + 2 + 4) = 112.4e9
    # bytes at three quarters of 300e9; six times 33 starts.
    communication = 0.4997 + 0.00594
    assert found.sent == near(112.4e9) and found.communication == near(communication)
    # An eighth of the weights, 1.0038e9. Over PCIe, 24e9 a second: the sum of the fp32 gradients up and down in each pass
    # and once more down, and bf16 weights up, (5 x 4 + 2) x 1.0038e9 bytes; and 2 bytes of each weight up, twice in each
    # of two passes.
    assert found.optimizer == 0
    pcie = 0.92015 + 0.33459
    # On the CPUs: 208 bytes of a weight, of eight processes, through one memory of 100e9 a second.
    assert found.offload == near(pcie + 16.703)
    assert found.seconds == near(2 * one_pass + communication / 4 + pcie + 16.703)


def test_hybrid_sharding_waits_for_slow_links(llama):
    """Four machines of eight L40S, FSDP in each: a row of 512, layers recomputed. Communication is the longer part."""
    job = work("fsdp", world_size=32, shards=8, length=512, checkpointing="full", reduce_every_pass=True)
    found = cost.step_time(llama, job, L40S, 4)
    # (6 x 7.505e9 + 2 x 6.980e9) x 512 = 30.20e12 at half of 362e12; 4.5 x 32 x 2 x 512 x 4096 x 512 at 35 % of it.
    compute = 0.16687 + 0.00244 + 4 * 1.5 * 512 * 32 * layer_saved(llama, job) / 0.864e12
    assert found.compute == near(compute)
    # Inside: weights twice and gradients, 7/8 x 8.030e9 x (2 + 2 + 4) = 56.21e9 bytes at three quarters of PCIe's 24e9.
    # Between: a ring of four machines all-reduces an eighth of the gradients, 2 x 3/4 x 8.030e9 x 4 / 8 = 6.023e9 bytes
    # at three quarters of 6.25e9. Four times 33 starts.
    communication = 3.1229 + 1.2848 + 0.00396
    assert found.sent == near(56.21e9 + 6.023e9) and found.communication == near(communication)
    assert found.seconds == near(communication + compute / 4 + 0.03718)  # the update: 2 x 16 x 8.030e9 / 8 at 0.864e12


def test_fp32_computes_at_another_peak(llama):
    """512 tokens on an H100: 6 x 7.505e9 x 512 = 23.06e12 operations at half of 67e12, attention 0.2405e12 at 35 %."""
    job = work(length=512, compute_bytes=4)
    elementwise = 4 * 512 * 32 * layer_saved(llama, job) / 3.35e12
    assert cost.step_time(llama, job, H100, 1).compute == near(0.6882 + 0.01026 + elementwise)


# torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3: FSDP, local batch 2 of 8192 tokens, selective
# checkpointing, not compiled; H100 with 96 GB at 500 W, eight a machine, 400 Gb/s a GPU. Tokens a second and GPU.
@pytest.mark.parametrize(("gpus", "measured"), [(8, 5762), (128, 5605)])
def test_published_throughput(llama, gpus, measured):
    job = work("fsdp", world_size=gpus, rows=2, length=8192, checkpointing="selective", reduce_every_pass=True)
    predicted = 2 * 8192 / cost.step_time(llama, job, GPUS["h100-96gb"], gpus // 8).seconds
    assert 1 / 1.4 < predicted / measured < 1.4


# Terms ---------------------------------------------------------------------------------------------------------------


def test_operations_are_six_a_weight_and_token(llama):
    """Kaplan et al. 2020, table 1; the embedding is looked up and not multiplied."""
    multiplied = llama.parameters - llama.embedding_parameters
    assert cost.matrix_flops(llama, work()) == pytest.approx(6 * multiplied * 4096, rel=1e-6)
    layers = multiplied - llama.head_parameters
    for checkpointing, again in (("full", 2), ("selective", 1)):
        recomputed = cost.matrix_flops(llama, work(checkpointing=checkpointing))
        assert recomputed == pytest.approx((6 * multiplied + again * layers) * 4096, rel=1e-6)


def test_the_head_computes_only_the_logits_that_are_asked_for(llama):
    some = cost.matrix_flops(llama, work(logit_positions=96))
    assert cost.matrix_flops(llama, work()) - some == pytest.approx(6 * llama.head_parameters * 4000, rel=1e-6)


def test_of_frozen_weights_no_gradients_are_computed(llama):
    lora = cost.matrix_flops(llama, work(full=False, trained=10_000_000))
    assert lora == pytest.approx(4 * (llama.parameters - llama.embedding_parameters) * 4096 + 6e7 * 4096, rel=1e-6)


def test_a_token_passes_two_of_eight_experts(workshop):
    """Mixtral-8x7B: a layer's 4096 x (2 x 4096 + 2 x 1024) of the attention, 2 x 3 x 4096 x 14336 of experts, 8 x 4096
    of the router; 32 layers and a head of 32000 x 4096 are 12.75e9 weights, of 46.7e9."""
    mixtral = read_facts(workshop.published("mistralai/Mixtral-8x7B-v0.1"))
    assert cost.matrix_flops(mixtral, work(trained=mixtral.parameters)) == near(6 * 12.75e9 * 4096)


def test_attention_grows_with_the_square_of_the_length(llama):
    once, twice = (cost.attention_flops(llama, work(length=length)) for length in (4096, 8192))
    assert twice == 4 * once
    # Forward, causal: 2 x length^2 x width a layer; backward 2.5 times that (Dao 2023, section 4.1).
    assert once == 3.5 * 32 * 2 * 4096**2 * 4096
    # Recomputed with its layer; selective checkpointing keeps its output.
    assert cost.attention_flops(llama, work(checkpointing="full")) == 4.5 / 3.5 * once
    assert cost.attention_flops(llama, work(checkpointing="selective")) == once


@pytest.mark.parametrize(("checkpointing", "times"), [("none", 4), ("selective", 6), ("full", 6)])
def test_saved_values_are_touched_again_where_they_are_made_again(llama, checkpointing, times):
    job = work(checkpointing=checkpointing)
    assert cost.touched_bytes(llama, job) == times * 4096 * 32 * layer_saved(llama, job)


def test_ranks_of_tensor_parallelism_share_operations(llama):
    for flops in (cost.matrix_flops, cost.attention_flops):
        assert flops(llama, work(world_size=8, tensor_parallel=8)) == flops(llama, work()) / 8


@pytest.mark.parametrize(
    ("engine", "stage", "said", "weights", "groups"),
    [
        ("ddp", None, {"accumulation": 2}, 2 * 7 / 8 * 4, 1),  # fp32 gradients, all-reduced once
        ("deepspeed", 1, {"accumulation": 2}, 7 / 8 * (2 * 4 + 2), 2),  # and bf16 weights gathered
        ("deepspeed", 2, {"accumulation": 2}, 7 / 8 * (2 * 2 * 4 + 2), 3),
        ("fsdp", None, {"reduce_every_pass": True}, 7 / 8 * (2 * 2 + 4), 3),  # weights twice, gradients once
        ("fsdp", None, {"reduce_every_pass": True, "reshard": False}, 7 / 8 * (2 + 4), 2),
        ("fsdp", None, {"reduce_every_pass": True, "accumulation": 2}, 2 * 7 / 8 * (2 * 2 + 4), 6),
        ("fsdp", None, {"accumulation": 2}, 7 / 8 * (2 * 2 * 2 + 4), 5),
        ("deepspeed", 3, {"accumulation": 2}, 2 * 7 / 8 * (2 * 2 + 4), 6),
    ],
)
def test_bytes_sent_a_weight(llama, engine, stage, said, weights, groups):
    """Rajbhandari et al. 2019, section 7: rings over eight ranks."""
    found = cost.sent(llama, work(engine, stage, world_size=8, **said), 1)
    assert {each.link for each in found} == {"all"}
    assert sum(each.size for each in found) == pytest.approx(weights * WEIGHTS)
    assert sum(each.count for each in found) == groups * 33


def test_frozen_weights_are_gathered_as_they_are_stored(llama):
    job = work("fsdp", world_size=8, full=False, trained=10**7, frozen_bytes=1, reduce_every_pass=True)
    (found,) = cost.sent(llama, job, 1)
    assert found.size == pytest.approx(7 / 8 * (2 * 1 * WEIGHTS + 4e7))


def test_a_hybrid_sends_only_shares_of_gradients_between_machines(llama):
    hybrid = work("fsdp", world_size=32, shards=8, processes_per_node=8, reduce_every_pass=True, accumulation=3)
    inside, between = cost.sent(llama, hybrid, 4)
    assert inside[:3] == ("inside", pytest.approx(3 * 7 / 8 * (2 * 2 + 4) * WEIGHTS), 9 * 33)
    assert between[:3] == ("between", pytest.approx(2 * 3 / 4 * 4 * WEIGHTS / 8), 33)


def test_with_hpz_the_backward_pass_gathers_from_near_ranks(llama):
    """Wang et al. 2023, section 3.2. Stage 3 on two machines: all weights forward and gradients over all sixteen, weights
    backward over the eight of a machine."""
    job = work("deepspeed", 3, world_size=16, accumulation=2, zero_hpz=8)
    far, near_ = cost.sent(llama, job, 2)
    assert far[:3] == ("all", pytest.approx(2 * 15 / 16 * (2 + 4) * WEIGHTS), 4 * 33)
    assert near_[:3] == ("inside", pytest.approx(2 * 7 / 8 * 2 * WEIGHTS), 2 * 33)
    whole = cost.step_time(llama, dataclasses.replace(job, zero_hpz=1), H100, 2)
    assert cost.step_time(llama, job, H100, 2).communication < whole.communication


@pytest.mark.parametrize(
    ("engine", "stage", "said", "beside"),
    [
        ("ddp", None, {}, 2 / 3),  # the last backward pass
        ("ddp", None, {"accumulation": 4}, 2 / 3 / 4),
        ("fsdp", None, {"accumulation": 4}, 1),
        ("deepspeed", 3, {}, 1),
        ("deepspeed", 3, {"overlap_comm": False}, 0),
        ("deepspeed", 2, {"overlap_comm": False, "accumulation": 4}, 0),
        ("deepspeed", 2, {"accumulation": 4}, 2 / 3),
        ("deepspeed", 1, {"accumulation": 4, "compute_bytes": 4}, 2 / 3 / 4),
        ("deepspeed", 1, {"accumulation": 4}, 0),  # under bf16 it reduces behind the backward pass
    ],
)
def test_computing_that_goes_on_beside_communication(llama, engine, stage, said, beside):
    assert cost.sent(llama, work(engine, stage, world_size=8, **said), 1)[0].beside == pytest.approx(beside)


def test_no_more_is_hidden_than_is_computed(llama):
    """A slow network under DDP, four passes: three quarters of what a backward pass takes, and not of all four."""
    job = work("ddp", world_size=8, accumulation=4, processes_per_node=1, length=128)
    found = cost.step_time(llama, job, L40S, 8)
    assert found.communication > found.compute
    assert found.hidden == pytest.approx(3 / 4 * 2 / 3 / 4 * found.compute)


@pytest.mark.parametrize(("checkpointing", "times"), [("none", 8), ("full", 12)])
def test_tensor_parallelism_sends_tokens_in_every_layer(llama, checkpointing, times):
    """Korthikanti et al. 2022, section 4.2: four times a layer forward and four backward, 4096 tokens of 4096 bf16
    values over a ring of eight."""
    job = work("fsdp", world_size=8, shards=1, tensor_parallel=8, accumulation=2, checkpointing=checkpointing)
    (found,) = cost.sent(llama, job, 1)
    assert found[:3] == ("inside", 2 * 32 * times * 7 / 8 * 4096 * 4096 * 2, 2 * 32 * times)


@pytest.mark.parametrize(
    ("engine", "stage", "weights", "groups"),
    [("ddp", None, 2 * 4, 1), ("deepspeed", 1, 2 * 4 + 2, 2), ("fsdp", None, 2 * 2 + 4, 3)],
)
def test_ranks_of_tensor_parallelism_have_an_eighth_of_the_weights(llama, engine, stage, weights, groups):
    """Two copies, each over the eight ranks of a machine: a ring of two sends a half."""
    _, *found = cost.sent(llama, work(engine, stage, world_size=16, tensor_parallel=8, shards=2), 1)
    assert sum(each.size for each in found) == pytest.approx(1 / 2 * weights * WEIGHTS / 8)
    assert sum(each.count for each in found) == groups * 33


@pytest.mark.parametrize(
    ("link", "gpu", "nodes", "bytes_a_second"),
    [
        ("all", "h100-80gb", 1, 450e9),
        ("all", "h100-80gb", 2, 8 * 50e9),  # a ring crosses the network with the shares of all eight
        ("all", "l40s", 2, 24e9),  # PCIe is slower than 8 x 6.25e9
        ("inside", "h100-80gb", 2, 450e9),
        ("between", "h100-80gb", 2, 50e9),
    ],
)
def test_rate_of_a_link(link, gpu, nodes, bytes_a_second):
    assert cost.rate(link, work("ddp", world_size=8 * nodes), GPUS[gpu], nodes) == bytes_a_second


@pytest.mark.parametrize(("optimizer", "state"), [("adamw", 8), ("sgd", 0)])
def test_an_update_reads_and_writes_what_it_needs(optimizer, state):
    """fp32 weights and gradients; AdamW's two moments; torch.optim.SGD without momentum keeps nothing. At 3.35e12."""
    found = cost.optimizer_time(work(optimizer=optimizer, trained=3_350_000_000), H100)
    assert found == pytest.approx(2 * (4 + 4 + state) / 1000)


@pytest.mark.parametrize(("optimizer", "moved"), [("adamw", 208), ("sgd", 12)])
@pytest.mark.parametrize(("engine", "stage", "down"), [("fsdp", None, 3), ("deepspeed", 2, 1), ("deepspeed", 3, 7)])
def test_an_offloaded_update(llama, optimizer, moved, engine, stage, down):
    """Three passes; of 16 billion weights 2 are one process'. ZeRO-2 sums gradients on the device."""
    job = work(engine, stage, world_size=8, accumulation=3, trained=16 * 10**9, optimizer=optimizer,
               offload_optimizer=True)  # fmt: skip
    found = cost.step_time(llama, job, H100, 1)
    assert found.optimizer == 0
    assert found.offload == pytest.approx(2 * (4 * down + 2) / 48 + 2 * moved * 8 / 100)


# The order of ways ---------------------------------------------------------------------------------------------------


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


# Plans ---------------------------------------------------------------------------------------------------------------

QWEN = 494_032_768  # weights of Qwen2.5-0.5B


@pytest.mark.parametrize(
    ("strategy", "recomputed", "job"),
    [
        ({"type": "ddp"}, False, Workload("ddp", shards=4, autocast=True)),
        ({"type": "fsdp", "hybrid_shard": True}, False, Workload("fsdp", shards=2, reduce_every_pass=True)),
        (
            {"type": "deepspeed", "zero_stage": 3, "offload_optimizer": "cpu"},
            True,
            Workload(
                "deepspeed",
                3,
                shards=4,
                checkpointing="full",
                trained_bytes=2,
                master_bytes=4,
                offload_optimizer=True,
            ),
        ),
    ],
)
def test_a_plan_says_seconds_of_its_own_job(workshop, strategy, recomputed, job):
    """Two machines of two H100; two passes of 2 rows of 128."""
    workshop.write("hosts", "one slots=2\ntwo slots=2\n")
    model = workshop.published("Qwen/Qwen2.5-0.5B")
    plan = workshop.plan(
        model={"path": model, "gradient_checkpointing": recomputed},
        method={"type": "full"},
        strategy=strategy,
        training={"max_steps": 5, "learning_rate": 1e-5, "global_batch_size": 16, "per_device_train_batch_size": 2},
        cluster={"device": "cuda", "gpu": "h100-80gb", "hostfile": "hosts"},
    )
    batch = {"world_size": 4, "processes_per_node": 2, "rows": 2, "length": 128, "accumulation": 2, "trained": QWEN}
    by_hand = cost.step_time(read_facts(model), dataclasses.replace(job, **batch), H100, 2)
    assert plan.estimate.seconds_per_update == pytest.approx(by_hand.seconds, rel=1e-9)
