"""What changes from one recipe to another: in the plan, in every emitted file, and in the memory of a process."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from dsft.plan.describe import MOMENTS, shown_size
from dsft.plan.record import Plan, differences

# Hashes of other things that differ, and what the planner expects, which is told apart.
FOLLOWING = ("recipe_sha256", "files", "estimate")


def changes(old: Plan, new: Plan, old_files: Mapping[str, str], new_files: Mapping[str, str]) -> dict[str, Any]:
    """`plan`: path -> [old, new]. `files`: name -> unified diff, of those that differ. `memory`: part -> [old, new]
    bytes at the worst moment of each, where both are known; `moments`: which these are."""
    plan = {path: [a, b] for path, a, b in differences(old, new) if path.split(".")[0] not in FOLLOWING}
    names = dict.fromkeys((*old_files, *new_files))
    files = {name: _diff(name, old_files.get(name), new_files.get(name)) for name in names if name != "plan.json"}
    return {
        "plan": plan,
        "files": {name: text for name, text in files.items() if text},
        "memory": _memory(old, new),
        "moments": [plan.estimate and plan.estimate.moment for plan in (old, new)],
    }


def render(changes: Mapping[str, Any]) -> str:
    """The changes for a person."""
    lines = [f"{path}: {_shown(old)} -> {_shown(new)}" for path, (old, new) in changes["plan"].items()]
    lines = ["plan", *(f"  {line}" for line in lines or ["no difference"])]
    for text in changes["files"].values():
        lines += ["", text.rstrip("\n")]
    if changes["memory"]:
        old, new = changes["moments"]
        lines += ["", f"memory of a process {MOMENTS[new]}" + (f"; before, {MOMENTS[old]}" if old != new else "")]
        for part, (old, new) in changes["memory"].items():
            change = f" ({'+' if new > old else '-'}{shown_size(abs(new - old))})" if new != old else ""
            lines.append(f"  {part.ljust(24)}{shown_size(old).rjust(10)} -> {shown_size(new).rjust(10)}{change}")
    return "\n".join(lines)


def _diff(name: str, old: str | None, new: str | None) -> str:
    lines = difflib.unified_diff(
        (old or "").splitlines(keepends=True),
        (new or "").splitlines(keepends=True),
        "/dev/null" if old is None else f"a/{name}",
        "/dev/null" if new is None else f"b/{name}",
    )
    return "".join(lines)


def _memory(old: Plan, new: Plan) -> dict[str, list[int]]:
    if old.estimate is None or new.estimate is None:
        return {}
    before, after = old.estimate.memory, new.estimate.memory
    parts = {name: [before.get(name, 0), after.get(name, 0)] for name in dict.fromkeys((*before, *after))}
    parts = {name: sizes for name, sizes in parts.items() if any(sizes)}
    return parts | {"in all": [old.estimate.device_bytes, new.estimate.device_bytes]}


def _shown(value: Any) -> str:
    return "nothing" if value is None else str(value)
