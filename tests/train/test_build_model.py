"""The model as the plan wants it, before it is spread over processes."""

from __future__ import annotations

import pytest
import tiny

from dsft.errors import DsftError
from dsft.train.data import load_examples
from dsft.train.model import build_model, check_tokens, load_tokenizer


@pytest.mark.parametrize(
    ("targets", "wrong"), [(("q_proj", "wrong_proj"), "wrong_proj"), (("nope",), "nope"), (("Q_proj",), "Q_proj")]
)
def test_a_target_that_no_module_has_is_refused_though_another_is_found(model, data, tmp_path, targets, wrong):
    """As of a model that the compiler could not look at: peft is content with one name that matches."""
    with pytest.raises(DsftError) as caught:
        build_model(tiny.plan(model, data, tmp_path, targets=targets))
    (problem,) = caught.value.problems
    assert problem.kind == "unknown-target" and f'"{wrong}"' in problem.message
    assert "q_proj" in problem.help


def test_what_is_trained_is_what_was_asked_for(model, data, tmp_path):
    built = build_model(tiny.plan(model, data, tmp_path, targets=("q_proj", "v_proj")))
    trained = {name.split(".lora_")[0].rpartition(".")[2] for name, p in built.named_parameters() if p.requires_grad}
    assert trained == {"q_proj", "v_proj"}
    assert sum(p.numel() for p in built.parameters() if p.requires_grad) == 4 * 4 * (32 + 32 + 32 + 16)


def test_a_token_without_an_embedding_is_said_before_torch_fails_on_it(model, data, tmp_path):
    plan = tiny.plan(model, data, tmp_path)
    examples, _ = load_examples(plan, load_tokenizer(plan))
    ids, _ = examples.batch(range(len(examples)))
    assert examples.last_token == ids.max()
    built = build_model(plan)
    size = built.get_input_embeddings().num_embeddings
    check_tokens(built, size - 1)
    with pytest.raises(DsftError) as caught:
        check_tokens(built, size)
    assert caught.value.problems[0].kind == "tokenizer-mismatch"
