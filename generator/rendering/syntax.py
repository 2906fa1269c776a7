"""The digest of a kernel's text, the same for every Python from 3.10 on. It needs only the standard library."""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from collections.abc import Iterator

# Several targets of an assignment or a loop: ast.unparse of Python 3.10 puts them in parentheses, later versions do
# not.
TARGETS = re.compile(r"^( *(?:for )?)\((.*?)\)( = | in )", re.MULTILINE)


def _documented(node: ast.AST) -> Iterator[ast.Module | ast.FunctionDef]:
    """The module and its functions. Expressions, most of a tree, are skipped: they hold no functions."""
    if isinstance(node, ast.Module | ast.FunctionDef):
        yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            yield from _documented(child)


def digest(source: str) -> str:
    """Twelve hexadecimal digits of the SHA-256 of the syntax tree, without docstrings, comments or layout."""
    tree = ast.parse(source)
    for node in _documented(tree):
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    # Not ast.dump: its text changes between Python versions (3.13 leaves empty fields out).
    text = ast.unparse(tree)
    if sys.version_info < (3, 11):
        text = TARGETS.sub(r"\1\2\3", text)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
