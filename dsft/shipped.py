"""Files that belong to dsft and are no Python."""

from __future__ import annotations

from pathlib import Path

import dsft


def shipped(name: str) -> Path:
    """The file `name` ("docs/errors.md"): inside the package in a wheel, beside it in a source checkout."""
    package = Path(dsft.__file__).parent
    inside = package / name
    return inside if inside.exists() else package.parent / name
