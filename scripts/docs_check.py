#!/usr/bin/env python3
"""Checks what the documents point at: files, headings and make targets that they name must exist.

Links to other hosts are left alone, so that the answer never depends on the network.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent

FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)")
HTML_LINK = re.compile(r"""\b(?:href|src|srcset)=["']([^"']+)["']""")
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)
HTML_ANCHOR = re.compile(r"""\b(?:id|name)=["']([^"']+)["']""")
ELSEWHERE = re.compile(r"^([a-z][a-z0-9+.-]*:|//)", re.IGNORECASE)
MAKE = re.compile(r"(?:^|`|&& |\$ )make (?:\w+=\S+ )*([a-z][a-z-]*)", re.MULTILINE)
TARGET = re.compile(r"^([a-z][a-z-]*):", re.MULTILINE)


def documents(root: Path) -> list[Path]:
    """The Markdown files that a reader of the repository comes across."""
    return sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "deploy").glob("*.md")])


def slug(heading: str) -> str:
    """A heading's anchor, by the rule that repository hosts share."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def anchors(text: str) -> set[str]:
    """Every anchor of a document; a heading that comes again is numbered."""
    prose = FENCE.sub("", text)
    found = set(HTML_ANCHOR.findall(prose))
    seen: dict[str, int] = {}
    for heading in HEADING.findall(prose):
        name = slug(heading)
        count = seen.get(name, 0)
        seen[name] = count + 1
        found.add(f"{name}-{count}" if count else name)
    return found


def read_anchors(document: Path) -> set[str]:
    return anchors(document.read_text(encoding="utf-8"))


def links(text: str) -> list[str]:
    """Targets of the links in the prose, those to other hosts excepted."""
    prose = CODE.sub("``", FENCE.sub("", text))
    targets = [*LINK.findall(prose), *HTML_LINK.findall(prose)]
    return [target for target in targets if not ELSEWHERE.match(target)]


def broken_links(document: Path) -> Iterator[str]:
    for target in links(document.read_text(encoding="utf-8")):
        name, _, anchor = target.partition("#")
        path = document.parent / unquote(name) if name else document
        if not path.exists():
            yield f"{target}: no such file"
        elif anchor and path.suffix == ".md" and unquote(anchor) not in read_anchors(path):
            yield f"{target}: no such heading"


def unknown_targets(document: Path, makefile: str) -> Iterator[str]:
    text = document.read_text(encoding="utf-8")
    blocks = [block.group() for block in FENCE.finditer(text)]
    targets = set(TARGET.findall(makefile))
    for code in [*CODE.findall(FENCE.sub("", text)), *blocks]:
        for name in MAKE.findall(code):
            if name not in targets:
                yield f"make {name}: no such target"


def check(root: Path) -> list[str]:
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    return [
        f"{document.relative_to(root)}: {problem}"
        for document in documents(root)
        for problem in [*broken_links(document), *unknown_targets(document, makefile)]
    ]


def main() -> int:
    problems = check(ROOT)
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        print(f"{len(documents(ROOT))} documents: links, headings and make targets exist")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
