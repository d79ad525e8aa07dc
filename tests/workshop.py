from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsft.errors import Problem, Where
from dsft.plan import make_plan
from dsft.plan.families import layout
from dsft.recipe import load_recipe

COMPLETE = {
    "name": "tiny",
    "model": {"path": "./model"},
    "data": {"train": [{"path": "rows.json", "format": "alpaca"}], "max_length": 128},
    "method": {"type": "lora"},
    "strategy": {"type": "ddp"},
    "training": {
        "max_steps": 5,
        "global_batch_size": 16,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
    },
    "cluster": {"device": "cpu", "processes_per_node": 2},
}

PUBLISHED = Path(__file__).parent / "plan" / "configs" / "published.json"

# A Llama of 42 thousand parameters.
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


TOKENIZER = '{"model": {}}'  # of no vocabulary that is looked at
WEIGHTS = b"-"  # in PyTorch's own format, which dsft does not look into


def parameter_shapes(config: dict, where: Where | None = None) -> dict[str, tuple[int, ...]] | None:
    """Name to shape of every parameter of the model that `config` describes; None for a family that dsft does not know."""
    found = layout(config, where=where)
    return None if found is None else found.shapes()


class Workshop:
    """A folder with a model (its configuration, and no true weights), forty rows and recipes."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.model()
        (folder / "rows.json").write_text(json.dumps([{"instruction": str(n), "output": "x"} for n in range(40)]))

    def model(self, name: str = "model", template: str | None = "{{ messages }}", **changes) -> Path:
        """A model's folder; `changes` are of its configuration."""
        path = self.folder / name
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(CONFIG | changes))
        (path / "pytorch_model.bin").write_bytes(WEIGHTS)
        (path / "tokenizer.json").write_text(TOKENIZER)
        (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template} if template else {}))
        return path

    def published(self, name: str) -> str:
        """The folder of a published model: its configuration, and no true weights."""
        config = next(each["config"] for each in json.loads(PUBLISHED.read_text()) if each["name"] == name)
        path = self.folder / name.replace("/", "--")
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(config))
        (path / "pytorch_model.bin").write_bytes(WEIGHTS)
        (path / "tokenizer.json").write_text(TOKENIZER)
        (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
        return str(path)

    def write(self, name: str, recipe: dict | str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(recipe if isinstance(recipe, str) else json.dumps(recipe, indent=2))
        return path

    def recipe(self, *overrides: str, **changes):
        return load_recipe(self.write("recipe.json", COMPLETE | changes), overrides)

    def plan(self, *overrides: str, **changes):
        return make_plan(self.recipe(*overrides, **changes), versions={"python": "3.11"}, cwd=self.folder)

    def warnings(self, *overrides: str, **changes) -> list[Problem]:
        found: list[Problem] = []
        recipe = self.recipe(*overrides, **changes)
        make_plan(recipe, versions={"python": "3.11"}, cwd=self.folder, warn=found.append)
        return found


@pytest.fixture
def workshop(tmp_path) -> Workshop:
    return Workshop(tmp_path)
