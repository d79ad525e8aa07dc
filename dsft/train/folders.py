"""Folders that are whole or not there: written under a temporary name, renamed last."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def begin(final: Path) -> Path:
    """An empty folder beside `final` to write into; what an earlier attempt left there is gone."""
    discard(final)
    temporary = _partial(final)
    temporary.mkdir(parents=True)
    return temporary


def discard(final: Path) -> None:
    """Removes what was written towards `final`, if anything."""
    shutil.rmtree(_partial(final), ignore_errors=True)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def finish(temporary: Path, final: Path) -> None:
    """Gives the folder its final name, in place of an older one."""
    umask = os.umask(0)  # the only way to read it is to set it
    os.umask(umask)
    for path in temporary.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~umask)  # safetensors writes for the owner alone
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)


def write_text(path: Path, text: str) -> None:
    """Writes a file that is whole or as it was before."""
    temporary = _partial(path)
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
