"""Every recipe in wrong/ gives exactly the text beside it. `--update-golden` writes the texts anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsft.errors import EXIT_USAGE, DsftError
from dsft.plan import make_plan
from dsft.recipe import load_recipe

WRONG = Path(__file__).parent / "wrong"
NAMES = sorted(path.stem for path in WRONG.glob("*.json") if path.name != "rows.json")


@pytest.mark.parametrize("name", NAMES)
def test_text(name, monkeypatch, update_golden):
    monkeypatch.chdir(WRONG)
    with pytest.raises(DsftError) as caught:
        make_plan(load_recipe(f"{name}.json"), versions={}, cwd=WRONG)
    assert caught.value.exit_code == EXIT_USAGE
    text = str(caught.value).replace(str(WRONG), "HERE") + "\n"
    golden = WRONG / f"{name}.txt"
    if update_golden:
        golden.write_text(text, encoding="utf-8", newline="")
    assert text == golden.read_bytes().decode()
