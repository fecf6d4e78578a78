"""Measure the prose of sources and pages: the share of sentences that show a pattern, in percent.

`python tests/prose.py [PATHS] [--worst N] [--row NAME]` reads docstrings, comments and messages of every Python file, and
the sentences of every Markdown page under the paths (by default the sources of all packages and plugins). It prints one
row for each pattern and lists the N sentences with the most patterns. `--row` lists every sentence that shows one
pattern.

A limit is twice the upper end of the range in STYLE.md, which optax, torchft, torchtitan, Lightning Fabric and hydra show.
The limit for colons is stricter, because this program counts fewer of them: 1 to 6 % in torchft, Fabric, pluggy and nox.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

OPENERS = r"what|whatever|whether|who|whose|whoever|where|how|which"
PASSIVE = r"(?:is|are|was|were|be|been|being|has|have|had|not|also|then|only|once|still|both|already|never|it|them|,|^)"
ROWS = {  # name: (pattern, the highest share allowed in percent, the range measured elsewhere)
    "what": (r"\bwhat\b(?![^.]*\?$)", 1.0, "0-0.5"),
    "opener": (rf"^(?:{OPENERS})\b(?!.*\?$)", 0.4, "0-0.2"),
    "colon": (r"", 12.0, "1-6"),
    "who": (r"\b(?:who|whom|whose|whoever|nobody|somebody|someone|anybody)\b", 1.6, "0.2-0.8"),
    "passive": (rf"(?:{PASSIVE})\s+(?:\w+ly\s+)?(?:told|kept|held|given|left)\b", 1.2, "0.1-0.6"),
    "word": (r"\b(?:anew|alike|of its own|at present|beside|mended|dearer)\b", 0.2, "0-0.1"),
    "avoid": (
        r"\b(?:besides|so many|has come|goes on|as it is|whatever is|had again|theirs|a one)\b",
        0.2,
        "not measured",
    ),
    "long": (r"", 10.0, "not measured"),
}
WORDS_ALLOWED = 25  # per sentence
CLAUSE_WORDS = 3  # a colon joins two clauses if at least this many words stand on both sides
CALLS_WITH_MESSAGES = {"print", "warn", "warning", "info", "debug", "error", "exception", "log", "echo"}
HEADINGS = re.compile(
    r"^(Args|Arguments|Returns|Return|Yields|Raises|Example|Examples|Note|Notes|Attributes|Source)s?:$"
)
FIELD = re.compile(r"^\*{0,2}[\w.`]+(?: \([^)]*\))?:\s+")


class Sentence(NamedTuple):
    """One sentence of prose and the line where its text starts."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"

    @property
    def patterns(self) -> list[str]:
        return [name for name in ROWS if shows(name, self.text)]


def shows(row: str, text: str) -> bool:
    """True if a sentence shows the pattern of a row."""
    if row == "colon":
        return all(len(words(clause)) >= CLAUSE_WORDS for clause in text.split(": ", 1)) and ": " in text
    if row == "long":
        return len(words(text)) > WORDS_ALLOWED
    return re.search(ROWS[row][0], text, re.IGNORECASE) is not None


def words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z][\w'-]*", text)


def sentences(path: Path) -> list[Sentence]:
    """Return the sentences of a page, or of a program: docstrings, comments, and texts that a user reads."""
    source = path.read_text()
    found = []
    texts = [*markdown(source)] if path.suffix == ".md" else [*docstrings(source), *comments(source), *messages(source)]
    for line, text in texts:
        for part in paragraphs(text):
            found += [Sentence(path, line, sentence) for sentence in split(part)]
    return found


def markdown(source: str) -> Iterator[tuple[int, str]]:
    """Yield paragraphs and list items. Headings, tables, quotes of code, claim markers and targets of links are dropped."""
    block: list[str] = []
    fenced = False
    for number, raw in enumerate([*source.splitlines(), ""], 1):
        line = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"<!--.*?-->", "", raw)).strip()
        fence = line.startswith("```")
        if fence or fenced or not line or re.match(r"[|#<!:]|[-*] |\d+\. ", line) or raw.startswith("    "):
            if block:
                yield number - len(block), " ".join(block)
            block = [] if fence or fenced or not re.match(r"[-*] |\d+\. ", line) else [re.sub(r"^\S+ ", "", line)]
            fenced ^= fence
        else:
            block.append(line)


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield comments. Comments on consecutive lines of their own are one text."""
    block: list[str] = []
    start = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or re.match(r"#\s*(noqa|type:|fmt:|!|-\*-|pragma)", token.string):
            continue
        text = re.sub(r"\s*# noqa.*$", "", token.string.lstrip("#").strip())
        own_line = not token.line[: token.start[1]].strip()
        if not (own_line and block and token.start[0] == last + 1):
            if block:
                yield start, " ".join(block)
            block, start = [], token.start[0]
        block.append(text)
        last = token.start[0] if own_line else -1
    if block:
        yield start, " ".join(block)


def messages(source: str) -> Iterator[tuple[int, str]]:
    """Yield texts in `raise`, in calls that print, warn or log, and in arguments called help or description."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            values: list[ast.expr] = [*node.exc.args]
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            values = [*node.args] if name in CALLS_WITH_MESSAGES else []
            values += [k.value for k in node.keywords if k.arg in {"help", "description", "epilog"}]
        else:
            continue
        for value in values:
            text = literal(value)
            if len(words(text)) >= CLAUSE_WORDS:
                yield value.lineno, text


def literal(node: ast.expr) -> str:
    """Return the text of a string or an f-string, with `X` for every value put into it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(v.value if isinstance(v, ast.Constant) else "`X`" for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return literal(node.left) + literal(node.right)
    return ""


def paragraphs(text: str) -> list[str]:
    """Split a text at blank lines, list items and entries of `Args:`. Code blocks, tables and headings are dropped."""
    found: list[list[str]] = [[]]
    code = fenced = False
    for raw in text.splitlines():
        line = raw.strip()
        if line.startswith("```"):
            fenced = not fenced
            continue
        if line.startswith((">>>", "...")) or fenced:
            code = not fenced
            continue
        if not line or HEADINGS.match(line):
            code = False
            found.append([])
        elif not code and not line.startswith("|"):
            if re.match(r"^([-*]|\d+\.) ", line) or FIELD.match(line):
                found.append([])
                line = FIELD.sub("", re.sub(r"^([-*]|\d+\.) ", "", line))
            found[-1].append(line)
    return [" ".join(part) for part in found if part]


def split(text: str) -> list[str]:
    """Split a paragraph into sentences of at least two words. Code between backticks counts as one word."""
    text = re.sub(r"``?[^`]+``?", "`X`", text)
    parts = re.split(r"(?<=[.!?])[)\"']?\s+(?=[A-Z`\"(])", text)
    return [part.strip() for part in parts if len(words(part)) > 1]


def sources(paths: list[Path]) -> list[Path]:
    files = [path for path in paths if path.is_file()]
    for folder in paths:
        if folder.is_dir():
            inner = sorted(folder.glob("p*/*/src")) or [folder]
            files += [file for part in inner for kind in ("*.py", "*.md") for file in sorted(part.rglob(kind))]
    return files


def shares(found: list[Sentence]) -> dict[str, float]:
    """Return the share of sentences that show each pattern, in percent."""
    return {row: 100 * sum(shows(row, s.text) for s in found) / max(1, len(found)) for row in ROWS}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure the prose of sources and pages.")
    parser.add_argument("paths", nargs="*", type=Path, default=[Path(__file__).resolve().parent.parent])
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="list the N sentences with most patterns")
    parser.add_argument("--row", choices=list(ROWS), help="list every sentence that shows this pattern")
    options = parser.parse_args(arguments)
    found = [sentence for path in sources(options.paths) for sentence in sentences(path)]
    print(f"{len(found)} sentences\n{'pattern':<10} {'here %':>8} {'limit %':>8}  elsewhere %")
    measured = shares(found)
    for row, (_, limit, elsewhere) in ROWS.items():
        print(f"{row:<10} {measured[row]:>8.1f} {limit:>8.1f}  {elsewhere}")
    ranked = sorted(found, key=lambda s: (-len(s.patterns), -len(words(s.text))))
    for sentence in [s for s in ranked if s.patterns][: options.worst]:
        print(f"[{' '.join(sentence.patterns)}] {sentence}")
    for sentence in found if options.row else ():
        if shows(options.row, sentence.text):
            print(sentence)
    return 0


if __name__ == "__main__":
    sys.exit(main())
