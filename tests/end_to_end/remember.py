"""dsft.train, which at the end also writes down what the trained model in memory says to QUESTION: logits.pt."""

from __future__ import annotations

import sys
from pathlib import Path

from dsft.train import world
from dsft.train.__main__ import main

QUESTION = "Who are you?"


def ask(model, tokenizer):
    """Logits of every position of the question and the start of the answer: float tensor [positions, vocabulary]."""
    import torch

    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    model.eval()
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits[0]


def remembering(save_result):
    def save(plan, engine, wrapped, model, tokenizer, joined):
        import torch

        folder = save_result(plan, engine, wrapped, model, tokenizer, joined)
        logits = ask(wrapped.model, tokenizer)  # on every rank: sharded weights are gathered together
        if joined.is_main:
            torch.save(logits, Path(plan.checkpoint.output_dir) / "logits.pt")
        return folder

    return save


def joining(join):
    def joined(plan):
        result = join(plan)
        from dsft.train import run  # not before: the launched world is checked before anything heavy is imported

        run.save_result = remembering(run.save_result)
        return result

    return joined


if __name__ == "__main__":
    world.join = joining(world.join)
    sys.exit(main(sys.argv[1:]))
