"""Versions of what a run depends on, read from the names of installed packages' folders: nothing is imported.

importlib.metadata gives the same in ten times the time: it loads an e-mail parser and reads every package's metadata.
"""

from __future__ import annotations

import os
import sys

PACKAGES = ("dsft", "torch", "deepspeed", "accelerate", "transformers", "peft", "datasets", "safetensors")


def installed_versions() -> dict[str, str]:
    """Version of each package that is installed, and "python" as "3.11".

    A local part, as in 2.13.0+cpu, is left out: a plan may be compiled where there is no GPU.
    """
    found: dict[str, str] = {}
    for folder in sys.path:
        for entry in _entries(folder):
            name, dash, version = entry.removesuffix(".dist-info").partition("-")
            if dash and entry.endswith(".dist-info"):
                found.setdefault(name.lower(), version.partition("+")[0])
    python = "{}.{}".format(*sys.version_info)
    return {"python": python} | {name: found[name] for name in PACKAGES if name in found}


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder or ".")
    except OSError:  # a zip file, or a folder that is not there
        return []
