"""The machine that the plan is made on."""

from __future__ import annotations

import os

CGROUP_LIMIT = "/sys/fs/cgroup/memory.max"  # of a container: Linux, cgroup version 2


def machine_memory(limit_file: str = CGROUP_LIMIT) -> int:
    """Bytes of memory that processes on this machine may use: what is built in, or a container's limit below it."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open(limit_file) as file:
            limit = file.read().strip()
    except OSError:
        return installed
    return min(installed, int(limit)) if limit.isdigit() else installed
