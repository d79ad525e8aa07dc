"""A real ssh to this machine that needs no set-up and touches none: keys and configuration of its own, no port.

DeepSpeed's launcher asks the first machine of a hostfile over ssh, this one too. Each connection starts an sshd of its own
for the time it lasts (`sshd -i` behind ProxyCommand, as OpenSSH's own tests do), as the user who runs the tests.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

PRIVILEGE_SEPARATION = Path("/run/sshd")  # an empty folder that sshd insists on when root starts it


def find_sshd() -> str | None:
    return shutil.which("sshd", path=f"{os.defpath}{os.pathsep}/usr/sbin{os.pathsep}/usr/local/sbin")


def install(folder: Path) -> Path:
    """Writes keys, configuration and the command `ssh` into `folder`; returns the folder to put on PATH."""
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    if os.geteuid() == 0:
        PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
    (folder / "sshd_config").write_text(
        f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\nStrictModes no\nUsePAM no\nPidFile none\n"
    )
    (folder / "known_hosts").write_text(f"localhost {(folder / 'host.pub').read_text()}")
    (folder / "ssh_config").write_text(
        f"ProxyCommand {find_sshd()} -i -f {folder}/sshd_config\n"
        f"IdentityFile {folder}/user\nIdentitiesOnly yes\nIdentityAgent none\nBatchMode yes\n"
        f"UserKnownHostsFile {folder}/known_hosts\nGlobalKnownHostsFile none\nStrictHostKeyChecking yes\n"
    )
    programs = folder / "bin"
    programs.mkdir()
    ssh = programs / "ssh"
    ssh.write_text(
        f'#!/bin/sh\nexec {shlex.quote(shutil.which("ssh"))} -F {shlex.quote(str(folder / "ssh_config"))} "$@"\n'
    )
    ssh.chmod(0o755)
    return programs
