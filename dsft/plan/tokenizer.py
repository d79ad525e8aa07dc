"""What a tokenizer's file says, without the time to parse it: a vocabulary of a quarter million tokens is 30 MB of JSON."""

from __future__ import annotations

import re
from pathlib import Path

_END_OF_VOCABULARY = re.compile(rb'\}\s*,\s*"merges"\s*:\s*\[')
_LAST_ID = re.compile(rb":\s*([0-9]{1,10})\s*$")
_ID = re.compile(rb'"id"\s*:\s*([0-9]{1,10})')


def is_whole(folder: Path) -> bool:
    """Whether tokenizer.json, if there is one, begins and ends as one does: a copy may have been cut off."""
    try:
        text = (folder / "tokenizer.json").read_bytes().strip()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return text.startswith(b"{") and text.endswith(b"}") and b'"model"' in text


def last_id(folder: Path) -> int | None:
    """The last id of the vocabulary in tokenizer.json; None where there is none, of another kind than byte pair
    encoding, or where a token added later has it, which text need not ever be made into.

    The tokenizers library writes a vocabulary in the order of its ids, the added tokens before it and the merges behind.
    """
    try:
        text = (folder / "tokenizer.json").read_bytes()
    except OSError:
        return None
    end = _END_OF_VOCABULARY.search(text)
    last = _LAST_ID.search(text, max(0, end.start() - 40), end.start()) if end else None
    if not last:
        return None
    added = {int(number) for number in _ID.findall(text, 0, max(0, text.find(b'"normalizer"')))}
    number = int(last[1])
    return None if number in added else number
