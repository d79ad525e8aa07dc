"""Versions of what a run depends on, read from package metadata: nothing is imported."""

from __future__ import annotations

import importlib.metadata
import platform

PACKAGES = ("dsft", "torch", "deepspeed", "accelerate", "transformers", "peft", "datasets", "safetensors")


def installed_versions() -> dict[str, str]:
    """Version of each package that is installed, and "python" as "3.11".

    A local part, as in 2.13.0+cpu, is left out: a plan may be compiled where there is no GPU.
    """
    versions = {"python": ".".join(platform.python_version_tuple()[:2])}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
