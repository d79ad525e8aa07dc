"""From a recipe file to a Recipe: read it, follow `extends`, apply `--set`, check."""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from dsft.errors import DsftError, Problem, Where, refused
from dsft.recipe import rules, schema
from dsft.recipe.record import Recipe
from dsft.recipe.text import Node, Source, Span, parse, parse_all

MAX_BYTES = 512 << 10  # no recipe is larger; a model or data file given by mistake is
MAX_BASES = 16


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """The recipe in the file `path`, with `overrides` ("a.b=VALUE", as `--set` takes them) applied last.

    Raises DsftError where the file or an override cannot be read: nothing further can be said then. Whatever else is
    wrong, in its bases too, is in the `problems` of the result.
    """
    problems: list[Problem] = []
    unread = False
    tree = said = None
    try:
        tree = _read_with_bases(Path(path), str(path), problems, asked_by=None, chain=())
    except DsftError as error:
        problems.extend(error.problems)
        unread = True
    for override in overrides:  # combined first: `--set` in any order means the same
        try:
            node = _override(override)
            said = node if said is None else _together(said, node)
        except DsftError as error:
            problems.extend(error.problems)
            unread = True
    if unread:
        raise DsftError(problems)
    if said is not None:
        tree = _merge(tree, said)
    return checked(tree, problems)


def checked(tree: Node, problems: Iterable[Problem] = ()) -> Recipe:
    """The Recipe of a whole tree: completed, with what the schema and the rules find wrong besides `problems`."""
    values, found, wrong = schema.check(tree)
    problems = [*problems, *found]
    recipe = Recipe(values, tree, (), frozenset(wrong))
    problems += rules.check(recipe)
    return Recipe(values, tree, recipe.in_order(problems), frozenset(wrong))


def read_text(path: Path, name: str, *, what: str, asked_by: Where | None = None, limit: int = MAX_BYTES) -> str:
    """The text of a small UTF-8 file, a byte order mark skipped.

    Raises DsftError. `what` is what the file should be ("recipe"); `name` is how the user calls it; `asked_by` is the
    place that names it.
    """
    place = asked_by or Where(name)
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # opening a pipe may wait for ever
            message, help = f"{path} is a pipe, a device or a socket", f"write the {what} to a file"
            raise refused("not-a-file", message, where=place, help=help)
        with open(path, "rb") as file:
            raw = file.read(limit + 1)
    except FileNotFoundError:
        raise refused("file-not-found", f"no {what} at {path}", where=place, help=nearby(path, asked_by)) from None
    except IsADirectoryError:
        raise refused("not-a-file", f"{path} is a directory, not a {what}", where=place) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise refused("unreadable-file", f"cannot read {path}: {reason}", where=place) from None
    if len(raw) > limit:
        raise refused(
            "not-a-" + what.replace(" ", "-"), f"{path} is larger than {limit >> 10} KiB: not a {what}", where=place
        )
    try:
        if b"\0" in raw[:2]:  # a Latin letter in UTF-16, of which UTF-8 takes each byte for a character
            raise UnicodeDecodeError("utf-8", raw, 0, 1, "UTF-16")
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        before = raw[raw.rfind(b"\n", 0, error.start) + 1 : error.start].decode("utf-8", "replace")
        utf16 = raw[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in raw[:2]
        found = "UTF-16" if utf16 else f"byte 0x{raw[error.start]:02x}"
        raise refused(
            "not-utf-8",
            f"the file is not UTF-8: {found}",
            where=Where(name, line, len(before) + 1),
            help="save it as UTF-8",
        ) from None


def nearby(path: Path, asked_by: Where | None = None) -> str | None:
    """A file of nearly the same name in the same folder; never the one that asks for it."""
    try:
        names = os.listdir(path.parent)
    except OSError:
        return f"there is no folder {path.parent}"
    if os.path.islink(path):
        return f"it is a link to {os.path.realpath(path)}, which is not there"
    asks = os.path.abspath(asked_by.source) if asked_by else None
    others = [name for name in names if name != path.name and os.path.join(os.path.abspath(path.parent), name) != asks]
    close = difflib.get_close_matches(path.name, others, n=1)
    return f"did you mean {path.parent / close[0]}?" if close else None


def _read_with_bases(
    path: Path, name: str, problems: list[Problem], *, asked_by: Where | None, chain: tuple[Path, ...]
) -> Node:
    """The tree of a recipe file, merged over the recipes that it extends.

    `problems` takes those that did not keep a file from being read; `chain` is the files that led here.
    """
    text = read_text(path, name, what="recipe", asked_by=asked_by)
    real = Path(os.path.realpath(path))
    if real in chain:
        raise refused(
            "extends-cycle",
            "recipes that extend each other: " + " -> ".join(p.name for p in (*chain, real)),
            where=asked_by,
            help="the last of them must not extend another",
        )
    if len(chain) > MAX_BASES:
        message = f"more than {MAX_BASES} recipes, each extending the next"
        raise refused("extends-too-long", message, where=asked_by, help="merge some of them into one")
    tree, noted = parse_all(Source(name, Path(os.path.abspath(path)).parent, text, len(chain)))
    problems += noted
    if asked_by and not isinstance(tree.value, dict):
        raise refused("wrong-type", "a recipe must be an object {…}", where=tree.span.where())
    if isinstance(tree.value, dict) and "recipe_sha256" in tree.value:
        help = f"its recipe is {os.path.join(os.path.dirname(name), 'recipe.json')}"
        raise refused(
            "not-a-recipe",
            f"{path} is a compiled plan, not a recipe",
            where=tree.value["recipe_sha256"].key.where(),
            help=help,
        )
    base = tree.value.get("extends") if isinstance(tree.value, dict) else None
    if base is None or base.broken or not isinstance(base.value, str) or not base.value:
        return tree
    said = os.path.expanduser(base.value)
    base_name = os.path.normpath(os.path.join(os.path.dirname(name), said))
    asks = base.span.where()
    try:
        below = _read_with_bases(path.parent / said, base_name, problems, asked_by=asks, chain=(*chain, real))
    except DsftError as error:
        problems += error.problems
        return _without_base(tree)
    merged = _merge(below, tree)
    lost = "extends" in below.value and below.value["extends"].broken
    return _without_base(merged) if lost else merged


def _without_base(tree: Node) -> Node:
    """`tree` as one of which the base could not be read: what is said is checked, and nothing is missing."""
    return tree._replace(value={**tree.value, "extends": tree.value["extends"]._replace(broken=True)})


def _merge(below: Node, above: Node) -> Node:
    """`above` over `below`: objects are merged, anything else is replaced.

    An object that is another kind of thing replaces too (another `type`; a file to evaluate on where the base splits
    rows off): the fields of a LoRA mean nothing to a full fine-tuning.
    """
    if not (isinstance(below.value, dict) and isinstance(above.value, dict)):
        return above
    types = [side.value["type"].value for side in (below, above) if "type" in side.value]
    if len(types) == 2 and types[0] != types[1] or _splits_a_file(below, above):
        return above
    members = dict(below.value)
    for name, child in above.value.items():
        members[name] = _merge(members[name], child) if name in members else child
    if above.span.source.text is None:  # an argument adds to the object that a file says
        return Node(members, below.span, below.key)
    return Node(members, above.span, above.key)


def _splits_a_file(below: Node, above: Node) -> bool:
    return {"split", "path"} <= below.value.keys() | above.value.keys()


def _together(said: Node, node: Node, *path: str) -> Node:
    """Two `--set` arguments as one. Raises DsftError where one says a field of what the other replaces by a value."""
    objects = [isinstance(side.value, dict) for side in (said, node)]
    if all(objects) and not _splits_a_file(said, node):
        for name in said.value.keys() & node.value.keys():
            _together(said.value[name], node.value[name], *path, name)
    elif any(objects):
        other = said.span.source.name.removeprefix("--set ")
        message = f'"{other}" says another thing of "{".".join(path)}", and the order of --set means nothing'
        raise refused("bad-override", message, where=node.span.where(), help="keep one of them")
    return _merge(said, node)


def _override(argument: str) -> Node:
    """The tree that a `--set` argument says.

    VALUE is read as JSON where it is JSON (5, true, null, "text", [1, 2]); any other text stands for itself, unless
    it starts with {, [ or ", which nobody means as text.
    """
    name, equals, text = argument.partition("=")
    keys = name.split(".")
    span = Span(Source(f"--set {argument}", Path.cwd()))
    if not equals or not all(keys) or not argument.isprintable():
        raise refused(
            "bad-override",
            f"{argument!r} is not KEY=VALUE",
            where=Where("--set"),
            help="for example --set training.max_steps=5",
        )
    if name == "extends":
        raise refused("bad-override", "extends can only be said in a recipe file", where=span.where())
    try:
        value = parse(span.source, text).value
    except DsftError:
        if text.lstrip()[:1] in ("{", "[", '"'):
            raise
        value = text
    node = Node(value, span, span)
    for key in reversed(keys):
        node = Node({key: node}, span, span)
    return node
