"""What a recipe wants of its model, held against the model's own files."""

from __future__ import annotations

import json
import os

import pytest
from workshop import COMPLETE

from dsft.errors import DsftError
from dsft.plan.families import FAMILIES
from dsft.plan.model import WITHOUT_SDPA


def lora(*targets):
    return {"method": {"type": "lora", "target_modules": list(targets)}}


def problems(workshop, *overrides, **changes):
    with pytest.raises(DsftError) as caught:
        workshop.plan(*overrides, **changes)
    return caught.value.problems


@pytest.mark.parametrize("length", [128, 512])
def test_rows_within_the_context(workshop, length):
    assert workshop.plan(f"data.max_length={length}").data.max_length == length


def test_rows_beyond_the_context(workshop):
    (problem,) = problems(workshop, data=COMPLETE["data"] | {"max_length": 513})
    assert problem.kind == "context-length" and "513" in problem.message and "512" in problem.message
    assert problem.where.text.strip() == '"max_length": 513' and problem.where.column > 1


def test_a_model_without_a_chat_template(workshop):
    workshop.model(template=None)
    (problem,) = problems(workshop)
    assert problem.kind == "no-chat-template" and "data.chat_template" in problem.help


def test_a_chat_template_of_the_recipe(workshop):
    workshop.model(template=None)
    (workshop.folder / "chat.jinja").write_text("{{ messages }}")
    plan = workshop.plan(data=COMPLETE["data"] | {"chat_template": "chat.jinja"})
    assert plan.data.chat_template == "{{ messages }}"


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["layers.0.self_attn.q_proj"], ["gate_proj", "down_proj"]])
def test_targets_that_the_model_has(workshop, targets):
    assert workshop.plan(**lora(*targets)).method.target_modules == tuple(targets)


def test_targets_that_the_model_has_not(workshop):
    found = problems(workshop, **lora("q_proj", "wrong_proj", "nope"))
    assert [problem.kind for problem in found] == ["unknown-target", "unknown-target"]
    assert "wrong_proj" in found[0].message and "q_proj, k_proj, v_proj, o_proj" in found[0].help
    assert found[0].where.text.strip() == '"wrong_proj",'


def test_a_gpt2_has_other_layers(workshop):
    gpt2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "vocab_size": 256}
    (workshop.folder / "model" / "config.json").write_text(json.dumps(gpt2))
    (problem,) = problems(workshop, **lora("q_proj"))
    assert "c_attn" in problem.help


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "model.embed_tokens"])
def test_adapters_on_a_tied_weight(workshop, target):
    (problem,) = problems(workshop, **lora("q_proj", target))
    assert problem.kind == "tied-embeddings" and target in problem.message


def test_adapters_on_a_head_of_its_own(workshop):
    workshop.model(tie_word_embeddings=False)
    assert workshop.plan(**lora("lm_head")).method.target_modules == ("lm_head",)


def test_a_hub_model_that_is_not_here_is_not_judged(workshop, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(workshop.folder / "cache"))
    assert workshop.plan("model.path=org/name", **lora("anything")).model.path == "org/name"
    (warning,) = workshop.warnings("model.path=org/name")
    assert warning.kind == "model-not-cached" and "hf download org/name" in warning.help


@pytest.mark.parametrize("said", ["models/tny", "models/no/tny"])
def test_a_misspelt_folder_is_not_taken_for_a_hub_model_in_silence(workshop, monkeypatch, said):
    monkeypatch.setenv("HF_HUB_CACHE", str(workshop.folder / "cache"))
    (workshop.folder / "models" / "no").mkdir(parents=True)
    meant = workshop.model().rename((workshop.folder / said).with_name("tiny"))
    try:
        (problem,) = workshop.warnings(model={"path": said})
    except DsftError as error:
        (problem,) = error.problems
    assert problem.kind == ("model-not-found" if said.count("/") > 1 else "model-not-cached")
    assert problem.help == f"did you mean {meant}?"


@pytest.mark.parametrize("make", [lambda path: path.write_text("x"), lambda path: path.symlink_to("nowhere")])
def test_what_is_there_is_no_hub_model(workshop, make):
    make(workshop.folder / "weights")
    (problem,) = problems(workshop, model={"path": "weights"})
    assert problem.kind == "model-not-found"


def test_a_hub_model_in_the_cache_is(workshop, monkeypatch):
    commit = "0123456789" * 4
    repository = workshop.folder / "cache" / "models--org--name"
    (repository / "snapshots").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    workshop.model().rename(repository / "snapshots" / commit)
    monkeypatch.setenv("HF_HUB_CACHE", str(workshop.folder / "cache"))
    (problem,) = problems(workshop, "model.path=org/name", **lora("anything"))
    assert problem.kind == "unknown-target"


def test_attention_that_transformers_does_not_have(workshop):
    path = workshop.published("google/gemma-2-2b")
    (problem,) = problems(workshop, model={"path": path})
    assert problem.kind == "incompatible" and '"attn_implementation": "eager"' in problem.help
    workshop.plan(model={"path": path, "attn_implementation": "eager"})


def test_which_families_lack_an_attention():
    """As transformers says of the class that it builds."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    classes = {family: MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[family]] for family in FAMILIES}
    assert {family for family, built in classes.items() if not built._supports_sdpa} == WITHOUT_SDPA
    assert all(built._supports_flash_attn for built in classes.values())


def test_adapters_on_experts_have_no_dropout(workshop):
    model = {"path": workshop.published("Qwen/Qwen3-30B-A3B")}
    dropping = {"type": "lora", "lora_dropout": 0.1}
    problem, *_ = problems(workshop, model=model, method=dropping)  # others say that this machine is too small
    assert problem.kind == "incompatible" and "no dropout" in problem.message and problem.where.line is not None
    attention = {"target_modules": ["q_proj", "v_proj"]}
    assert workshop.plan(model=model, method=dropping | attention).method.lora_dropout == 0.1


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        (["pytorch_model.bin"], "has no weights:"),
        (["tokenizer.json"], "has no tokenizer:"),
        (["pytorch_model.bin", "tokenizer.json"], "has no weights and no tokenizer:"),
    ],
)
def test_a_folder_that_can_only_be_planned(workshop, gone, said):
    assert workshop.warnings() == []
    for name in gone:
        (workshop.folder / "model" / name).unlink()
    (warning,) = workshop.warnings()
    assert (warning.kind, warning.severity) == ("model-partial", "warning") and said in warning.message
    assert warning.where.line is not None


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("{{ messages }}\n  {% for m in messages %}\n{{ m.content }}", 3, "innermost block that needs to be closed"),
        ("a\n{% fro m in messages %}\n", 2, "'fro'"),
        ("{{ messages[ }}", 1, "unexpected '}'"),
        ("{% generation %}{{ messages }}", 1, "endgeneration"),
        ("{{ m | }}", 1, "expected token"),
        (" \n", None, "is empty"),
        ("", None, "is empty"),
        ("{{ message.content }}", None, "'message' is undefined"),
        ("{% if messages %}hello{% endif %}", None, "does not write the messages"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", None, "assistant's messages"),
        (
            "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}",
            None,
            "ends an answer with nothing",
        ),
        ("{% for m in messages %}{{ m.content + 1 }}{% endfor %}", None, "TypeError"),
        ("{{ messages }}{{ 1 / 0 }}", None, "ZeroDivisionError"),
        ("{{ messages }}{% include 'x' %}", None, "fails"),
        ("{{ messages }}{{ foo(messages) }}", None, "'foo' is undefined"),
        ("{{ messages }}{% if messages is foo %}{% endif %}", None, "foo"),
    ],
)
def test_a_broken_chat_template(workshop, text, line, words):
    (workshop.folder / "chat.jinja").write_text(text)
    (problem,) = problems(workshop, data=COMPLETE["data"] | {"chat_template": "chat.jinja"})
    assert problem.kind == "not-a-chat-template" and words in problem.message and problem.help
    if line:
        assert (os.path.basename(problem.where.source), problem.where.line) == ("chat.jinja", line)
    else:
        assert problem.where.text.strip().startswith('"chat_template"')


def test_a_chat_template_with_all_that_transformers_allows(workshop):
    text = "{% for m in messages %}{% if m.x %}{% break %}{% endif %}{% generation %}{{ m }}{% endgeneration %}{% endfor %}"
    (workshop.folder / "chat.jinja").write_text(text)
    workshop.plan(data=COMPLETE["data"] | {"chat_template": "chat.jinja"})


@pytest.mark.parametrize(
    "text",
    [
        "{{ bos_token + '' }}{% for m in messages %}{{ m.role + m.content + eos_token }}{% endfor %}",
        "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages }}",
        "{{ strftime_now('%Y') }}{% if tools %}{{ tools | tojson(indent=4) }}{% endif %}{{ messages | tojson }}",
    ],
)
def test_what_a_chat_template_may_do(workshop, text):
    (workshop.folder / "chat.jinja").write_text(text)
    workshop.plan(data=COMPLETE["data"] | {"chat_template": "chat.jinja"})


@pytest.mark.parametrize(
    ("field", "value"),
    [("revision", 3), ("trust_remote_code", "yes"), ("gradient_checkpointing", 9), ("attn_implementation", "x")],
)
def test_a_wrong_value_hides_nothing_of_the_files(workshop, field, value):
    gone = {"path": "./modle", field: value}
    assert "model-not-found" in [problem.kind for problem in problems(workshop, model=gone)]
    short = {"path": "./model", field: value}
    found = problems(workshop, model=short, data={**COMPLETE["data"], "max_length": 4096})
    assert "context-length" in [problem.kind for problem in found] and len(found) > 1


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("family", ["llama", "falcon"])
def test_a_quantized_model(workshop, method, family):
    workshop.model(quantization_config={"quant_method": "gptq", "bits": 4}, model_type=family)
    (problem,) = problems(workshop, method={"type": method})
    assert problem.kind == "quantized-model" and "(gptq)" in problem.message and problem.where.line is not None


@pytest.mark.parametrize(("r", "warns"), [(32, 0), (33, 1)])
def test_adapters_larger_than_the_weights(workshop, r, warns):
    """The model is 32 wide."""
    found = workshop.warnings(method={"type": "lora", "r": r})
    assert [problem.kind for problem in found] == ["unlikely-value"] * warns


def test_every_linear_layer_is_a_word_and_no_list(workshop):
    (problem,) = problems(workshop, **lora("all-linear"))
    assert problem.help == 'for every linear layer write "target_modules": "all-linear"'
