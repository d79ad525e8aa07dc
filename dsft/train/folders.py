"""Folders that are whole or not there: written under a temporary name, renamed last."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def begin(final: Path) -> Path:
    """An empty folder beside `final` to write into; what an earlier attempt left there is gone."""
    temporary = final.with_name(f".{final.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def finish(temporary: Path, final: Path) -> None:
    """Gives the folder its final name, in place of an older one."""
    umask = os.umask(0)  # the only way to read it is to set it
    os.umask(umask)
    for path in temporary.iterdir():
        path.chmod(0o666 & ~umask)  # safetensors writes for the owner alone
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)
