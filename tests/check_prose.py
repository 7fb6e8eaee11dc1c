# SPDX-License-Identifier: Apache-2.0
"""Check the English of docs, docstrings, comments, strings and names: ``check_prose.py [PATH ...]``.

Prints ``file:line: rule: text`` for each finding and exits with 1 if there is one.  Code in backticks is
skipped.  Without a path, all files of the checkout are checked.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

CALQUES = {
    r"so (?:long|often|many(?:-th)?|much)(?! (?:as|more|that)\b)(?![^.;:]* that\b)(?!\?)": "the number",
    r"(?<!there )is (?-i:none)": "'is not a ...'",
    r"anew|afresh": "'again'",
    r"(?:go|goes|going|gone|went) on(?! (?:a|the)\b)": "'continue' or 'resume'",
    r"(?:go|goes|going|gone|went) away": "'is terminated' or 'is removed'",
    r"in mid-\w+": "'during the ...'",
    r"(?:keep|keeps|kept|keeping) waiting": "'hold'",
    r"(?:some|no|any)body|whoever|(?:for|to) who": "the name of the person or part",
    r"(?:the|its|each|whose|their) begin": "'start'",
    r"oftener|for ever|to and fro": "'more often', 'forever' or 'back and forth'",
}
SENSES = {r"in vain|unheard|heard|hears|without a word|believe[sd]?": "what was observed"}
ERRORS = {r"(?<!there )is no (?!(?:longer|more|less|later|newer|slower)\b)\w+": "'is not a ...'"}
TERMS = {
    r"clerks?": "'committer'",
    r"rejoin(?:s|ed|ing)?": "'resume'",
    r"mend(?:s|ed|ing)?": "'fix'",
    r"incarnations?": "'job start', 'restart id' or 'generation'",
    r"conversations?|dialogues?": "'session' or 'client'",
    r"held (?:upload|shard)s?": "'upload record' or 'shard record'",
    r"hurr(?:y|ies|ied)": "'expedite'",
    r"untold|advance wire": "the word of docs/concepts.md",
}
CLASSES = {
    "Ask|Assembly|FlushSet|Kept|Periodic|ShardSender|Turn|Width": "the word of docs/concepts.md"
}
OPENING = re.compile(r"\W*((?:What|Who|Whoever|Where)|Of the)\s(?!.*\?\W*\Z)", re.DOTALL)
SENTENCE = re.compile(r"\S.*?(?:[.!?]['\")*_]*(?=\s+[^a-z\s])|\Z)", re.DOTALL)
CODE = re.compile(r":\w+:(?=`)|(`+)(?:(?!\1).)+\1|<!--.*?-->|\]\([^)]*\)", re.DOTALL)
BLOCK = re.compile(r"^( *)```.*?^\1```|(?<=\n\n)(?: {4}[^\n]*\n)+", re.DOTALL | re.MULTILINE)
MOST_WORDS = 40
SUFFIXES = {".c", ".conf", ".hcl", ".md", ".py", ".service", ".sh", ".tf", ".toml", ".yaml"}
EXEMPT = {"CHANGELOG.md", "tests/check_prose.py"}

Pieces = Iterator[tuple[str, int, str]]
"""Kind (doc, row, docstring, comment, string, name or class), first line and text of a passage."""


def whole_words(patterns: dict[str, str]) -> tuple[re.Pattern[str], list[str]]:
    """One pattern, in which a space also matches a line break, and what to use instead of each group."""
    groups = "|".join(f"({text})" for text in patterns).replace(" ", r"[ \n]")
    return re.compile(rf"(?<![\w./-])(?:{groups})(?![\w/])", re.IGNORECASE), list(patterns.values())


PROSE = {"doc", "row", "docstring", "comment", "string"}
CHECKS = [
    ("calque", *whole_words(CALQUES), {*PROSE, "name"}),
    ("calque", *whole_words(SENSES), PROSE),
    ("error", *whole_words(ERRORS), {"string"}),
    ("term", *whole_words(TERMS), {*PROSE, "name"}),
    ("term", *whole_words(CLASSES), {"class"}),
]


def plain(text: str) -> str:
    """The text without code, link targets and indentation; line breaks stay."""
    return re.sub(r" *\n *", "\n", re.sub(r"[ \t]+", " ", CODE.sub(blank, text)))


def blank(match: re.Match[str]) -> str:
    """A placeholder of as many lines."""
    return "X" + "\n" * match[0].count("\n")


def of_markdown(text: str) -> Pieces:
    """Headings, list items and paragraphs outside code blocks, and rows of tables."""
    text = BLOCK.sub(blank, text)
    for match in re.finditer(r"(?m)^#.*|^\|.*|^.+(?:\n(?! *(?:[-*+#|]|\d+\.)).+)*", text):
        kind = "row" if match[0].startswith("|") else "doc"
        yield kind, text.count("\n", 0, match.start()) + 1, plain(match[0])


def of_comments(comments: list[tuple[int, str]]) -> Pieces:
    """One piece for comments on successive lines."""
    for _, group in groupby(enumerate(comments), key=lambda entry: entry[1][0] - entry[0]):
        lines = [comment for _, comment in group]
        yield "comment", lines[0][0], plain("\n".join(text.lstrip("#/* ") for _, text in lines))


def of_python(text: str) -> Pieces:
    """Docstrings (of attributes as well), comments, other strings, and each name once, as words."""
    nodes = list(ast.walk(ast.parse(text)))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield (
                "docstring" if id(node) in docstrings else "string",
                node.lineno,
                plain(node.value),
            )
        elif isinstance(node, ast.ClassDef):
            yield "class", node.lineno, node.name
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    yield from of_comments(
        [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
    )
    names = {
        token.string: token.start[0] for token in reversed(tokens) if token.type == tokenize.NAME
    }
    for name, line in names.items():
        if not name.isupper():
            yield "name", line, re.sub(r"_+|(?<=[a-z])(?=[A-Z])", " ", name).strip()


def of_other(text: str) -> Pieces:
    """Comments that begin with # or, in C, with // or an asterisk."""
    found = [
        (at, re.search(r"(?:^|\s)(?:#+|//|/?\*) .*", line))
        for at, line in enumerate(text.split("\n"), 1)
    ]
    yield from of_comments([(at, match[0].strip()) for at, match in found if match])


def findings(path: str, text: str) -> Iterator[tuple[int, str, str]]:
    """Line, rule and text of each finding in a file."""
    read = of_markdown if path.endswith(".md") else of_python if path.endswith(".py") else of_other
    for kind, first, passage in read(text):
        for rule, pattern, instead, kinds in CHECKS:
            for match in pattern.finditer(passage) if kind in kinds else ():
                line = first + passage.count("\n", 0, match.start())
                found = " ".join(match[0].split())
                yield line, rule, f"'{found}': use {instead[(match.lastindex or 1) - 1]}"
        for match in SENTENCE.finditer(passage) if kind in ("doc", "docstring") else ():
            line = first + passage.count("\n", 0, match.start())
            words = re.findall(r"\S*\w\S*", match[0])
            if (opening := OPENING.match(match[0])) and (kind == "doc" or match.start() == 0):
                yield line, "opening", f"'{opening[1]} ...': begin with the thing that acts"
            if kind == "doc" and len(words) > MOST_WORDS:
                yield line, "sentence", f"{len(words)} words: {' '.join(words[:8])} ..."


def main(paths: list[str]) -> int:
    """Check these files and folders; returns the exit code."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *paths]
    names = subprocess.run(
        listing, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.splitlines()
    count = 0
    for path in map(Path, sorted(set(names) - EXEMPT)):
        if path.is_file() and (path.suffix in SUFFIXES or path.name in ("Makefile", "run")):
            for line, rule, text in sorted(findings(str(path), path.read_text(encoding="utf-8"))):
                print(f"{path}:{line}: {rule}: {text}")
                count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
