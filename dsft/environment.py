"""Variables by which launchers configure the processes that they start.

What a shell still holds of them, from another job or by a user's export, must not decide over this job: it is taken away
before a launcher starts, and once more in each process, after what the launcher said has been compared with the plan.
"""

from __future__ import annotations

from collections.abc import Mapping

# Settings for training. Libraries read them too: transformers leaves the weights of all ranks but 0 empty when it sees
# ACCELERATE_USE_FSDP.
SETTINGS = ("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_")

# torchrun's own options, each as a variable, and what it tells its processes.
TORCHRUN = ("PET_", "TORCHELASTIC_")

# A process's place in the job.
PLACES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
    *("CROSS_RANK", "CROSS_SIZE", "LOCAL_SIZE", "DS_ACCELERATOR"),
)

# The same for a shell: what it still holds of them is unset.
CLEAN_SHELL = (
    f"for name in $(env | sed -nE 's/^(({'|'.join((*SETTINGS, *TORCHRUN))})[A-Za-z0-9_]*|{'|'.join(PLACES)})=.*/\\1/p'); "
    'do unset "$name"; done'
)


def clean(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` as a launcher is to start with."""
    return {
        name: value
        for name, value in environment.items()
        if name not in PLACES and not name.startswith((*SETTINGS, *TORCHRUN))
    }
