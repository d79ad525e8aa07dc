"""Fills a name and its maker into data/identity.json: the training data of the quick start, in build/data."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = ROOT / "data" / "identity.json"
FILLED = ROOT / "build" / "data" / "identity.json"
NAME, AUTHOR = "Juniper", "Fernwood Labs"  # made up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default=NAME, help=f"what the assistant calls itself (default: {NAME})")
    parser.add_argument("--author", default=AUTHOR, help=f"who made it (default: {AUTHOR})")
    arguments = parser.parse_args()
    print(f"{fill(arguments.name, arguments.author)}: {arguments.name} by {arguments.author}")


def fill(name: str, author: str) -> Path:
    """Writes build/data/identity.json and returns its path; the same name and author give the same bytes."""
    rows = json.loads(TEMPLATE.read_text(encoding="utf-8"))
    filled = [
        {key: text.replace("{{name}}", name).replace("{{author}}", author) for key, text in row.items()} for row in rows
    ]
    FILLED.parent.mkdir(parents=True, exist_ok=True)
    temporary = FILLED.with_suffix(".partial")
    temporary.write_text(json.dumps(filled, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, FILLED)
    return FILLED


if __name__ == "__main__":
    main()
