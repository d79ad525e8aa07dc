"""The model and the tokenizer, as the plan wants them, on the CPU and not yet spread over processes."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from dsft.errors import failed, refused
from dsft.plan.record import Plan


def load_tokenizer(plan: Plan) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with the plan's chat template if it has one. Raises DsftError without a template."""
    model = plan.model
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            model.path, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
    except Exception as error:
        raise failed("model-load", f"no tokenizer from {model.path}: {_first_line(error)}") from error
    if plan.data.chat_template is not None:
        tokenizer.chat_template = plan.data.chat_template
    try:
        tokenizer.get_chat_template()
    except ValueError as error:  # it has none, or some for other uses only
        raise refused(
            "no-chat-template",
            f"the tokenizer of {model.path} has no chat template, so rows cannot be put into the model's words",
            help="name a file with a Jinja template in data.chat_template",
        ) from error
    return tokenizer


def build_model(plan: Plan) -> nn.Module:
    """The model in train mode: base weights, adapters if asked for, gradient checkpointing if asked for.

    What is trained is fp32. Frozen weights are bf16 under bf16. The start of the adapters depends on the seed alone,
    so every rank builds the same model.
    """
    lora = plan.method.type == "lora"
    dtype = torch.bfloat16 if lora and plan.training.precision == "bf16" else torch.float32
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            plan.model.path,
            revision=plan.model.revision,
            trust_remote_code=plan.model.trust_remote_code,
            attn_implementation=plan.model.attn_implementation,
            dtype=dtype,
            output_loading_info=True,
        )
    except Exception as error:
        raise failed("model-load", f"cannot load {plan.model.path}: {_first_line(error)}") from error
    missing = sorted(loading["missing_keys"])
    if missing:  # transformers fills them with random numbers and goes on
        raise failed(
            "model-incomplete",
            f"{plan.model.path} lacks {len(missing)} weights that its config.json asks for, the first is {missing[0]}",
            help="take a whole copy of the model",
        )
    if lora:
        model = _with_adapters(model, plan)
    if plan.model.gradient_checkpointing:
        # Non-reentrant: the reentrant kind gives no gradients where no input requires one, as under LoRA.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def check_tokens(model: nn.Module, last_token: int) -> None:
    """Raises DsftError where the model has no embedding for the token: torch would end with an index that is out of range."""
    embeddings = model.get_input_embeddings().weight.shape[0]
    if last_token >= embeddings:
        raise failed(
            "tokenizer-mismatch",
            f"the rows have the token {last_token}, and the model embeddings for {embeddings} tokens",
            help="put the model's own tokenizer into its folder: tokenizer.json and tokenizer_config.json",
        )


def _with_adapters(model: nn.Module, plan: Plan) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    method = plan.method
    targets = method.target_modules if isinstance(method.target_modules, str) else list(method.target_modules)
    if not isinstance(targets, str):
        _check_targets(model, targets)
    torch.manual_seed(plan.training.seed)
    config = LoraConfig(
        r=method.r,
        lora_alpha=method.lora_alpha,
        lora_dropout=method.lora_dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    # Casts the adapters to fp32, and notes the revision that they belong to.
    return get_peft_model(model, config, revision=plan.model.revision or "main")


def _check_targets(model: nn.Module, targets: list[str]) -> None:
    """peft is content if one name matches; a name that matches nothing is a mistake all the same."""
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name, _ in model.named_modules()):
            present = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            raise refused(
                "unknown-target",
                f'method.target_modules: no module of the model is called "{target}"',
                help=f"its linear layers are {present}",
            )


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The stack of decoder layers: of all module lists, the one with the most parameters."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise failed("no-layers", f"{type(model).__name__} has no list of layers that FSDP could shard one by one")
    return max(lists, key=lambda module: sum(parameter.numel() for parameter in module.parameters()))


def base_model(model: nn.Module) -> nn.Module:
    """The transformers model inside a peft model; the model itself where there is no adapter."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
