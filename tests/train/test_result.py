"""The result loads with plain libraries, and the saver reports nothing it has not read back."""

from __future__ import annotations

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dsft.errors import DsftError
from dsft.train.export import export, load_result
from dsft.train.generate import answer, generate
from dsft.train.model import load_tokenizer
from dsft.train.result import check_adapter, check_finite, check_model

SHARDED = {"fsdp": ("fsdp", None), "zero3": ("deepspeed", 3)}


@pytest.mark.slow
@pytest.mark.parametrize("engine", SHARDED)
def test_an_adapter_from_shards_is_whole(trained, data, tmp_path, engine):
    kind, stage = SHARDED[engine]
    model = tiny.write_model(tmp_path / "model", layers=2)
    run = trained(
        tiny.plan(model, data, tmp_path / "out", engine=kind, stage=stage, world=2, per_device=2, updates=2,
                  targets=("q_proj", "v_proj"))
    )  # fmt: skip
    weights = run.weights
    assert len(weights) == 8
    assert {tuple(tensor.shape) for tensor in weights.values()} == {(4, 32), (32, 4), (16, 4)}  # v has half the heads
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())
    assert any(tensor.any() for name, tensor in weights.items() if "lora_B" in name)

    from peft import AutoPeftModelForCausalLM

    adapted = AutoPeftModelForCausalLM.from_pretrained(run.output / "adapter")
    loaded = dict(adapted.named_parameters())
    for name, tensor in weights.items():
        assert torch.equal(loaded[name.replace(".weight", ".default.weight")], tensor)
    assert AutoTokenizer.from_pretrained(run.output / "adapter").chat_template == tiny.CHATML


@pytest.fixture
def adapter(tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    weights = {"a.lora_A.default.weight": torch.ones(4, 32), "a.lora_B.default.weight": torch.ones(32, 4)}
    save_file(
        {name.replace(".default.", "."): tensor for name, tensor in weights.items()},
        folder / "adapter_model.safetensors",
    )
    check_adapter(folder, weights)
    return folder, weights


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (lambda stored: stored.pop("a.lora_B.weight"), "incomplete-result"),
        (lambda stored: stored.update({"a.lora_B.weight": torch.empty(0)}), "incomplete-result"),
        (lambda stored: stored.update({"a.lora_A.weight": torch.ones(4, 32) * 1.0001}), "changed-result"),
    ],
)
def test_an_adapter_that_is_not_what_was_trained_is_an_error(adapter, damage, kind):
    folder, weights = adapter
    stored = load_file(folder / "adapter_model.safetensors")
    damage(stored)
    save_file(stored, folder / "adapter_model.safetensors")
    with pytest.raises(DsftError) as caught:
        check_adapter(folder, weights)
    assert caught.value.problems[0].kind == kind
    assert caught.value.exit_code == 1


def test_an_adapter_that_does_nothing_is_an_error(tmp_path):
    weights = {"a.lora_A.default.weight": torch.ones(4, 32), "a.lora_B.default.weight": torch.zeros(32, 4)}
    save_file(
        {name.replace(".default.", "."): tensor for name, tensor in weights.items()},
        tmp_path / "adapter_model.safetensors",
    )
    with pytest.raises(DsftError) as caught:
        check_adapter(tmp_path, weights)
    assert caught.value.problems[0].kind == "empty-result"


def test_weights_that_are_not_finite_are_an_error(tmp_path):
    with pytest.raises(DsftError) as caught:
        check_finite({"w": torch.tensor([1.0, float("nan")])}, tmp_path)
    assert caught.value.problems[0].kind == "non-finite-result"
    with pytest.raises(DsftError):
        check_finite({}, tmp_path)


def test_a_model_folder_with_other_values_is_an_error(model):
    plain = AutoModelForCausalLM.from_pretrained(model)
    weights = {name: parameter.detach().clone() for name, parameter in plain.named_parameters()}
    check_model(model, weights)
    weights["model.norm.weight"] += 1e-6
    with pytest.raises(DsftError) as caught:
        check_model(model, weights)
    assert caught.value.problems[0].kind == "changed-result"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "full"])
def test_training_teaches_to_stop_though_the_turn_ends_with_another_token_than_eos(trained, tmp_path, method):
    """Two rows learned by heart: generation ends by itself, at the template's end of turn."""
    template = tiny.CHATML.replace("<|im_end|>", "<end_turn>")
    tokens = tiny.tokenizer(eos="<eos>", pad="<eos>", template=template, extra=("<end_turn>",))
    model = tiny.write_model(tmp_path / "model", tokens=tokens, spread=1.0)  # a frozen head that can be sure of a token
    data = tiny.write_rows(tmp_path / "rows.json", 2)
    plan = tiny.plan(
        model, data, tmp_path / "out", per_device=2, method=method, updates=120, learning_rate=5e-3, warmup_updates=0
    )
    run = trained(tiny.change(plan, "method", r=16, lora_alpha=32) if method == "lora" else plan)
    assert run.updates[-1]["loss"] < 0.1
    network, tokenizer = load_result(run.output)
    for row in tiny.rows(2):
        text, ended = answer(network, tokenizer, row["instruction"], 64)
        assert ended
        assert text == row["output"]
    merged = export(run.output, tmp_path / "merged")
    assert generate(merged, tiny.rows(2)[1]["instruction"], 64) == tiny.rows(2)[1]["output"]
    plain = AutoModelForCausalLM.from_pretrained(merged)
    ids = torch.arange(20)[None]
    assert torch.allclose(plain(input_ids=ids).logits, network(input_ids=ids).logits, atol=1e-6)


def test_export_overwrites_nothing_and_names_what_it_needs(model, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(DsftError) as caught:
        export(model, tmp_path / "taken")
    assert caught.value.problems[0].kind == "target-exists"
    with pytest.raises(DsftError) as caught:
        export(tmp_path, tmp_path / "new")
    assert caught.value.problems[0].kind == "no-model"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_template_of_the_recipe_is_saved_with_the_result(trained, tmp_path, method):
    """The model has none. What is loaded again renders to the byte what was trained on, in the result and exported."""
    model = tiny.write_model(tmp_path / "model", tokens=tiny.tokenizer(template=None))
    data = tiny.write_rows(tmp_path / "rows.json", 4)
    template = tiny.CHATML.replace("<|im_start|>", "<|im_start|>→\t") + "{# ours #}\r\n\n"
    plan = tiny.change(
        tiny.plan(model, data, tmp_path / "out", method=method, updates=1, warmup_updates=0),
        "data",
        chat_template=template,
    )
    run = trained(plan)
    ours = load_tokenizer(plan)
    messages = [
        {"role": role, "content": f"  the {role}\u2028\r\n "} for role in ("system", "user", "assistant", "user")
    ]
    for folder in (run.output / ("adapter" if method == "lora" else "model"), export(run.output, tmp_path / "merged")):
        again = AutoTokenizer.from_pretrained(folder)
        for options in ({}, {"add_generation_prompt": True}):
            text = ours.apply_chat_template(messages, tokenize=False, **options)
            assert again.apply_chat_template(messages, tokenize=False, **options) == text
            assert again(text)["input_ids"] == ours(text)["input_ids"]
        assert "→\tassistant" in text


@pytest.mark.parametrize("template", [None, {"rag": tiny.CHATML}], ids=["none", "for another use"])
def test_a_tokenizer_without_a_template_for_chats_is_refused(tmp_path, template):
    """As of a model that the compiler could not look at."""
    tiny.tokenizer(template=template).save_pretrained(tmp_path)
    plan = tiny.plan(tmp_path, tiny.write_rows(tmp_path / "rows.json", 2), tmp_path)
    with pytest.raises(DsftError) as caught:
        load_tokenizer(plan)
    assert caught.value.problems[0].kind == "no-chat-template"
