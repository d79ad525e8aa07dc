"""The grammar of a hostfile."""

from __future__ import annotations

import pytest

from dsft.errors import DsftError
from dsft.plan.cluster import read_hostfile
from dsft.plan.record import Host


def read(tmp_path, content: bytes):
    path = tmp_path / "hosts"
    path.write_bytes(content)
    return read_hostfile(path)


@pytest.mark.parametrize(
    ("content", "hosts"),
    [
        (b"n1 slots=2 # x\n\n# c\nn2 slots=2\n", (Host("n1", 2), Host("n2", 2))),
        (b"n1 slots=2 # x\r\n\r\n# c\r\nn2 slots=2\r\n", (Host("n1", 2), Host("n2", 2))),
        (b"\xef\xbb\xbfn1 slots=2", (Host("n1", 2),)),
        (b"  n1.example.org\tslots=16  ", (Host("n1.example.org", 16),)),
        (b"alice@10.0.0.1 slots=2", (Host("10.0.0.1", 2, "alice"),)),
    ],
)
def test_read(tmp_path, content, hosts):
    assert read(tmp_path, content) == hosts


@pytest.mark.parametrize(
    ("content", "kinds"),
    [
        (b"", ["hostfile-empty"]),
        (b"n1 slots=1025\nn2 slots=1025", ["out-of-range:1", "out-of-range:2"]),
        (b"# only\n\n# comments", ["hostfile-empty"]),
        (b"n1 slots=2\nn1 slots=2", ["hostfile-duplicate:2"]),
        (b"n1 slots=2\nN1 slots=2", ["hostfile-duplicate:2"]),
        (b"localhost slots=1\n127.0.0.1 slots=1", ["hostfile-duplicate:2"]),
        (b"a@n1 slots=1\nb@n1 slots=1", ["hostfile-duplicate:2"]),
        (b"n1 lots=2\nn2\nn3 slots = 2\nn4 slots=-1", [f"hostfile-syntax:{line}" for line in (1, 2, 3, 4)]),
        (b"n1 slots=2 max_slots=4", ["hostfile-syntax:1"]),
        (b"fe80::1 slots=2\n[fe80::2] slots=2", ["hostfile-syntax:1", "hostfile-syntax:2"]),
        (b"-oProxyCommand=x slots=1", ["hostfile-syntax:1"]),
        (b"n1;reboot slots=1", ["hostfile-syntax:1"]),
        (b"n1 slots=" + b"9" * 5000, ["hostfile-syntax:1"]),
        ("n1 slots=²".encode(), ["hostfile-syntax:1"]),
        (b"n1 slots=0", ["out-of-range:1"]),
        (b"n1 slots=2\nn2 slots=3", ["contradiction:2"]),
        (b"n1 slots=2\n\xff slots=3", ["not-utf-8:2"]),
    ],
)
def test_refused(tmp_path, content, kinds):
    with pytest.raises(DsftError) as caught:
        read(tmp_path, content)
    found = [f"{p.kind}:{p.where.line}" if p.where.line else p.kind for p in caught.value.problems]
    assert found == kinds


def test_a_hostfile_that_is_not_there(tmp_path):
    with pytest.raises(DsftError) as caught:
        read_hostfile(tmp_path / "hosts")
    assert caught.value.problems[0].kind == "file-not-found"
