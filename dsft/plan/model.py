"""The model: where it is, and what its files say to the rest of the recipe."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dsft.errors import Problem, refused
from dsft.plan.facts import ModelFacts, cached_snapshot, read_facts
from dsft.plan.lora import adapts_experts, missing_partners, target_names, unknown_targets
from dsft.plan.record import Model
from dsft.recipe.load import nearby
from dsft.recipe.record import Recipe, Unusable

HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)?")
TOKENIZERS = ("tokenizer.", "vocab", "spiece", "sentencepiece")  # how their files' names start
WITHOUT_SDPA = {"gemma2"}  # model types whose `_supports_sdpa` is False in transformers 5

_INSTEAD = {
    "revision": None,
    "attn_implementation": "sdpa",
    "trust_remote_code": True,
    "gradient_checkpointing": "auto",
}


@dataclass(frozen=True)
class Found:
    """`facts` is None where the files are not on this machine, or of a kind that is not known."""

    model: Model
    facts: ModelFacts | None


def plan_model(recipe: Recipe) -> Found:
    """Raises DsftError for a path that is neither a model's folder nor a hub id, and for files that are damaged,
    incomplete or not of one model."""
    path = recipe.get("model", "path")
    where = recipe.where("model", "path")
    if not os.path.isabs(path) and not HUB_ID.fullmatch(path):
        raise refused(
            "model-not-found",
            f'"{path}" is neither a folder here nor a hub id such as org/name',
            where=where,
            help=meant_folder(recipe, path) or "a folder is relative to the file that says it",
        )
    revision, attention, trusted, recomputes = (
        # A wrong value is reported already, and hides nothing of what the model's files say.
        recipe.get("model", field) if recipe.sound("model", field) else instead
        for field, instead in _INSTEAD.items()
    )
    facts = read_facts(path, revision=revision, trusted=trusted, where=where)
    return Found(Model(path, revision, attention, trusted, recomputes is True), facts)  # of "auto" choose.py decides


def meant_folder(recipe: Recipe, said: str) -> str | None:
    """The folder beside the recipe that a misspelt one seems to mean."""
    path = recipe.folder("model", "path") / said
    return nearby(path) if os.path.isdir(path.parent) else None


def model_is_whole(recipe: Recipe, found: Found) -> Iterator[Problem]:
    """Warns of what can be planned and not trained: a configuration alone, a GGUF file."""
    path = Path(found.model.path)
    if not path.is_absolute():
        return
    if not (path / "config.json").is_file():
        lack, help = f"{path} is in GGUF, which is for inference", "name the folder of the model that it was made from"
    else:
        missing = [] if found.facts is None or found.facts.stored_bytes else ["weights"]
        missing += [] if any(any(path.glob(f"{name}*")) for name in TOKENIZERS) else ["tokenizer"]
        lack = f"{path} has no {' and no '.join(missing)}" if missing else ""
        help = "name a folder that save_pretrained wrote, or one downloaded from the hub, whole"
    if lack:
        message, where = f"{lack}: the job can be planned, and not run", recipe.where("model", "path")
        yield Problem("model-partial", message, where, help, severity="warning")


def model_is_here(recipe: Recipe, model: Model) -> Iterator[Problem]:
    """Warns of a hub model that is not on this machine."""
    if os.path.isabs(model.path) or cached_snapshot(model.path, model.revision):
        return
    message = f"{model.path} is not in this machine's hub cache: it is not checked, and downloaded when the job starts"
    help = meant_folder(recipe, model.path) or f"to check it now: hf download {model.path}"
    yield Problem("model-not-cached", message, recipe.where("model", "path"), help, severity="warning")


def check_context(recipe: Recipe, found: Found) -> bool:
    """True; raises DsftError for rows longer than the model's context."""
    length, positions = recipe.get("data", "max_length"), found.facts.max_positions if found.facts else None
    if positions and length > positions:
        raise refused(
            "context-length",
            f"rows of up to {length} tokens, and the model knows {positions} positions",
            where=recipe.where("data", "max_length"),
            help=f"at most {positions}; to train a longer context, say it in the model's config.json "
            "(max_position_embeddings, rope_scaling)",
        )
    return True


def model_suits(recipe: Recipe, found: Found) -> Iterator[Problem]:
    """What the recipe wants of the model and the model cannot do."""
    for rule in RULES if found.facts else ():
        try:
            yield from rule(recipe, found.facts)
        except Unusable:
            continue


def has_chat_template(recipe: Recipe, facts: ModelFacts) -> Iterator[Problem]:
    if facts.chat_template is False and recipe.get("data", "chat_template") is None:
        yield Problem(
            "no-chat-template",
            "the model's tokenizer has no chat template, so rows cannot be put into the model's words",
            recipe.where("model", "path"),
            'name a file with a Jinja template in "data.chat_template", or take the instruct model of the family',
        )


def tokens_have_embeddings(recipe: Recipe, facts: ModelFacts) -> Iterator[Problem]:
    if facts.last_token is not None and facts.last_token >= facts.vocab > 0:
        yield Problem(
            "tokenizer-mismatch",
            f"the tokenizer has ids up to {facts.last_token}, and the model embeddings for {facts.vocab} tokens",
            recipe.where("model", "path"),
            "put the model's own tokenizer into its folder: tokenizer.json and tokenizer_config.json",
        )


def targets_exist(recipe: Recipe, facts: ModelFacts) -> Iterator[Problem]:
    """peft is content if one name matches; a name that matches nothing is a mistake all the same."""
    targets = _targets(recipe)
    if targets is None:
        return
    for target in unknown_targets(facts, targets):
        names = f"its linear layers are {', '.join(target_names(facts))}"
        yield Problem(
            "unknown-target",
            f'no module of the model is called "{target}"',
            recipe.where("method", "target_modules", targets.index(target)),
            'for every linear layer write "target_modules": "all-linear"' if target == "all-linear" else names,
        )
    missing = missing_partners(facts, targets)
    if missing:
        yield Problem(
            "unknown-target",
            f"{facts.architecture} keeps gate and up projection of its experts as one: both are adapted, or neither",
            recipe.where("method", "target_modules"),
            f"add {', '.join(missing)}",
        )


def ties_stay(recipe: Recipe, facts: ModelFacts) -> Iterator[Problem]:
    """An adapter on one side of a tied weight cannot be merged: the other side would change with it."""
    targets = _targets(recipe)
    if not facts.tied or not facts.layout or targets is None:
        return
    head = facts.layout.head
    shape = head.parameters["weight"]
    tied = {path for path, module in facts.layout.modules() if module.parameters.get("weight") == shape} | {head.path}
    for at, target in enumerate(targets):
        if any(path == target or path.endswith(f".{target}") for path in tied):
            yield Problem(
                "tied-embeddings",
                f'"{target}" shares its weight with another module: an adapter on it could not be merged',
                recipe.where("method", "target_modules", at),
                'leave it out; to train the embeddings too: "method": {"type": "full"}',
            )


def experts_have_no_dropout(recipe: Recipe, facts: ModelFacts) -> Iterator[Problem]:
    targets, dropout = recipe.get("method", "target_modules"), recipe.get("method", "lora_dropout")
    if targets and recipe.sound("method") and dropout and adapts_experts(facts, targets):
        yield Problem(
            "incompatible",
            f"peft has no dropout for adapters on the experts of {facts.architecture}",
            recipe.where("method", "lora_dropout"),
            'write "lora_dropout": 0, or name target_modules of the attention only',
        )


def rank_is_low(recipe: Recipe, facts: ModelFacts) -> Iterator[Problem]:
    """Warns: adapters of a rank that no weight of the model has hold more than the weights themselves."""
    r = recipe.get("method", "r")
    if r is not None and r > facts.hidden > 0:
        yield Problem(
            "unlikely-value",
            f"adapters of rank {r}, and the model is {facts.hidden} wide: they would be larger than its weights",
            recipe.where("method", "r"),
            'usual are 8 to 256; to train all weights: "method": {"type": "full"}',
            severity="warning",
        )


def computes_attention(recipe: Recipe, facts: ModelFacts) -> Iterator[Problem]:
    if facts.model_type in WITHOUT_SDPA and recipe.get("model", "attn_implementation") == "sdpa":
        yield Problem(
            "incompatible",
            f"transformers has no sdpa attention for {facts.architecture}",
            recipe.where("model", "attn_implementation"),
            'write "attn_implementation": "eager" in "model", or "flash_attention_2" where that is installed',
        )


def _targets(recipe: Recipe) -> list[str] | None:
    """The names that the recipe lists. Raises Unusable where one of them is no name."""
    targets = recipe.get("method", "target_modules")
    if not recipe.sound("method", "target_modules"):
        raise Unusable
    return targets if isinstance(targets, list) else None


RULES = (
    has_chat_template,
    tokens_have_embeddings,
    targets_exist,
    ties_stay,
    experts_have_no_dropout,
    rank_is_low,
    computes_attention,
)
