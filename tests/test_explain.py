"""Every kind of error has its page, and the examples on the pages are true."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from workshop import COMPLETE, Workshop

from dsft import cli
from dsft.explain import load_pages

PACKAGE = Path(__file__).resolve().parent.parent / "dsft"
PAGES = load_pages()


# --- every kind has its page --------------------------------------------------------------------------------------


def kinds() -> dict[str, str]:
    """Each kind that a Problem in dsft/ can have, and a place where it is made: "file:line".

    A kind is what stands for a parameter `kind` of text: of Problem itself or of a function that makes one.
    """
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
    functions = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    makers = {"Problem": 0} | {f.name: at for f in functions if (at := _place_of_kind(f)) is not None}
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

    found = {}
    for path, tree in trees.items():
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef):
                continue
            place = f"{path.relative_to(PACKAGE.parent)}:{function.lineno}"
            for argument, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
                if argument.arg == "kind" and default is not None:
                    found |= dict.fromkeys(texts(default, function), place)
            for call in ast.walk(function):
                name = (
                    getattr(call.func, "attr", getattr(call.func, "id", None)) if isinstance(call, ast.Call) else None
                )
                if name in makers:
                    said = [keyword.value for keyword in call.keywords if keyword.arg == "kind"]
                    for value in said or call.args[makers[name] :][:1]:
                        found |= dict.fromkeys(texts(value, function), f"{place.rpartition(':')[0]}:{call.lineno}")
    return found


def _place_of_kind(function: ast.FunctionDef) -> int | None:
    """The position of the parameter `kind` of text in a call; beyond all positions where it is a keyword only."""
    positional = [argument for argument in function.args.args if argument.arg != "self"]
    for argument in _parameters(function):
        if argument.arg == "kind" and argument.annotation and ast.unparse(argument.annotation) == "str":
            return positional.index(argument) if argument in positional else 99
    return None


def _parameters(function: ast.FunctionDef) -> list[ast.arg]:
    return [*function.args.args, *function.args.kwonlyargs]


# --- the pages ----------------------------------------------------------------------------------------------------

EXAMPLE = re.compile(r"^(Wrong|Right):\n\n```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TESTED = ("json", "jsonl", "hostfile")  # a recipe, what data.train names, what cluster.hostfile names
# Only training or another run shows these; their examples are recipes all the same.
LATER = {"interrupted", "model-load", "non-finite-result", "not-finite", "run-exists"}
BASE = COMPLETE | {"data": COMPLETE["data"] | {"eval": {"split": 0.1}}}
SMALL = {  # fits two rows, one of them kept for evaluation
    "strategy": {"type": "single"},
    "training": {"global_batch_size": 1, "per_device_train_batch_size": 1},
    "cluster": {"processes_per_node": 1},
}
LLAMA_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


def examples() -> Iterator[tuple[str, str, str, str]]:
    """(kind, "Wrong" or "Right", language, text)"""
    for kind, page in PAGES.items():
        for verdict, language, text in EXAMPLE.findall(page):
            yield kind, verdict, language, text


def reported(workshop: Workshop, language: str, text: str, capsys) -> set[str]:
    """The kinds of what is wrong with a whole recipe that says what the example says."""
    workshop.write("base.json", BASE)
    workshop.write("rows.json", json.dumps([{"instruction": "Count.", "output": "1 2 3"}] * 40))
    workshop.write("chatml.jinja", "{{ messages }}")
    workshop.model("base-model", template=None)
    workshop.model("llama-70b", **LLAMA_70B)
    if language == "json":
        whole = text if "extends" in text else text.replace("{", '{"extends": "base.json", ', 1)
        path = workshop.write("example.json", whole)
    elif language == "jsonl":
        workshop.write("rows.jsonl", text)
        train = {"data": {"train": [{"path": "rows.jsonl", "format": "alpaca"}]}}
        path = workshop.write("example.json", {"extends": "base.json"} | SMALL | train)
    else:
        workshop.write("hosts", text)
        cluster = {"hostfile": "hosts", "processes_per_node": None}
        path = workshop.write("example.json", {"extends": "base.json", "cluster": cluster})
    cli.main(["check", str(path), "--format", "json"])
    return {problem["kind"] for problem in json.loads(capsys.readouterr().out)["problems"]}


@pytest.mark.parametrize(
    ("kind", "verdict", "language", "text"),
    [example for example in examples() if example[2] in TESTED],
    ids=lambda value: value if isinstance(value, str) and len(value) < 30 and value.isprintable() else "",
)
def test_examples(kind, verdict, language, text, tmp_path, capsys):
    kinds = reported(Workshop(tmp_path), language, text, capsys)
    if verdict == "Wrong" and kind not in LATER:
        assert kinds == {kind}
    else:
        assert kinds == set()


@pytest.mark.parametrize("kind", PAGES)
def test_a_page_says_what_is_wrong_and_what_to_do(kind):
    page = PAGES[kind]
    assert [verdict for verdict, _, _ in EXAMPLE.findall(page)] == ["Wrong", "Right"]
    assert page.count("```") == 4
    paragraphs = page.split("\n\n")
    assert paragraphs[-1].startswith("What to do: ") and paragraphs[-1].endswith(".")
    assert re.match(r"\S.*\.(\s|$)", paragraphs[0], re.DOTALL)
    assert all(len(line) <= 140 for line in page.splitlines())


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
    used = kinds()
    assert len(used) > 50
    missing = [f'"## {kind}" ({used[kind]})' for kind in sorted(used.keys() - PAGES.keys())]
    assert not missing, "docs/errors.md lacks the sections " + ", ".join(missing)
    unused = sorted(PAGES.keys() - used.keys())
    assert not unused, f"no error is of these kinds; remove their sections from docs/errors.md: {unused}"
