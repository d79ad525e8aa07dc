"""Rows of each format into messages, and what is said of rows that are not of it."""

from __future__ import annotations

import json
from functools import partial

import pytest

from dsft.errors import DsftError
from dsft.plan.formats import RowError, alpaca_messages, chat_messages, to_messages
from dsft.plan.rows import scan

CHAT = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "jumps"}]

ALPACA = {"instruction": "Add", "output": "3"}


def said(assistant: dict) -> dict:
    """A row whose assistant turn is as usual but for `assistant`."""
    return {"messages": [CHAT[0], {**CHAT[1], **assistant}]}


def test_alpaca_rows():
    row = {"instruction": "Add", "input": "1 and 2", "output": "3"}
    assert alpaca_messages(row) == [{"role": "user", "content": "Add\n1 and 2"}, {"role": "assistant", "content": "3"}]
    assert alpaca_messages({**row, "input": "", "system": "s"})[0] == {"role": "system", "content": "s"}


def test_messages_rows():
    assert chat_messages({"messages": CHAT}) == CHAT


@pytest.mark.parametrize(
    ("convert", "row"),
    [
        (alpaca_messages, {**ALPACA, "id": 7, "source": "x", "history": [], "text": "whole", "label": 1}),
        (chat_messages, {"messages": CHAT, "id": 7, "tools": [], "functions": None}),
        (chat_messages, said({"weight": 1, "tool_calls": [], "function_call": None, "name": "bot"})),
        (chat_messages, {"messages": [{**CHAT[0], "weight": 0}, CHAT[1]]}),
    ],
)
def test_what_changes_nothing_is_no_error(convert, row):
    assert convert(row)[-1]["role"] == "assistant"


@pytest.mark.parametrize(
    ("convert", "row", "message"),
    [
        (alpaca_messages, {"instruction": "Add"}, 'needs "output"; this one has instruction'),
        (alpaca_messages, {"instruction": 3, "output": "x"}, '"instruction" is a string, and this is a number'),
        (alpaca_messages, {"instruction": "Add", "output": ["x"]}, '"output" is a string, and this is a list'),
        (alpaca_messages, ["Add"], "is an object, and this is a list"),
        (chat_messages, {"prompt": "x"}, 'needs "messages"'),
        (chat_messages, {"messages": []}, 'needs "messages"'),
        (chat_messages, {"messages": [{"role": "user"}]}, '"content" of message 1 is a string, and this is not there'),
        (chat_messages, {"messages": CHAT[:1]}, "nothing to learn"),
        (partial(to_messages, "alpaca"), {"instruction": "a\ud800", "output": "b"}, "half of a UTF-16 pair"),
        (chat_messages, {"messages": CHAT[::-1]}, "speaks before the user"),
        (alpaca_messages, {**ALPACA, "history": [["a", "b"]]}, '"history" holds earlier turns'),
        (alpaca_messages, {**ALPACA, "inputs": "1 and 2"}, '"inputs" is not a field of an alpaca row'),
        (alpaca_messages, {**ALPACA, "Input": "1 and 2"}, '"Input" is not a field of an alpaca row'),
        (chat_messages, said({"content": "", "tool_calls": [{"id": "1"}]}), "message 2 calls a tool"),
        (chat_messages, said({"content": None, "function_call": {"name": "f"}}), "message 2 calls a tool"),
        (chat_messages, said({"weight": 0}), '"weight" of message 2 is 0'),
        (chat_messages, said({"train": False}), '"train" of message 2 is false'),
        (chat_messages, {"messages": CHAT, "weight": 0}, '"weight" of the row is 0'),
        (alpaca_messages, {**ALPACA, "weight": 0.5}, '"weight" of the row is 0.5'),
        (alpaca_messages, {**ALPACA, "inputt": "x"}, 'write "input"'),
        (alpaca_messages, {**ALPACA, "system_prompt": "x"}, 'write "system"'),
        (chat_messages, {"messages": [*CHAT, {"role": "asistant", "content": "x"}]}, 'write "assistant"'),
        (chat_messages, {"messages": [*CHAT, {"role": "gpt", "content": "x"}]}, 'write "assistant"'),
        (
            chat_messages,
            {"messages": [*CHAT, {"role": "narrator", "content": "x"}]},
            "known are system, developer, user",
        ),
        (chat_messages, said({"weight": 0.0}), '"weight" of message 2 is 0'),
        (chat_messages, said({"weight": 0.5}), '"weight" of message 2 is 0.5'),
        (chat_messages, said({"loss_weight": 0.0}), '"loss_weight" of message 2'),
        (chat_messages, said({"reasoning_content": "hm"}), '"reasoning_content" of message 2'),
        (chat_messages, said({"role": "Assistant"}), '"role" of message 2 is "Assistant": write "assistant"'),
        (chat_messages, {"messages": CHAT, "tools": [{"type": "function"}]}, '"tools" are not passed'),
    ],
)
def test_a_row_of_another_kind_says_what_is_wrong(convert, row, message):
    with pytest.raises(RowError) as caught:
        convert(row)
    assert message in str(caught.value)


def test_scan_reports_each_bad_row_with_its_line_and_the_rest_as_a_number(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in [{"instruction": "a", "output": "b"}] + [{"text": "x"}] * 25))
    with pytest.raises(DsftError) as caught:
        scan(path, "alpaca")
    problems = caught.value.problems
    assert [problem.where.line for problem in problems] == [2, 3, 4, 5, 6, 7]
    assert problems[5].message == "20 more rows cannot be used"


def test_a_file_of_another_format_is_one_problem_that_names_it(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"messages": CHAT}] * 3))
    with pytest.raises(DsftError) as caught:
        scan(path, "alpaca")
    (problem,) = caught.value.problems
    assert problem.kind == "wrong-format"
    assert problem.help == 'its rows are in format "messages"'


@pytest.mark.parametrize("shape", ["{}", "[{}]"])
def test_a_number_of_thousands_of_digits_is_bad_data_at_its_line(tmp_path, shape):
    path = tmp_path / "rows.json"
    path.write_text(shape.replace("{}", '{"instruction": "a", "output": "b", "n": ' + "9" * 5000 + "}"))
    with pytest.raises(DsftError) as caught:
        scan(path, "alpaca")
    assert caught.value.problems[0].where.line == 1


@pytest.mark.parametrize("shape", ["{}", "[{}]"])
def test_a_key_said_twice_is_no_row(tmp_path, shape):
    path = tmp_path / "rows"
    path.write_text(shape.format('{"instruction": "a", "output": "b", "output": "c"}'))
    with pytest.raises(DsftError, match='"output" is said twice'):
        scan(path, "alpaca")


def test_a_line_that_is_no_json_hides_no_other(tmp_path):
    good = '{"instruction": "a", "output": "b"}'
    path = tmp_path / "rows"
    lines = [good, '{"a": 1}', "{bad", good, '{"b": 2}', "{bad too"]
    path.write_bytes("\n".join(lines).encode() + b"\n\xff\n")
    with pytest.raises(DsftError) as caught:
        scan(path, "alpaca")
    found = [(problem.kind, problem.where.line) for problem in caught.value.problems]
    assert found == [("bad-row", 2), ("data-syntax", 3), ("bad-row", 5), ("data-syntax", 6), ("not-utf-8", 7)]


def test_a_file_without_a_line_of_json_is_one_problem(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("instruction,output\n" + "a,b\n" * 20)
    with pytest.raises(DsftError) as caught:
        scan(path, "alpaca")
    assert [(problem.kind, problem.where.line) for problem in caught.value.problems] == [("data-syntax", 1)]
