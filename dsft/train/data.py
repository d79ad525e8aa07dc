"""Rows of a data file into tokens and labels.

    row ──► messages ──► text by the chat template ──► input_ids, labels

Labels are placed by position: the tokens of each assistant turn and of what ends it, nothing else. That a pad or
end-of-sequence token has the same id as the end of a turn can therefore do no harm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from dsft.errors import EXIT_FAILED, DsftError, Problem, Where, failed
from dsft.plan.formats import RowError, to_messages
from dsft.plan.record import DataFile, Plan
from dsft.plan.rows import Row, read_rows, shorten

IGNORED = -100  # the label of a token that is not learned


@dataclass(frozen=True)
class Examples:
    """Tokenised rows, held by Arrow: a few bytes a token. `lengths` and `supervised` count tokens, a row each;
    `last_token` is the highest id in any of them."""

    rows: Dataset  # input_ids, labels
    lengths: Sequence[int]
    supervised: Sequence[int]
    last_token: int

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows `ids` as input_ids and labels, both [rows, longest], padded on the right.

        No rows give one padding token without a label: a pass that takes part in collectives and weighs nothing.
        Padding needs no mask: in a causal model no token sees what stands to its right.
        """
        longest = max((self.lengths[i] for i in ids), default=1)
        input_ids = torch.zeros((max(1, len(ids)), longest), dtype=torch.long)
        labels = torch.full_like(input_ids, IGNORED)
        for at, row in enumerate(self.rows[i] for i in ids):
            input_ids[at, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
            labels[at, : len(row["labels"])] = torch.tensor(row["labels"])
        return input_ids, labels


def load_examples(plan: Plan, tokenizer: PreTrainedTokenizerBase) -> tuple[Examples, Examples | None]:
    """The examples to train on and, where the plan has any, those to evaluate on.

    Raises DsftError for files that changed since the plan was made, rows that cannot be used (all of them, with
    place), and data of which no token is learned.
    """
    rows = [row for file in plan.data.train for row in _rows(file)]
    held_out = _split(len(rows), plan.data.eval_split_rows, plan.training.seed)
    train = [row for at, row in enumerate(rows) if at not in held_out]
    evaluation = _rows(plan.data.eval) if plan.data.eval else [rows[at] for at in sorted(held_out)]
    counted = (len(train), len(evaluation))
    if counted != (plan.data.train_rows, plan.data.eval_rows):
        raise failed(
            "data-changed",
            f"the plan counted {plan.data.train_rows} rows to train on and {plan.data.eval_rows} to evaluate on, "
            f"but the files hold {counted[0]} and {counted[1]}",
            help="compile the recipe again",
        )
    examples = _encode(train, tokenizer, plan.data.max_length)
    return examples, _encode(evaluation, tokenizer, plan.data.max_length) if evaluation else None


def _split(rows: int, held_out: int, seed: int) -> set[int]:
    generator = torch.Generator().manual_seed(seed)
    return set(torch.randperm(rows, generator=generator)[:held_out].tolist())


def _rows(file: DataFile) -> list[tuple[DataFile, Row]]:
    return [(file, row) for row in read_rows(file.path, sha256=file.sha256)]


def _encode(rows: list[tuple[DataFile, Row]], tokenizer: PreTrainedTokenizerBase, max_length: int) -> Examples:
    problems: list[Problem] = []
    columns: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
    for file, row in rows:
        try:
            ids, labels = encode(to_messages(file.format, row.value), tokenizer)
        except RowError as error:
            problems.append(Problem("bad-row", str(error), Where(file.path, row.line)))
            continue
        columns["input_ids"].append(ids[:max_length])
        columns["labels"].append(labels[:max_length])
    if problems and len(problems) == len(rows) and len({problem.message for problem in problems}) == 1:
        raise failed(
            "bad-row", f"none of the {len(rows)} rows can be used: {problems[0].message}", where=problems[0].where
        )
    if problems:
        raise DsftError(shorten(problems), exit_code=EXIT_FAILED)
    # The first token is predicted from nothing: a label there teaches nothing.
    supervised = [sum(label != IGNORED for label in labels[1:]) for labels in columns["labels"]]
    if not any(supervised):
        raise failed(
            "no-targets",
            f"none of the {len(rows)} rows has a token to learn within max_length {max_length}",
            help="raise data.max_length, or look at the rows: an answer may be empty",
        )
    lengths = [len(ids) for ids in columns["input_ids"]]
    return Examples(
        Dataset.from_dict(columns), lengths, supervised, max(max(ids) for ids in columns["input_ids"] if ids)
    )


def encode(messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """input_ids of the whole conversation and labels: ids on assistant turns and their ends, IGNORED elsewhere.

    The ids are those of `tokenizer.apply_chat_template(messages)`: special tokens come from the template alone, so a
    tokenizer that puts one first by itself does not put a second. Raises RowError where the turns cannot be found.
    """
    text = _render(tokenizer, messages)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    labels = [IGNORED] * len(encoded["input_ids"])
    for start, end in _assistant_spans(text, messages, tokenizer):
        for at, (token_start, token_end) in enumerate(encoded["offset_mapping"]):
            if token_start < end and token_end > start:
                labels[at] = encoded["input_ids"][at]
    return encoded["input_ids"], labels


def _assistant_spans(
    text: str, messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[int, int]]:
    """Start and end in `text` of what the model has to say: each assistant turn and what ends it.

    A turn starts where the generation prompt ends and stops before what the next turn would begin with; both are
    found by rendering the conversation up to there, which holds for any template that only ever appends.
    """
    for at, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(tokenizer, messages[:at], add_generation_prompt=True)
        until = _render(tokenizer, messages[: at + 1])
        if not (text.startswith(until) and until.startswith(before)):
            raise RowError("the chat template changes earlier turns when later ones follow: turns cannot be located")
        turn = until[len(before) :].rstrip()  # white space after the end of a turn is the next turn's
        said = message["content"].rstrip()
        last = said.rpartition("\n")[2].strip()  # a template may leave out thoughts before it
        if last not in turn:
            raise RowError("the chat template does not write what the assistant says: it would not be learned")
        if not turn or (said and turn.endswith(said)):
            raise RowError("the chat template ends an assistant turn with nothing: the model would not learn to stop")
        yield len(before), len(before) + len(turn)


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id of the token that ends an assistant turn by the chat template: the last that is learned of one."""
    _, labels = encode([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], tokenizer)
    return [label for label in labels if label != IGNORED][-1]


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], **options: Any) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except TemplateError as error:
        raise RowError(f"the chat template refuses it: {error}") from error
    except Exception as error:  # of an expression in the template: anything
        raise RowError(f"the chat template fails on it: {type(error).__name__}: {error}") from error
