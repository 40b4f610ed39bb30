"""The Python blocks of README.md and docs/guide.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent
PAGES = [page for page in (SOURCE / "README.md", SOURCE / "docs" / "guide.md") if page.exists()]
BLOCK = re.compile(r"^(?P<skip><!-- not run: .* -->\n)?```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = {
    f"{page.name}:{text.count(chr(10), 0, found.start()) + 1}": (found["code"], found["skip"])
    for page in PAGES
    for text in [page.read_text(encoding="utf-8")]
    for found in BLOCK.finditer(text)
}

pytestmark = pytest.mark.skipif(not PAGES, reason="the tests run apart from the sources")


@pytest.mark.parametrize("name", BLOCKS)
def test_block(name: str) -> None:
    code, skip = BLOCKS[name]
    program = compile(code, name, "exec")
    if skip:
        pytest.skip(skip.strip("<>!- \n"))
    exec(program, {"__name__": "block"})


def test_links() -> None:
    """The guide's table of contents names its headings."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        anchors = {
            re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        }
        assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= anchors
        for path in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
            assert (page.parent / path).exists(), path
