"""The result: an adapter that plain peft loads, or a folder that plain transformers loads, checked after writing."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from dsft.errors import Where, failed
from dsft.plan.record import Plan
from dsft.train import folders
from dsft.train.checkpoint import collect
from dsft.train.data import end_of_turn
from dsft.train.engines.wrapped import Wrapped, trainable_parameters
from dsft.train.model import base_model
from dsft.train.world import World, on_main


def result_folder(plan: Plan) -> Path:
    return Path(plan.checkpoint.output_dir) / ("adapter" if plan.method.type == "lora" else "model")


def save_result(
    plan: Plan, engine: ModuleType, wrapped: Wrapped, model: nn.Module, tokenizer: PreTrainedTokenizerBase, world: World
) -> Path:
    """Writes the trained weights (collective), reads them back, and only then gives the folder its name.

    Raises DsftError on every rank where what was written is not what was trained.
    """
    weights = collect(wrapped, world, engine.gather)
    on_main(world, _write_and_check, plan, model, weights, tokenizer)
    return result_folder(plan)


def _write_and_check(plan: Plan, model: nn.Module, weights: dict, tokenizer: PreTrainedTokenizerBase) -> None:
    final = result_folder(plan)
    check_finite(weights, final)
    temporary = folders.begin(final)
    if plan.method.type == "lora":
        write_adapter(model, weights, temporary)
        check_adapter(temporary, weights)
    else:
        write_model(model, weights, temporary)
        check_model(temporary, weights)
    tokenizer.save_pretrained(temporary)
    base_model(model).generation_config.save_pretrained(temporary)
    folders.finish(temporary, final)


def settle_generation(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
    """Makes the model's generation config stop at the token that ends a turn: a template may end it with another than eos.

    Called before training: a config that transformers would refuse to save must not be found out after it.
    """
    config = base_model(model).generation_config
    stops = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    stops = dict.fromkeys([*(stop for stop in stops if stop is not None), end_of_turn(tokenizer)])
    config.eos_token_id = list(stops) if len(stops) > 1 else next(iter(stops))
    try:
        config.validate(strict=True)
    except ValueError:  # as published by some: a temperature, and no sampling that it would be for
        config.do_sample = True


def write_adapter(model: nn.Module, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """peft's adapter_config.json and adapter_model.safetensors, from whole weights by the model's own names."""
    from peft import get_peft_model_state_dict

    # Names for peft are its own affair; the embedding layers are not trained, so not saved.
    state = get_peft_model_state_dict(model, state_dict=dict(weights), save_embedding_layers=False)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "adapter_model.safetensors")
    config = copy.copy(model.peft_config["default"])
    config.inference_mode = True
    config.save_pretrained(folder)


def check_adapter(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """The file holds every gathered weight, whole and to the bit, and the adapter does something."""
    stored = load_file(folder / "adapter_model.safetensors")
    # peft leaves the adapter's name out of the file.
    compare({name.replace(".default.", "."): weight for name, weight in weights.items()}, stored, folder)
    if not any(tensor.any() for name, tensor in stored.items() if "lora_B" in name):
        raise failed(
            "empty-result", f"{folder}: every lora_B is zero, so nothing was trained", where=Where(str(folder))
        )


def write_model(model: nn.Module, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """config.json, generation_config.json and model*.safetensors; a tied weight is written once, under its first name."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: tensor for name, tensor in model.state_dict().items() if name not in parameters}
    base_model(model).save_pretrained(folder, state_dict={**weights, **buffers})
    # The dtype that transformers writes is the live module's, which DeepSpeed may have cast; the weights are fp32.
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}, indent=2) + "\n")


def check_model(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Plain transformers loads the folder and gets every gathered weight back, whole and to the bit."""
    plain = AutoModelForCausalLM.from_pretrained(folder)
    compare(weights, {name: parameter.detach() for name, parameter in trainable_parameters(plain).items()}, folder)


def check_finite(weights: dict[str, torch.Tensor], folder: Path) -> None:
    if not weights:
        raise failed("empty-result", "there are no trained weights to save")
    for name, weight in weights.items():
        if not torch.isfinite(weight).all():
            raise failed("non-finite-result", f"{name} holds values that are not finite; {folder.parent} has no result")


def compare(expected: dict[str, torch.Tensor], stored: dict[str, torch.Tensor], folder: Path) -> None:
    """Raises DsftError unless `stored` has the names, shapes and values of `expected`, to the bit."""
    for name in sorted(expected.keys() ^ stored.keys()):
        raise failed("incomplete-result", f"{folder}: {name} is {'missing' if name in expected else 'not trained'}")
    for name, tensor in expected.items():
        if tensor.shape != stored[name].shape:
            shapes = f"{list(stored[name].shape)} in place of {list(tensor.shape)}"
            raise failed("incomplete-result", f"{folder}: {name} has shape {shapes}")
        if tensor.dtype != stored[name].dtype or not torch.equal(tensor, stored[name]):
            raise failed("changed-result", f"{folder}: {name} was written with other values than were trained")
