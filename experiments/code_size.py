"""Code lines per package, without docstrings, comments and blanks."""

import ast
import io
import pathlib
import tokenize
from collections.abc import Sequence

PACKAGES = ("doppler_jax", "kernels", "experiments", "tests")


def count(source: str) -> tuple[int, int]:
    """Returns a file's code lines, and its comments that stand on a line of their own."""
    skipped = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    code: set[int] = set()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        lines = range(token.start[0], token.end[0] + 1)
        if token.type == tokenize.COMMENT:
            comments.update(lines)
        elif token.type not in (*skipped, tokenize.ENDMARKER):
            code.update(lines)
    for node in ast.walk(ast.parse(source)):
        # A string that stands alone documents what is before it.
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            code.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(code), len(comments - code)


def measure(paths: Sequence[pathlib.Path]) -> tuple[int, ...]:
    """Returns files, raw lines, code lines and comments."""
    texts = [path.read_text() for path in paths]
    code, comments = zip(*map(count, texts), strict=True)
    return len(paths), sum(len(text.splitlines()) for text in texts), sum(code), sum(comments)


def main() -> None:
    """Prints a row per package and folder."""
    root = pathlib.Path(__file__).resolve().parents[1]
    print(f"{'':34}{'files':>8}{'raw':>8}{'code':>8}{'comments':>9}")
    for package in PACKAGES:
        paths = sorted((root / package).rglob("*.py"))
        folders = {} if package == "tests" else dict.fromkeys(path.parent for path in paths)
        parts = {
            f"  {f.relative_to(root)}": [p for p in paths if p.parent == f] for f in folders
        }
        for name, part in {**parts, package: paths}.items():
            print(f"{name:34}" + "{:8}{:8}{:8}{:9}".format(*measure(part)))


if __name__ == "__main__":
    main()
