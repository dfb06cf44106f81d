"""Checks the English of the pages, by shared rules: short sentences, and none of the habits that readers stumble over.

    python docs/check_words.py               README.md, contributing/*.md and docs/*.md
    python docs/check_words.py --package     also the help of every command, and every message that the code can print

It prints each finding as FILE:LINE: rule: sentence. The exit code is 1 if there is one.
Generated parts of the pages are texts of the package, so they are checked with ``--package``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: A sentence has at most so many words. Code counts as one.
LONGEST = 25
#: What each pattern finds, and what to write in its place.
RULES = {
    "'if' or 'when' for a condition": r"^(Where|Wherever) (?!.*\?$)",
    "'if' or 'when' in the middle, too": r"\bwhere (there (is|are)|that is|it is not|no)\b",
    "a noun for the headless 'what'": r"^What (?!.*\?$)|[:;,] what (it|they|you|we|is|are|was|were|has|have|does)\b(?!.*\?$)",
    "a noun for the headless 'who'": r"^(Who|Whoever) (?!.*\?$)|\bwhoever\b",
    "leave out 'of its own', or 'separate'": r"\bof (its|their|your|our|my|his|her|one's) own\b",
    "'next to', 'alongside' or 'and'": r"\bbesides?\b",
    "'again'": r"\banew\b",
    "'so', or 'therefore' at the beginning of no sentence": r"\bhence\b",
    "'forever'": r"\bfor ever\b",
    "'package' or 'layer'": r"\brooms?\b",
    "'is not a'": r"\b(?<!there )(?<!There )(is|are) no (?!longer\b|more\b|faster\b|slower\b|better\b)[a-z]",
    "a sentence with a verb": r"^(Not|Nor|Neither) (where|when|if|is|are|does|do)\b",
    "'even if' or 'including'": r"\balso (where|when|if|on)\b",
    "leave out 'as everywhere'": r"\bas everywhere\b",
}
#: Sentences that may stay, by words of them, and why.
ALLOWED = {
    "A figure is the median of the trials": "a list of numbers, which a test compares with the files of the results",
}


def prose(text: str) -> Iterator[tuple[int, str]]:
    """The paragraphs, items and table cells of a page, each with its line."""
    start, lines = 0, []
    fenced = False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if re.match(r" *(```|:::)", line):
            fenced = not fenced
            line = ""
        elif fenced:
            line = ""
        bare = line.strip()
        begins = re.match(r"([-*]|\d+\.|>) +", bare)
        if (not bare or bare.startswith(("|", "#", "<", "![")) or begins) and lines:
            yield start, " ".join(lines)
            lines = []
        if bare.startswith("|"):
            for cell in re.split(r"(?<!\\)\|", bare.strip("|")):
                yield number, cell.strip()
        elif bare and not bare.startswith(("#", "<", "![")):
            if not lines:
                start = number
            lines.append(bare[begins.end() :] if begins else bare)


def plain(text: str) -> str:
    """The words that a reader sees: a link's text, and code as one word."""
    text = re.sub(r"``.*?``|`[^`]*`", "code", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"[*\\]+|&shy;", "", text)


def sentences(text: str) -> list[str]:
    """The sentences of a paragraph."""
    return re.split(r"(?<!e\.g\.)(?<!i\.e\.)(?<=[.!?])[)\"']* +", plain(text))


def findings(text: str, *, long: bool = True) -> Iterator[tuple[int, str, str]]:
    """Line, rule and sentence of each place that is against a rule."""
    for line, paragraph in prose(text):
        for sentence in sentences(paragraph):
            if any(words in sentence for words in ALLOWED):
                continue
            words = re.findall(r"[\w'’.-]*\w[\w'’.-]*", sentence)
            if long and len(words) > LONGEST:
                yield line, f"{len(words)} words", sentence
            if len(words) < 3:
                continue
            for rule, pattern in RULES.items():
                if re.search(pattern, sentence):
                    yield line, rule, sentence


GENERATED = re.compile(r"<!-- made by .*?<!-- end -->", re.DOTALL)


def without_generated(text: str) -> str:
    """The hand-written part, with the same lines."""
    if text.startswith("<!-- made by"):
        return ""
    return GENERATED.sub(lambda found: "\n" * found.group().count("\n"), text)


def of_the_package() -> Iterator[tuple[str, str]]:
    """The help of each command and the messages, each with its place."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "pure")]
    from test_messages import messages

    from dask_gpu_mpi.cli.main import cli

    for name, command in {"dask-gpu-mpi": cli, **cli.commands}.items():
        for text in [command.help, *(getattr(each, "help", None) for each in command.params)]:
            if text:
                yield f"{name} --help", re.sub(r"\s*\n\s*", " ", text.replace("\b", ""))
    for message in messages():
        yield "message", message.whole.replace("{}", "X")


def main() -> int:
    """Print what is found."""
    found = []
    package = "--package" in sys.argv[1:]
    for page in [
        ROOT / "README.md",
        *sorted((ROOT / "contributing").glob("*.md")),
        *sorted((ROOT / "docs").glob("*.md")),
    ]:
        text = page.read_text(encoding="utf-8")
        for line, rule, sentence in findings(text if package else without_generated(text)):
            found.append(f"{page.relative_to(ROOT)}:{line}: {rule}: {sentence}")
    if package:
        for place, text in dict.fromkeys(of_the_package()):
            for _, rule, sentence in findings(text, long=place.endswith("--help")):
                found.append(f"{place}: {rule}: {sentence}")
    print("\n".join(found))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
