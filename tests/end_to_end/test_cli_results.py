"""What a run leaves is usable: by dsft export and dsft generate, and by plain peft and transformers without dsft."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.slow

# Loads an adapter, its merged export and a fully trained model; prints whether the first two agree.
PLAIN = """
import json, sys, torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer
adapter, merged, full = sys.argv[1:]
tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (adapter, merged, full)]
ids = [t.apply_chat_template([{"role": "user", "content": "the quick"}], add_generation_prompt=True,
       return_tensors="pt", return_dict=True)["input_ids"] for t in tokenizers]
models = [AutoPeftModelForCausalLM.from_pretrained(adapter), *map(AutoModelForCausalLM.from_pretrained, (merged, full))]
with torch.no_grad():
    logits = [model.eval()(input_ids=i).logits for model, i in zip(models, ids)]
answer = models[1].generate(ids[1], max_new_tokens=8, do_sample=False)[0, ids[1].shape[1]:]
print(json.dumps({
    "dsft": any(name.split(".")[0] == "dsft" for name in sys.modules),
    "adapter to merged": float((logits[0] - logits[1]).abs().max()),
    "adapter to full": float((logits[0] - logits[2]).abs().max()),
    "answer": tokenizers[1].decode(answer, skip_special_tokens=True).strip(),
}))
"""


def test_export_generate_and_plain_libraries(shop, launched):
    adapter_run, full_run = launched("ddp").output, launched("zero2").output
    merged = shop.elsewhere / "merged"
    export = shop.done("dsft", "export", adapter_run, "-o", "merged")
    assert export.stdout.strip().endswith("merged") and export.stderr == ""
    generate = shop.done("dsft", "generate", "merged", "the quick", "--max-new-tokens", 8)
    assert generate.stderr == ""
    plain = shop.done("python", "-c", PLAIN, adapter_run / "adapter", merged, full_run / "model")
    found = json.loads(plain.stdout)
    assert not found["dsft"]
    assert found["adapter to merged"] < 1e-4 < found["adapter to full"]
    assert generate.stdout.strip() == found["answer"]


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (["export", "nowhere", "-o", "never"], "no-model"),
        (["generate", "half", "hello"], "model-load"),
    ],
)
def test_a_wrong_folder(shop, command, kind):
    (shop.elsewhere / "half").mkdir(exist_ok=True)
    (shop.elsewhere / "half" / "config.json").write_text("{}")
    result = shop.run("dsft", *command)
    assert (result.returncode, result.stdout) == (2, "")
    assert f"error[{kind}]" in result.stderr and command[1] in result.stderr
    assert "Traceback" not in result.stderr
    assert not (shop.elsewhere / "never").exists()
