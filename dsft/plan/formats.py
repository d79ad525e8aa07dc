"""Row formats: each a function from a row's JSON to messages, raising RowError with what is wrong with it.

To add one: a function here, a line in FORMATS, its name in the schema.
"""

from __future__ import annotations

import difflib
import functools
import json
from typing import Any


class RowError(ValueError):
    """A row that cannot be used, and why."""


ALPACA = ("system", "instruction", "input", "output")
_ALPACA = frozenset(ALPACA)
CALLS = ("tool_calls", "function_call")
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")  # of chat APIs and chat templates
OTHER_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant", "chatgpt": "assistant"}
OTHER_FIELDS = {"system_prompt": "system", "context": "input"}
WEIGHTS = ("weight", "loss_weight", "train")


def alpaca_messages(row: Any) -> list[dict[str, str]]:
    """{instruction, input?, output, system?} as messages; an input follows its instruction on a new line."""
    if not isinstance(row, dict):
        raise RowError(f"an alpaca row is an object, and this is {_kind(row)}")
    if row.get("history"):
        raise RowError('"history" holds earlier turns, which an alpaca row cannot: write them as "messages"')
    _refuse_weight("the row", row)
    for name in row.keys() - _ALPACA:
        meant = _meant(name)
        if meant and row[name]:  # it would be left out, and nobody would see it
            raise RowError(f'"{name}" is not a field of an alpaca row: write "{meant}"')
    texts = {name: row.get(name) for name in ALPACA}
    for name in ("instruction", "output"):
        if texts[name] is None:
            raise RowError(f'an alpaca row needs "{name}"' + _present(row))
    for name, text in texts.items():
        if not isinstance(text, str | None):
            raise RowError(f'"{name}" is a string, and this is {_kind(text)}')
    user = "\n".join(text for text in (texts["instruction"], texts["input"]) if text)
    system = [{"role": "system", "content": texts["system"]}] if texts["system"] else []
    return [*system, {"role": "user", "content": user}, {"role": "assistant", "content": texts["output"]}]


def chat_messages(row: Any) -> list[dict[str, str]]:
    """{messages: [{role, content}, …]}, as the chat APIs write it. At least one turn is the assistant's."""
    if not isinstance(row, dict):
        raise RowError(f"a messages row is an object, and this is {_kind(row)}")
    _refuse_weight("the row", row)
    messages = row.get("messages")
    for name in ("tools", "functions"):
        if row.get(name):
            raise RowError(
                f'"{name}" are not passed to the chat template: the model would learn to call what it is not told of'
            )
    if not isinstance(messages, list) or not messages:
        raise RowError('a messages row needs "messages", a list of messages' + _present(row))
    for at, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise RowError(f"message {at} is an object with role and content, and this is {_kind(message)}")
        _refuse_unlearned(at, message)
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                raise RowError(f'"{name}" of message {at} is a string, and this is {_kind(message.get(name))}')
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise RowError("no message is the assistant's: there is nothing to learn")
    if "user" not in roles[: roles.index("assistant")]:
        raise RowError("the assistant speaks before the user: there is nothing it answers")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _refuse_unlearned(at: int, message: dict) -> None:
    """Refuse what a message says of itself and training would not do. Raises RowError."""
    role = message.get("role")
    if any(message.get(name) for name in CALLS):
        raise RowError(f"message {at} calls a tool, and calls are not learned: write them into its content")
    if message.get("reasoning_content"):
        raise RowError(f'"reasoning_content" of message {at} is not learned: write it into its content')
    if role == "assistant":
        _refuse_weight(f"message {at}", message)
    if isinstance(role, str) and role not in ROLES:  # whose turn it is decides what is learned
        plain = role.strip().lower()
        meant = OTHER_ROLES.get(plain) or (difflib.get_close_matches(plain, ROLES, n=1, cutoff=0.7) or [None])[0]
        raise RowError(
            f'"role" of message {at} is "{role}": ' + (f'write "{meant}"' if meant else f"known are {', '.join(ROLES)}")
        )


def _refuse_weight(what: str, said: dict) -> None:
    for name in WEIGHTS:
        if said.get(name) not in (None, 1):
            raise RowError(f'"{name}" of {what} is {json.dumps(said[name])}, and every answer is learned alike')


@functools.lru_cache(maxsize=1000)
def _meant(name: str) -> str | None:
    """The field of an alpaca row that another name means."""
    close = difflib.get_close_matches(name.lower(), ALPACA, n=1, cutoff=0.85)
    return OTHER_FIELDS.get(name.lower()) or (close[0] if close else None)


FORMATS = {"alpaca": alpaca_messages, "messages": chat_messages}


def to_messages(format: str, row: Any) -> list[dict[str, str]]:
    """`row` as messages whose text is text. Raises RowError."""
    messages = FORMATS[format](row)
    for at, message in enumerate(messages, start=1):
        try:
            message["content"].encode()
        except UnicodeEncodeError as error:
            raise RowError(f"message {at} holds half of a UTF-16 pair, which is no character") from error
    return messages


def formats_of(row: Any) -> list[str]:
    """The formats that `row` is of."""
    return [name for name in FORMATS if _fits(name, row)]


def _fits(format: str, row: Any) -> bool:
    try:
        to_messages(format, row)
    except RowError:
        return False
    return True


def _present(row: dict) -> str:
    return f"; this one has {', '.join(row)}" if row else "; this one is empty"


def _kind(value: Any) -> str:
    kinds = {list: "a list", dict: "an object", str: "a string", bool: "true or false", type(None): "not there"}
    return kinds.get(type(value), "a number")
