"""A tiny random model with a real tokenizer, rows of unequal length, and plans over them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

from dsft.plan import record

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# fmt: off
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "wizards", "box", "sing")
# fmt: on


def rows(count: int) -> list[dict[str, str]]:
    """Alpaca rows whose answers have 1 to 16 words, so that token means differ from row means."""

    def text(start: int, length: int) -> str:
        return " ".join(WORDS[(start + 3 * i) % len(WORDS)] for i in range(length))

    return [
        {"instruction": text(i, 2 + i % 5), "input": "", "output": text(i * 7, 1 + (i * 5) % 16)} for i in range(count)
    ]


def write_rows(path: Path, count: int) -> Path:
    path.write_text(json.dumps(rows(count)))
    return path


def tokenizer(eos: str = "<|im_end|>", pad: str = "<|im_end|>", template: str = CHATML, extra: tuple[str, ...] = ()):
    """A byte-level BPE tokenizer of some 400 tokens; by default its pad, eos and end of turn are one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<bos>", "<eos>", *extra]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    bpe.train_from_iterator([json.dumps(row) for row in rows(64)], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=eos, pad_token=pad, bos_token="<bos>", chat_template=template
    )


def write_model(
    folder: Path,
    *,
    tied: bool = True,
    layers: int = 4,
    seed: int = 0,
    spread: float = 0.2,
    width: int = 64,
    tokens=None,
) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokens = tokens or tokenizer()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=32,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=tokens.bos_token_id,
        eos_token_id=tokens.eos_token_id,
        pad_token_id=None,
        initializer_range=spread,  # far from uniform guesses, so that gradients are worth clipping
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokens.save_pretrained(folder)
    return folder


def data_file(path: Path) -> record.DataFile:
    content = path.read_bytes()
    return record.DataFile(str(path), "alpaca", len(json.loads(content)), hashlib.sha256(content).hexdigest())


def plan(
    model: Path,
    data: Path | record.DataFile,
    output: Path,
    *,
    engine: str = "single",
    stage: int | None = None,
    world: int = 1,
    per_device: int = 4,
    accumulation: int = 1,
    method: str = "lora",
    updates: int = 10,
    eval_split_rows: int = 0,
    checkpointing: bool = False,
    save_updates: int | None = None,
    targets: str | tuple[str, ...] = "all-linear",
    dropout: float = 0.0,
    resume: str = "auto",
    cpu_offload: bool = False,
    hybrid_shard: bool = False,
    offload_optimizer: str = "none",
    offload_param: str = "none",
    reshard_after_forward: bool = True,
    config: dict | None = None,
    machines: int = 1,
    **training,
) -> record.Plan:
    """A plan as `dsft.plan.make_plan` would make it, with what a test wants to vary as an argument."""
    file = data if isinstance(data, record.DataFile) else data_file(data)
    lora = method == "lora"
    whole = per_device * accumulation * world
    trained = file.rows - eval_split_rows
    defaults = {
        "learning_rate": 1e-2, "lr_scheduler_type": "linear", "warmup_updates": 2, "optim": "adamw",
        "weight_decay": 0.01, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "max_grad_norm": 0.5,
        "precision": "fp32", "seed": 7, "eval_updates": None,
    }  # fmt: skip
    if config is None:  # ZeRO-3 leaves small parameters whole by default: all of a tiny model's
        config = {"zero_optimization": {"stage3_param_persistence_threshold": 0}} if stage == 3 else {}
    deepspeed, fsdp = engine == "deepspeed", engine == "fsdp"
    return record.Plan(
        name="tiny",
        recipe_sha256="0" * 64,
        versions={},
        model=record.Model(str(model), None, "sdpa", False, checkpointing),
        data=record.Data(
            train=(file,), eval=None, eval_split_rows=eval_split_rows, train_rows=trained, eval_rows=eval_split_rows,
            max_length=256, chat_template=None,
        ),
        method=record.Method(method, 4 if lora else None, 8 if lora else None, dropout if lora else None,
                             targets if lora else None),
        strategy=record.Strategy(
            engine, stage, offload_optimizer if deepspeed else None, offload_param if deepspeed else None,
            reshard_after_forward if fsdp else None, cpu_offload if fsdp else None, hybrid_shard if fsdp else None,
            config,
        ),
        batch=record.Batch(world, per_device, accumulation, whole),
        training=record.Training(updates_per_epoch=-(-trained // whole), total_updates=updates,
                                 **{**defaults, **training}),
        checkpoint=record.Checkpoint(str(output), save_updates, 2, resume),
        logging=record.Logging(1, False),
        cluster=record.Cluster(
            "cpu", tuple(record.Host(f"node{at}", world // machines) for at in range(machines)), world // machines, 60
        ),
        launcher="local",
    )  # fmt: skip


def change(plan: record.Plan, part: str, **values) -> record.Plan:
    return dataclasses.replace(plan, **{part: dataclasses.replace(getattr(plan, part), **values)})
