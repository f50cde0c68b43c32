"""Code lines per package, without docstrings, comments and blanks."""

import ast
import io
import pathlib
import tokenize

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
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = isinstance(node.value.value, str)
            code -= (
                set(range(node.lineno, (node.end_lineno or node.lineno) + 1)) if text else set()
            )
    return len(code), len(comments - code)


def main() -> None:
    """Prints a row per package and folder."""
    root = pathlib.Path(__file__).resolve().parents[1]
    print(f"{'':34}{'files':>6}{'raw':>8}{'code':>8}{'comments':>9}")
    for package in PACKAGES:
        folders: dict[str, list[pathlib.Path]] = {}
        for path in sorted((root / package).rglob("*.py")):
            folders.setdefault(str(path.parent.relative_to(root)), []).append(path)
        total = [0, 0, 0, 0]
        for folder, paths in folders.items():
            texts = [path.read_text() for path in paths]
            counts = [count(text) for text in texts]
            row = [
                len(paths),
                sum(len(text.splitlines()) for text in texts),
                sum(code for code, _ in counts),
                sum(comments for _, comments in counts),
            ]
            total = [a + b for a, b in zip(total, row, strict=True)]
            if package != "tests":
                print(f"  {folder:32}{row[0]:6}{row[1]:8}{row[2]:8}{row[3]:9}")
        print(f"{package:34}{total[0]:6}{total[1]:8}{total[2]:8}{total[3]:9}")


if __name__ == "__main__":
    main()
