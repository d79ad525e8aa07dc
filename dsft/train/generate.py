"""`dsft generate`: one answer to one prompt, through the chat template, as the model was trained."""

from __future__ import annotations

from pathlib import Path

import torch

from dsft.errors import Where, refused
from dsft.train.export import load_result


def generate(model: Path, prompt: str, max_new_tokens: int = 256) -> str:
    """The most likely answer (greedy) to `prompt`; it ends where the model ends its turn. Raises DsftError."""
    network, tokenizer = load_result(model)
    if tokenizer.chat_template is None:
        raise refused("no-chat-template", f"the tokenizer in {model} has no chat template", where=Where(str(model)))
    return answer(network, tokenizer, prompt, max_new_tokens)[0]


@torch.no_grad()
def answer(network, tokenizer, prompt: str, max_new_tokens: int) -> tuple[str, bool]:
    """The answer's text, and whether the model ended it by itself."""
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(network.device)
    output = network.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)[0]
    new = output[inputs["input_ids"].shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True).strip(), len(new) < max_new_tokens
