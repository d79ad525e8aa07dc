"""Every kind of error has its page, and the examples on the pages are true."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from workshop import COMPLETE, Workshop

from dsft import cli
from dsft.explain import load_pages

PACKAGE = Path(__file__).resolve().parent.parent / "dsft"
FILE = PACKAGE.parent / "docs" / "errors.md"
PAGES = load_pages()


# --- every kind has its page --------------------------------------------------------------------------------------


def kinds() -> dict[str, list[tuple[str, str]]]:
    """Each kind that a Problem in dsft/ can have: the places where it is made, "file:line", each with a pattern of what
    its message says there.

    A kind is what stands for a parameter `kind` of text: of Problem itself or of a function that makes one.
    """
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
    functions = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    makers = {"Problem": (0, 1)} | {f.name: at for f in functions if (at := _kind_and_message(f)) is not None}
    whats = {
        keyword.value.value
        for tree in trees.values()
        for keyword in ast.walk(tree)
        if isinstance(keyword, ast.keyword) and keyword.arg == "what" and isinstance(keyword.value, ast.Constant)
    }

    def texts(value: ast.expr, function: ast.FunctionDef) -> list[str]:
        match value:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.IfExp(body=body, orelse=orelse):
                return texts(body, function) + texts(orelse, function)
            case ast.BinOp(left=ast.Constant(value="not-a-")):  # of `read_text`, by its `what`
                return ["not-a-" + what.replace(" ", "-") for what in whats]
            case ast.Attribute(attr="kind"):  # of a Problem made elsewhere
                return []
            case ast.Name(id="kind") if "kind" in [argument.arg for argument in _parameters(function)]:
                return []  # its callers say it
            case ast.Name(id="kind"):  # the first of what another function returns
                (said,) = [
                    node.value.func.id
                    for node in ast.walk(function)
                    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("(kind, ")
                ]
                (maker,) = [f for f in functions if f.name == said]
                returned = [node.value for node in ast.walk(maker) if isinstance(node, ast.Return)]
                return [text for each in returned for text in texts(each.elts[0], maker)]
        raise AssertionError(f"{ast.unparse(value)} in {function.name}: a kind that this test cannot read")

    found: dict[str, list[tuple[str, str]]] = {}
    for path, tree in trees.items():
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef):
                continue
            place = path.relative_to(PACKAGE.parent)
            for argument, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
                if argument.arg == "kind" and default is not None:
                    for kind in texts(default, function):
                        found.setdefault(kind, []).append((f"{place}:{function.lineno}", ".*"))
            for call in ast.walk(function):
                name = (
                    getattr(call.func, "attr", getattr(call.func, "id", None)) if isinstance(call, ast.Call) else None
                )
                if name in makers:
                    at_kind, at_message = makers[name]
                    message = (_said(call, "message", at_message) or [None])[0]
                    for value in _said(call, "kind", at_kind):
                        for kind in texts(value, function):
                            said = (f"{place}:{call.lineno}", _pattern(message, function))
                            found.setdefault(kind, []).append(said)
    return found


def _said(call: ast.Call, name: str, at: int) -> list[ast.expr]:
    """What a call says for the parameter `name`, by keyword or in position `at`; nothing, or one."""
    return [keyword.value for keyword in call.keywords if keyword.arg == name] or call.args[at:][:1]


def _pattern(message: ast.expr | None, function: ast.FunctionDef) -> str:
    """A regular expression of all that `message`, an expression in `function`, can say."""
    match message:
        case ast.Constant(value=str(text)):
            return re.escape(text)
        case ast.JoinedStr(values=parts):
            return "".join(_pattern(part, function) for part in parts)
        case ast.IfExp(body=body, orelse=orelse):
            return f"({_pattern(body, function)}|{_pattern(orelse, function)})"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _pattern(left, function) + _pattern(right, function)
        case ast.Name(id=name):
            assigned = [
                node.value
                for node in ast.walk(function)
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
            ]
            return "|".join(f"({_pattern(value, function)})" for value in assigned) or ".*"
    return ".*"


def _kind_and_message(function: ast.FunctionDef) -> tuple[int, int] | None:
    """Positions in a call of the parameters `kind`, of text, and `message`; beyond all where it is a keyword only, or
    there is none. None for a function without `kind`."""
    positional = [argument.arg for argument in function.args.args if argument.arg != "self"]
    for argument in _parameters(function):
        if argument.arg == "kind" and argument.annotation and ast.unparse(argument.annotation) == "str":
            kind, message = (positional.index(name) if name in positional else 99 for name in ("kind", "message"))
            return kind, message
    return None


def _parameters(function: ast.FunctionDef) -> list[ast.arg]:
    return [*function.args.args, *function.args.kwonlyargs]


KINDS = kinds()


# --- the pages ----------------------------------------------------------------------------------------------------

EXAMPLE = re.compile(r"^(Wrong|Message|Right):\n\n```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TESTED = ("json", "jsonl", "hostfile")  # a recipe, what data.train names, what cluster.hostfile names
LIGHT = ("check", "compile", "explain", "init")  # commands that load no torch and start nothing
# Only training or another run shows these; their examples are recipes all the same.
LATER = {"interrupted", "model-load", "non-finite-result", "not-finite", "run-exists"}
BASE = COMPLETE | {"data": COMPLETE["data"] | {"eval": {"split": 0.1}}}
SMALL = {  # fits two rows, one of them kept for evaluation
    "strategy": {"type": "single"},
    "training": {"global_batch_size": 1, "per_device_train_batch_size": 1},
    "cluster": {"processes_per_node": 1},
}
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


def examples() -> Iterator[tuple[str, str, str, str]]:
    """(kind, "Wrong" or "Right", language, text)"""
    for kind, page in PAGES.items():
        for verdict, language, text in EXAMPLE.findall(page):
            if verdict != "Message":
                yield kind, verdict, language, text


def message(kind: str) -> str:
    """What the page on a kind says that dsft says."""
    (said,) = [text for verdict, _, text in EXAMPLE.findall(PAGES[kind]) if verdict == "Message"]
    return said


def runs(language: str, text: str) -> bool:
    """Whether an example is all that is needed to see what dsft says, and that at once."""
    lines = [line.split() for line in text.splitlines()]
    light = all(words[0] == "dsft" and words[1] in LIGHT and "#" not in words for words in lines if words)
    return language in TESTED or language == "sh" and light


def reported(folder: Path, language: str, text: str, capsys) -> str:
    """The errors and warnings about what the example says, without their places; `folder` is called "…"."""
    workshop = Workshop(folder)
    workshop.write("base.json", BASE)
    workshop.write("rows.json", json.dumps([{"instruction": "Count.", "output": "1 2 3"}] * 40))
    workshop.write("chatml.jinja", "{{ messages }}")
    workshop.model("base-model", template=None)
    workshop.model("llama-8b", **LLAMA_8B)
    command = ["check", "example.json"]
    if language == "json":
        workshop.write("example.json", text if "extends" in text else text.replace("{", '{"extends": "base.json", ', 1))
    elif language == "jsonl":
        workshop.write("rows.jsonl", text)
        train = {"data": {"train": [{"path": "rows.jsonl", "format": "alpaca"}]}}
        workshop.write("example.json", {"extends": "base.json"} | SMALL | train)
    elif language == "hostfile":
        workshop.write("hosts", text)
        cluster = {"hostfile": "hosts", "processes_per_node": None}
        workshop.write("example.json", {"extends": "base.json", "cluster": cluster})
    else:
        workshop.write("recipe.json", BASE)
        workshop.write("recipes/mine.json", {"extends": "../base.json"})
        with open(workshop.write("tokens.bin", ""), "wb") as file:
            file.truncate(2**30)  # takes no room on the disk
        command = shlex.split(text.partition("<")[0])[1:]
    with contextlib.chdir(folder), open(os.devnull) as nobody, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", nobody)
        cli.main(command)
    said = re.findall(r"(?:error|warning)\[.*|^ +help: .*", capsys.readouterr().err, re.MULTILINE)
    return "".join(re.sub("^ +help", "  help", line).replace(str(folder), "…") + "\n" for line in said)


@pytest.mark.parametrize(
    ("kind", "verdict", "language", "text"),
    [example for example in examples() if runs(*example[2:])],
    ids=lambda value: value if isinstance(value, str) and len(value) < 30 and value.isprintable() else "",
)
def test_examples(kind, verdict, language, text, tmp_path, capsys, update_golden):
    """A wrong one is answered with the page's message, a right one with none."""
    said = reported(tmp_path, language, text, capsys)
    if kind in LATER:
        assert "error[" not in said
        return
    if verdict == "Right":
        assert said == ""
        return
    assert set(re.findall(r"^\w+\[(.*?)\]", said, re.MULTILINE)) == {kind}
    if update_golden:
        pages = FILE.read_text(encoding="utf-8")
        FILE.write_text(pages.replace(f"```text\n{message(kind)}```", f"```text\n{said}```"), encoding="utf-8")
    else:
        assert message(kind) == said, "if the change is meant: pytest --update-golden"


SEEN = {kind for kind, verdict, *example in examples() if verdict == "Wrong" and runs(*example)} - LATER


@pytest.mark.parametrize("kind", [kind for kind in PAGES if kind not in SEEN])
def test_a_message_that_no_example_shows_is_one_that_the_code_makes(kind):
    named, text = re.match(r"(?:error|warning)\[(.*?)\]: (.*)", message(kind)).groups()
    patterns = [pattern for _, pattern in KINDS[kind]]
    assert named == kind and any(re.fullmatch(pattern, text) for pattern in patterns), patterns


@pytest.mark.parametrize("kind", PAGES)
def test_a_page_says_what_is_wrong_and_what_to_do(kind):
    page = PAGES[kind]
    assert [verdict for verdict, _, _ in EXAMPLE.findall(page)] == ["Wrong", "Message", "Right"]
    assert page.count("```") == 6
    paragraphs = page.split("\n\n")
    assert paragraphs[-1].startswith("What to do: ") and paragraphs[-1].endswith(".")
    assert re.match(r"\S.*\.(\s|$)", paragraphs[0], re.DOTALL)
    assert all(len(line) <= 140 for line in EXAMPLE.sub("", page).splitlines())


def test_pages_are_in_order():
    assert list(PAGES) == sorted(PAGES)


def test_commands_on_the_pages_exist():
    """Every `dsft …` in the examples is a command with flags that it takes."""
    for _, verdict, language, text in examples():
        for line in text.splitlines() if language == "sh" else ():
            command = line.partition("#")[0].partition("<")[0].partition("&")[0]
            words = shlex.split(command)
            if words[:1] == ["dsft"]:
                cli._parser().parse_args(words[1:])


def test_explain_prints_the_page(capsys):
    assert cli.main(["explain", "unknown-key"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("unknown-key\n\nA key is not a field") and '"learning_rat"' in out


def test_explain_lists_all_kinds(capsys):
    assert cli.main(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(PAGES)
    assert all(re.match(r"\S+  +\S.*\.$", line) for line in lines)


def test_explain_knows_nearly_the_name(capsys):
    assert cli.main(["explain", "unknown-keys"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "error[unknown-kind]" in err and 'did you mean "unknown-key"?' in err


def test_every_kind_has_a_page_and_every_page_a_kind():
    assert len(KINDS) > 50
    missing = [f'"## {kind}" ({KINDS[kind][0][0]})' for kind in sorted(KINDS.keys() - PAGES.keys())]
    assert not missing, "docs/errors.md lacks the sections " + ", ".join(missing)
    unused = sorted(PAGES.keys() - KINDS.keys())
    assert not unused, f"no error is of these kinds; remove their sections from docs/errors.md: {unused}"
