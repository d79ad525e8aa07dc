"""`dsft explain`: the pages of docs/errors.md, one for each kind of error."""

from __future__ import annotations

import difflib
import re

from dsft.errors import refused
from dsft.shipped import shipped


def load_pages() -> dict[str, str]:
    """Kind of error -> its page as Markdown without the heading, in alphabetical order."""
    text = shipped("docs/errors.md").read_text(encoding="utf-8")
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    return {kind: page.strip() for kind, _, page in (section.partition("\n") for section in sections)}


def page(kind: str) -> str:
    """The page on a kind. Raises DsftError where there is none, with the nearest name."""
    pages = load_pages()
    if kind not in pages:
        close = difflib.get_close_matches(kind, pages, n=1)
        help = f'did you mean "{close[0]}"?' if close else "dsft explain lists them all"
        raise refused("unknown-kind", f'there is no kind of error called "{kind}"', help=help)
    return f"{kind}\n\n{pages[kind]}"


def overview() -> str:
    """A line for each kind: its name, and the first sentence of its page."""
    pages = load_pages()
    width = max(map(len, pages))
    return "\n".join(f"{kind:{width}}  {_first_sentence(text)}" for kind, text in pages.items())


def _first_sentence(text: str) -> str:
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.match(r".*?\.(?= |$)|", paragraph)[0]
