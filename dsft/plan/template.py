"""A chat template that a recipe names, tried on a question and its answer as transformers would."""

from __future__ import annotations

import datetime
import json
from typing import Any

from jinja2 import TemplateSyntaxError
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dsft.errors import DsftError, Where, refused

QUESTION, ANSWER = "What is asked?", "What is answered."
MESSAGES = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
HELP = "a chat template is Jinja that writes each of `messages` out, its role and its content, and what ends an answer"


class _Refused(Exception):
    """The template's own refusal of a conversation, as of one without a system message."""


class _Generation(Extension):
    """`{% generation %}`, which transformers adds to Jinja."""

    tags = {"generation"}  # noqa: RUF012  as jinja2 declares it

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def check_template(text: str, path: str, where: Where) -> None:
    """Raises DsftError (not-a-chat-template) for a template with a fault in its Jinja, at its line; and, at `where` the
    recipe names it, for one that fails, or of which a model would not learn the answer or to end it."""
    if not text.strip():
        raise _wrong(where, f"the chat template {path} is empty")
    try:
        written = _environment().from_string(text).render(messages=MESSAGES, add_generation_prompt=False, **_GIVEN)
    except TemplateSyntaxError as error:
        raise _wrong(_line(text, error.lineno, path), f"the template is no Jinja: {error.message}") from None
    except _Refused:
        return
    except TemplateError as error:
        raise _wrong(where, f"the chat template {path} fails: {error}") from None
    except Exception as error:  # of an expression in the template: anything
        raise _wrong(where, f"the chat template {path} fails: {type(error).__name__}: {error}") from error
    for what, content in (("messages", QUESTION), ("assistant's messages", ANSWER)):
        if content not in written:
            raise _wrong(where, f"the chat template {path} does not write the {what}")
    if written.rstrip().endswith(ANSWER):
        raise _wrong(where, f"the chat template {path} ends an answer with nothing: the model would not learn to stop")


# What transformers hands to a template besides the messages.
_GIVEN: dict[str, Any] = {"tools": None, "documents": None, **{name: f"<{name}>" for name in SPECIAL}}


def _environment() -> ImmutableSandboxedEnvironment:
    """As in transformers.utils.chat_template_utils."""
    extensions = [_Generation, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda format: datetime.datetime.now(tz=datetime.UTC).strftime(format),
    }
    return environment


def _refuse(message: str) -> None:
    raise _Refused(message)


def _wrong(where: Where, message: str) -> DsftError:
    return refused("not-a-chat-template", message, where=where, help=HELP)


def _line(text: str, number: int, path: str) -> Where:
    lines = text.splitlines()
    line = lines[number - 1] if 0 < number <= len(lines) else ""
    code = line.strip()
    return Where.in_line(path, number, 1 + len(line) - len(line.lstrip()), line, max(1, len(code)))
