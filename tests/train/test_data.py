"""Labels: on assistant turns and their ends, by position; one BOS; padding and short batches weigh nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import pytest
import tiny
import torch

from dsft.errors import DsftError
from dsft.plan.formats import RowError
from dsft.train.data import IGNORED, encode, end_of_turn, load_examples

CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "the fox"},
    {"role": "assistant", "content": "jumps over\nthe dog"},
    {"role": "user", "content": "and then"},
    {"role": "assistant", "content": "sing"},
]


def learned(ids, labels, tokenizer) -> str:
    assert all(label in (IGNORED, token) for token, label in zip(ids, labels, strict=True))
    return tokenizer.decode([label for label in labels if label != IGNORED])


def test_only_assistant_turns_and_their_ends_are_learned():
    tokenizer = tiny.tokenizer()
    ids, labels = encode(CHAT, tokenizer)
    assert learned(ids, labels, tokenizer) == "jumps over\nthe dog<|im_end|>sing<|im_end|>"
    assert ids == tokenizer.apply_chat_template(CHAT, return_dict=True)["input_ids"]


def test_the_end_of_a_turn_is_learned_though_padding_has_its_id(tmp_path):
    tokenizer = tiny.tokenizer(pad="<|im_end|>", eos="<|im_end|>")
    data = tiny.write_rows(tmp_path / "rows.json", 2)
    examples, _ = load_examples(tiny.plan(tmp_path, data, tmp_path), tokenizer)
    input_ids, labels = examples.batch([0, 1])
    assert input_ids.shape[0] == 2
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert int((labels == end).sum()) == 2  # one a row: user turns end with the same token and are not learned
    for at in range(2):
        assert (labels[at, examples.lengths[at] :] == IGNORED).all()


def test_a_terminator_that_is_not_eos_is_the_one_that_is_learned():
    template = tiny.CHATML.replace("<|im_end|>", "<end_turn>")
    tokenizer = tiny.tokenizer(eos="<eos>", pad="<eos>", template=template, extra=("<end_turn>",))
    ids, labels = encode(CHAT, tokenizer)
    assert learned(ids, labels, tokenizer).endswith("sing<end_turn>")
    assert end_of_turn(tokenizer) == tokenizer.convert_tokens_to_ids("<end_turn>")


def test_a_template_that_ends_turns_with_nothing_is_refused():
    template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    with pytest.raises(RowError, match="ends an assistant turn with nothing"):
        encode(CHAT, tiny.tokenizer(template=template))


def test_a_template_that_leaves_the_answer_out_is_refused():
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}X<|im_end|>{% endif %}{% endfor %}"
    )
    with pytest.raises(RowError, match="does not write what the assistant says"):
        encode(CHAT, tiny.tokenizer(template=template))


def test_a_template_that_fails_says_so_once(tmp_path):
    template = "{% for m in messages %}{{ m.content + 1 }}{% endfor %}"
    data = tiny.write_rows(tmp_path / "rows.json", 8)
    with pytest.raises(DsftError) as caught:
        load_examples(tiny.plan(tmp_path, data, tmp_path), tiny.tokenizer(template=template))
    (problem,) = caught.value.problems
    assert problem.message.startswith("none of the 8 rows can be used: the chat template fails on it: TypeError")


def test_an_ending_of_nothing_is_found_though_the_turn_starts_on_a_new_line():
    template = (
        "{% for m in messages %}{{ '### ' + m['role'] + ':\n' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '### assistant:' }}{% endif %}"
    )
    with pytest.raises(RowError, match="ends an assistant turn with nothing"):
        encode(CHAT, tiny.tokenizer(template=template))


def test_one_bos_where_template_and_tokenizer_both_have_one():
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny.tokenizer(template="{{ bos_token }}" + tiny.CHATML)
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    assert tokenizer("fox")["input_ids"][0] == bos  # the tokenizer puts one first by itself
    ids, _ = encode(CHAT, tokenizer)
    assert ids[0] == bos
    assert bos not in ids[1:]
    assert ids == tokenizer.apply_chat_template(CHAT, return_dict=True)["input_ids"]


def test_an_empty_pass_has_one_token_and_no_label(tmp_path):
    data = tiny.write_rows(tmp_path / "rows.json", 2)
    examples, _ = load_examples(tiny.plan(tmp_path, data, tmp_path), tiny.tokenizer())
    input_ids, labels = examples.batch([])
    assert input_ids.shape == labels.shape == (1, 1)
    assert (labels == IGNORED).all()


def test_the_split_is_apart_and_the_same_for_the_same_seed(tmp_path):
    data = tiny.write_rows(tmp_path / "rows.json", 20)
    plan = tiny.plan(tmp_path, data, tmp_path, eval_split_rows=4)
    train, held_out = load_examples(plan, tiny.tokenizer())
    _, held_again = load_examples(plan, tiny.tokenizer())
    assert (len(train), len(held_out)) == (16, 4)
    assert held_out.rows.to_dict() == held_again.rows.to_dict()
    whole, _ = load_examples(tiny.plan(tmp_path, data, tmp_path), tiny.tokenizer())
    assert sorted([*train.rows["input_ids"], *held_out.rows["input_ids"]]) == sorted(whole.rows["input_ids"])


def refused(tmp_path, text: str, tokenizer=None, **changes) -> DsftError:
    data = tiny.write_rows(tmp_path / "rows.json", 2)
    plan = tiny.plan(tmp_path, data, tmp_path)
    data.write_text(text)
    file = dataclasses.replace(plan.data.train[0], sha256=hashlib.sha256(text.encode()).hexdigest())
    plan = tiny.change(plan, "data", train=(file,), **changes)
    with pytest.raises(DsftError) as caught:
        load_examples(plan, tokenizer or tiny.tokenizer())
    return caught.value


def test_every_bad_row_is_named_with_its_line(tmp_path):
    good = {"instruction": "a", "output": "b"}
    rows = [good, {"instruction": "a"}, good, {"output": "b"}]
    error = refused(tmp_path, "\n".join(json.dumps(row) for row in rows), train_rows=4)
    assert [(problem.where.line, problem.kind) for problem in error.problems] == [(2, "bad-row"), (4, "bad-row")]


def test_rows_cut_before_their_answer_are_an_error_when_it_is_all_of_them(tmp_path):
    text = json.dumps([{"instruction": "the quick brown fox " * 9, "output": "dog"}] * 2)
    error = refused(tmp_path, text, max_length=16)
    assert error.problems[0].kind == "no-targets"


def test_a_changed_file_is_refused(tmp_path):
    data = tiny.write_rows(tmp_path / "rows.json", 2)
    plan = tiny.plan(tmp_path, data, tmp_path)
    data.write_text(data.read_text() + " ")
    with pytest.raises(DsftError) as caught:
        load_examples(plan, tiny.tokenizer())
    assert caught.value.problems[0].kind == "data-changed"


@pytest.mark.slow
def test_the_reported_loss_and_norm_are_those_of_plain_transformers(trained, model, data, tmp_path):
    """Four rows with 1 to 16 supervised tokens on two ranks, one at a time, against a loop of plain transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from dsft.train.batches import update_rows

    run = trained(
        tiny.plan(model, data, tmp_path / "out", engine="ddp", world=2, per_device=1, accumulation=2, method="full",
                  updates=1)
    )  # fmt: skip
    plain, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    rows = json.loads(data.read_text())
    losses = []
    for row in update_rows(0, len(rows), 4, 7):
        prompt = f"<|im_start|>user\n{rows[row]['instruction']}<|im_end|>\n<|im_start|>assistant\n"
        start = len(tokenizer(prompt)["input_ids"])
        ids = torch.tensor([tokenizer(f"{prompt}{rows[row]['output']}<|im_end|>")["input_ids"]])
        logits = plain(input_ids=ids).logits[0, start - 1 : -1]
        losses.append(torch.nn.functional.cross_entropy(logits, ids[0, start:], reduction="none"))
    losses = torch.cat(losses)
    losses.mean().backward()
    norm = torch.cat([p.grad.flatten() for p in plain.parameters()]).norm()
    assert run.updates[0]["supervised_tokens"] == len(losses)
    assert run.updates[0]["loss"] == pytest.approx(float(losses.mean()), rel=1e-6)
    assert run.updates[0]["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
