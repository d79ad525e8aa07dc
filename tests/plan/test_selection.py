"""Machines and slots of a hostfile that a recipe takes or leaves out, as `deepspeed --include` names them."""

from __future__ import annotations

import pytest
from workshop import COMPLETE

from dsft.errors import DsftError
from dsft.plan.record import Host

TWO = "n1 slots=2\nn2 slots=2\n"


def cluster(workshop, hosts: str = TWO, **fields):
    (workshop.folder / "hosts").write_text(hosts)
    changes = {"cluster": {"device": "cpu", "hostfile": "hosts", **fields}}
    return workshop.plan("training.per_device_train_batch_size=1", **changes).cluster


@pytest.mark.parametrize(
    ("fields", "hosts"),
    [
        ({"include": "n1"}, (Host("n1", 2, devices=(0, 1)),)),
        ({"include": "n1:1"}, (Host("n1", 1, devices=(1,)),)),
        ({"include": "n1:0,0"}, (Host("n1", 1, devices=(0,)),)),
        ({"include": "n2:1@n1:0"}, (Host("n1", 1, devices=(0,)), Host("n2", 1, devices=(1,)))),
        ({"exclude": "n1"}, (Host("n2", 2, devices=(0, 1)),)),
        ({"exclude": "n1:0@n2:1"}, (Host("n1", 1, devices=(1,)), Host("n2", 1, devices=(0,)))),
    ],
)
def test_selected(workshop, fields, hosts):
    chosen = cluster(workshop, **fields)
    assert chosen.hosts == hosts
    assert chosen.processes_per_node == hosts[0].slots


def test_the_world_is_the_sum_of_the_selected_slots(workshop):
    (workshop.folder / "hosts").write_text(TWO)
    plan = workshop.plan(cluster={"device": "cpu", "hostfile": "hosts", "include": "n1:0@n2:0"})
    assert plan.batch.world_size == 2


@pytest.mark.parametrize(
    ("fields", "problems"),
    [
        ({"include": "n1:2,3"}, ["selection-slot n1 has no slot 2 (n1 has 0 to 1)"]),
        ({"include": "n3"}, ["selection-host n3 is none of the hosts (known are n1, n2)"]),
        ({"include": "n3:0@n4@n1"}, ["selection-host n3, n4 are none of the hosts (known are n1, n2)"]),
        ({"exclude": "n1@n2"}, ["selection-empty exclude leaves no slot of any machine"]),
        ({"include": "n1:0,1@n2:0"}, ["contradiction n2 is left with 1 slots, and n1 with 2"]),
        ({"include": "n1", "exclude": "n2"}, ["said-twice both include and exclude are said"]),
        ({"include": "n1:"}, ['selection-syntax "n1:" does not name a host and its slots']),
        ({"include": "n1:0-1@@n9"}, ["selection-syntax", "selection-syntax", "selection-host"]),
        (
            {"include": "n1:0@n2:1", "processes_per_node": 2},
            ["contradiction processes_per_node is 2, and the selection"],
        ),
        ({"nodes": 3}, ["contradiction nodes is 3, and the hostfile names 2"]),
    ],
)
def test_refused(workshop, fields, problems):
    with pytest.raises(DsftError) as caught:
        cluster(workshop, **fields)
    found = [f"{problem.kind} {problem.message} ({problem.help})" for problem in caught.value.problems]
    assert len(found) == len(problems) and all(was.startswith(said) for was, said in zip(found, problems))


def test_nodes_that_the_hostfile_has(workshop):
    assert len(cluster(workshop, nodes=2).hosts) == 2


def test_several_nodes_need_a_hostfile(workshop):
    with pytest.raises(DsftError, match="without a hostfile there is this machine alone"):
        workshop.plan(cluster={"device": "cpu", "nodes": 2})


def test_slots_of_a_user_that_deepspeeds_launcher_cannot_name(workshop):
    (workshop.folder / "hosts").write_text("alice@n1 slots=2\nn2 slots=2\n")
    fields = {"device": "cpu", "hostfile": "hosts"}
    launcher = {"type": "deepspeed"}
    assert workshop.plan(cluster=fields, launcher=launcher) and workshop.plan(cluster=fields | {"include": "n1:0@n2:1"})
    with pytest.raises(DsftError, match="cannot select slots of USER@HOST"):
        workshop.plan(cluster=fields | {"include": "n1:0@n2:1"}, launcher=launcher)


def kinds(workshop, **changes):
    with pytest.raises(DsftError) as caught:
        workshop.plan(**changes)
    return sorted(problem.kind for problem in caught.value.problems)


@pytest.mark.parametrize("wrong", [{"processes_per_node": "two"}, {"include": 3}, {"nodes": 0}])
def test_a_wrong_field_does_not_hide_the_hostfile(workshop, wrong):
    (workshop.folder / "hosts").write_text("n1 slots=2\nn1 slots=2\n")
    found = kinds(workshop, cluster={"device": "cpu", "hostfile": "hosts"} | wrong)
    assert len(found) == 2 and "hostfile-duplicate" in found


def test_what_the_hostfile_contradicts_is_said_at_once(workshop):
    (workshop.folder / "hosts").write_text("n1 slots=2\n")
    fields = {"device": "cpu", "hostfile": "hosts", "processes_per_node": 4, "nodes": 2}
    assert kinds(workshop, cluster=fields) == ["contradiction", "contradiction"]


def test_too_many_processes_do_not_hide_the_precision(workshop):
    fields = {"gpu": "v100-32gb", "processes_per_node": 2}
    training = COMPLETE["training"] | {"precision": "bf16"}
    found = kinds(workshop, cluster=fields, strategy={"type": "single"}, training=training)
    assert found == ["contradiction", "precision-device"]


@pytest.mark.parametrize("names", [("localhost", "n2"), ("n1", "127.0.0.1"), ("n1", "LocalHost")])
def test_the_machine_itself_is_none_of_several(workshop, names):
    """Each of them would connect to itself, and wait."""
    (workshop.folder / "hosts").write_text("".join(f"{name} slots=2\n" for name in names))
    fields = {"device": "cpu", "hostfile": "hosts"}
    assert kinds(workshop, cluster=fields) == ["contradiction"]
    assert workshop.plan("training.per_device_train_batch_size=1", cluster=fields | {"include": names[0]})


def test_a_machine_of_another_size_can_be_left_out(workshop):
    hosts = "n1 slots=2\nn2 slots=2\nodd slots=4\n"
    assert [host.name for host in cluster(workshop, hosts, exclude="odd").hosts] == ["n1", "n2"]
    assert [host.slots for host in cluster(workshop, hosts, include="n1@odd:2,3").hosts] == [2, 2]
    with pytest.raises(DsftError, match="odd has 4 slots, and n1 has 2"):
        cluster(workshop, hosts)
    with pytest.raises(DsftError, match="odd is left with 4 slots, and n1 with 2"):
        cluster(workshop, hosts, include="n1@odd")
