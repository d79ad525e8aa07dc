"""`dsft export`: a trained folder into a plain model folder that needs neither dsft nor peft."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from dsft.errors import Where, failed, refused
from dsft.train import folders
from dsft.train.report import quieten_libraries


def find_result(source: Path) -> Path:
    """`source` itself if it is a model or an adapter, or the result in it if it is a run's folder."""
    for folder in (source, source / "adapter", source / "model"):
        if (folder / "adapter_config.json").is_file() or (folder / "config.json").is_file():
            return folder
    raise refused(
        "no-model",
        f"{source} holds neither a model (config.json) nor an adapter (adapter_config.json)",
        where=Where(str(source)),
        help="name the folder that the run reported, for example runs/NAME/adapter",
    )


def load_result(source: Path) -> tuple[torch.nn.Module, AutoTokenizer]:
    """The trained model, an adapter merged into its base, and its tokenizer. Raises DsftError for another folder."""
    folder = find_result(source)
    quieten_libraries("cpu")
    try:
        if (folder / "adapter_config.json").is_file():
            from peft import AutoPeftModelForCausalLM

            # An adapter is fp32; merging into a bf16 base would round it away.
            model = AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32).merge_and_unload()
            if (folder / "generation_config.json").is_file():  # the adapter's, which knows the end of a turn
                model.generation_config = GenerationConfig.from_pretrained(folder)
        else:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        return model.eval(), AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        message = f"cannot load {folder}: {type(error).__name__}: {error}"
        raise refused("model-load", message, where=Where(str(folder)), help="is it whole?") from error


def export(source: Path, target: Path) -> Path:
    """Writes `source` (a run, an adapter or a model) as a plain model folder `target`, in fp32 for an adapter.

    Raises DsftError where `target` exists: nothing is overwritten.
    """
    target = Path(os.path.abspath(target))
    if not target.parent.is_dir():
        raise refused("no-folder", f"{target.parent} is not a folder", help="make it first, or name another place")
    if target.exists() and any(target.iterdir() if target.is_dir() else [target]):
        raise refused("target-exists", f"{target} is already there", help="name a new folder, or remove this one")
    model, tokenizer = load_result(source)
    try:
        temporary = folders.begin(target)
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        folders.finish(temporary, target)
    except (OSError, SafetensorError) as error:
        folders.discard(target)
        raise failed("disk", f"cannot write {target}: {error}") from error
    return target
