"""Find prose that is hard to read: private vocabulary, long sentences, and errors without the value that was passed.

``python -m tests.language [PATH ...]`` prints what it finds in these files, or in all files of the project.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_WORDS = 30
PRIVATE_WORDS = {
    r"said|says|told|tells": "use reported, specified, logged",
    r"stands?(?! for\b)|standing|stood": "use is, has, contains",
    r"goes with|go with": "use works with",
    r"behind|beside": "use after, next to, in addition to",
    r"alike": "use identical, the same",
    r"somebody|nobody|anybody|whoever|everybody": "use you, the user, or rewrite",
    r"twins?": "use reduced model",
    r"proven|proofs?|proves": "use validated, validation",
    r"stretch(?:es)?": "use slice, chunk, range",
    r"comes? apart|came apart": "use diverge",
    r"at the (?:most|least)": "use at most, at least",
    r"to the bit": "use bitwise equal",
    r"mend(?:s|ed)?": "use fix",
    r"meanwhile": "rewrite",
    r"(?:in|out)side of": "use inside, outside",
    r"also (?:if|when|while|in the middle)": "use even if, even when, including",
    r"(?:use|set|pass|write|take) for example": "put `for example` before the verb or before the example",
    r"supported (?:is|are) (?:an?|the|only)": "start with the subject: the supported types are",
    r"(?:the|an?|one|each|every|first|last|its|own|two|all) (?:for|back)wards?(?=[.,;:)]|$| (?:of|that|which|is)\b)": (
        "use forward pass, backward pass, or `forward` for the method"
    ),
    r"linears": "use linear layers",
    r"(?<!output )attentions(?! of all layers| or router)": "use attention modules",
    r"train mode": "use training mode",
    r"all ranks call (?:it|this|them)": "use all ranks must call",
    r"(?<=; )None (?:if|for|without|unless)": "use a comma: or None if",
}
BAD_STARTS = re.compile(r"(?:What|Who|Whoever|Whose|Of|That|Where|Nothing|Nobody|It|They|Its|Their)\b")
NO_IMPERATIVE = re.compile(r"(?:Whether|Context (?:that|in which))\b")
"""Starts of a summary line of a function that is no property; of a property, they are fine."""
UNCLEAR_STARTS = re.compile(
    r"(?:It|They|Its|Their|Both|Neither)\b|"
    r"The following (?:are|raise|work)\b|"
    r"(?:This|These) (?:is|are|was|were|has|have|can|cannot|does|do|works?|needs?|takes?|writes?|raises?|applies)\b"
)
"""Starts of a paragraph that refer to an earlier paragraph, table or code block."""
CONTINUED = re.compile(r"(?!(?:accelerate|safetensors|timm|torch|transformers)\b)[a-z]+ |`python [^`]*`: ")
"""Starts of a paragraph that is not a sentence, or that continues a sentence across a code block."""
MAX_PAGE_WORDS = 2500
GENERATED_PAGE = "This page is generated from the code"
GENERATED_TABLE = re.compile(r"<!-- \w+ \w+ -->.*?<!-- end -->", re.DOTALL)
TEXT_CALLS = {"echo", "print", "warn", "info", "warning", "error", "log"}
TEXT_KEYWORDS = {"help", "rule", "remedy", "text", "message", "epilog", "description"}
ERRORS = re.compile(r"(?:\w*Error|\w*Warning)$")
VALUE_NEEDED = re.compile(r"\b\w+=(?![\w'\"\[(*.])|\bmust be\b|\bis not one of\b|\bUnknown\b")


@dataclass(frozen=True)
class Finding:
    path: Path
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.kind}: {self.text}"


@dataclass(frozen=True)
class Text:
    """A piece of prose, with the kind of place it comes from."""

    line: int
    place: str
    text: str


def _literal(node: ast.expr) -> str | None:
    """The text of a string, an f-string (values as ``{}``) or a sum of both."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _literal(node.left), _literal(node.right)
        return None if left is None and right is None else (left or "{}") + (right or "{}")
    return None


def texts_in_python(source: str) -> Iterator[Text]:
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if doc := ast.get_docstring(node):
                docstrings.add(node.body[0].lineno)
                is_action = isinstance(node, ast.FunctionDef) and not any(
                    re.search(r"property|setter", ast.unparse(decorator)) for decorator in node.decorator_list
                )
                yield Text(node.body[0].lineno, "action" if is_action else "docstring", doc)
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield Text(node.lineno, "test name", node.name.replace("_", " "))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = getattr(node.exc.func, "id", getattr(node.exc.func, "attr", ""))
            parts = [_literal(arg) for arg in [*node.exc.args, *(k.value for k in node.exc.keywords)]]
            if ERRORS.match(name) and any(parts):
                yield Text(node.lineno, "error", "\n".join(part.rstrip(".") + "." for part in parts if part))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            if node.lineno not in docstrings:
                yield Text(node.lineno, "comment", node.value.value)
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if ERRORS.match(name) and any(keyword.arg == "remedy" for keyword in node.keywords):
                asked = [*node.args[:1], *(k.value for k in node.keywords if k.arg in ("rule", "remedy"))]
                yield from (Text(part.lineno, "part", text) for part in asked if (text := _literal(part)))
            if name in TEXT_CALLS:
                yield from (Text(arg.lineno, "text", text) for arg in node.args if (text := _literal(arg)))
            for keyword in node.keywords:
                if keyword.arg in TEXT_KEYWORDS and (text := _literal(keyword.value)):
                    yield Text(keyword.value.lineno, "text", text)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(
            ("# noqa", "# type:", "#!", "# fmt", "# ---")
        ):
            yield Text(token.start[0], "comment", token.string.lstrip("# "))


def texts_in_markdown(source: str) -> Iterator[Text]:
    source = re.sub(r"```.*?```", lambda found: "\n" * found[0].count("\n"), source, flags=re.DOTALL)
    line = 1
    for paragraph in re.split(r"(\n\s*\n)", source):
        if paragraph.strip():
            for row in paragraph.split("\n") if paragraph.lstrip().startswith("|") else [paragraph]:
                yield Text(line, "page", re.sub(r"\]\([^)]*\)", "]", row))
        line += paragraph.count("\n")


def sentences(text: str) -> Iterator[str]:
    """The sentences of a text; items of lists, rows of tables and sections of docstrings are sentences of their own."""
    text = re.sub(r"^.*\S {2,}\S.*$|^ *\w+ +-> .*$", "", text, flags=re.MULTILINE)  # columns of a table or a diagram
    text = re.sub(r"\b(e\.g|i\.e|et al|vs|cf)\.", r"\1", text)
    for block in re.split(r"\n\s*\n|\n\s*(?=[-*] |\d\. |\w+: |\w+\(|\|)|\|", text):
        yield from re.split(r"(?<=[.!?:])[)\"'*]*\s+|;\s", " ".join(block.split()))


def _check_page(shown: Path, source: str) -> Iterator[Finding]:
    """Find long pages, and paragraphs that are unclear without the text before them."""
    if (words := len(GENERATED_TABLE.sub("", source).split())) > MAX_PAGE_WORDS and GENERATED_PAGE not in source:
        yield Finding(shown, 1, "long page", f"{words} words: split or cut the page")
    for text in texts_in_markdown(source):
        start = text.text.lstrip("\n").removeprefix("**")
        if UNCLEAR_STARTS.match(start):
            yield Finding(shown, text.line, "unclear start", f"name the subject: {start[:80]}")
        elif CONTINUED.match(start):
            yield Finding(shown, text.line, "continued sentence", f"write a full sentence: {start[:80]}")


def check(path: Path) -> Iterator[Finding]:
    source = path.read_text(encoding="utf-8")
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    if path.suffix == ".md":
        yield from _check_page(shown, source)
    found = texts_in_python(source) if path.suffix == ".py" else texts_in_markdown(source)
    for text in found:
        prose = re.sub(r"``?[^`]*``?|'[^']*'|\"[^\"]*\"", "CODE", text.text)
        for words, instead in PRIVATE_WORDS.items():
            for match in re.finditer(rf"(?<![\w.-])(?:{words})(?![\w-])", prose, re.IGNORECASE):
                yield Finding(shown, text.line, "private word", f"{match[0]!r}: {instead}")
        if text.place != "test name":
            for sentence in sentences(prose):
                if (length := len(re.findall(r"[A-Za-z]{2,}|\bI\b|\ba\b", sentence))) > MAX_WORDS:
                    yield Finding(shown, text.line, "long sentence", f"{length} words: {sentence[:100]}")
        if text.place in ("action", "docstring"):
            summary = text.text.split("\n\n")[0]
            if BAD_STARTS.match(summary) or (text.place == "action" and NO_IMPERATIVE.match(summary)):
                yield Finding(shown, text.line, "summary line", summary.split("\n")[0][:100])
        if text.place == "part" and not text.text.endswith((".", "!", "?", ":", "\n", "{}")):
            yield Finding(shown, text.line, "error without a full stop", text.text[-60:])
        if text.place == "error" and "{}" not in text.text and VALUE_NEEDED.search(text.text.split("\n")[0]):
            yield Finding(shown, text.line, "error without the value", text.text.split("\n")[0][:100])


def project_files() -> list[Path]:
    folders = ["shardformer", "tests", "benchmarks", "examples"]
    python = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [*python, ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


if __name__ == "__main__":
    for each in [Path(argument).resolve() for argument in sys.argv[1:]] or project_files():
        for finding in check(each):
            print(finding)
