"""Constant Python expressions of foreign configs, evaluated without running anything."""

import ast
import operator
import warnings
from collections.abc import Callable, Mapping
from typing import Any

_LARGEST = 10**18
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"int": int, "float": float, "min": min, "max": max, "round": round}


_MOST_PARTS = 10_000
"""Limit on the elements of a list or dict, including nested ones; a larger one stays source text."""


def parsed(text: str, expression: bool = False) -> ast.AST:
    """Parse foreign Python code, which may be invalid or too deeply nested, without Python's warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text, mode="eval" if expression else "exec")


def constant(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Evaluate numbers, names, arithmetic, lists and `dict(…)`; anything else stays source text."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = constant(node.operand, names)
        return -value if _is_number(value) else ast.unparse(node)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _binary(node, names)
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        keys = (key.value for key in node.keys if isinstance(key, ast.Constant))
        found = {str(key): constant(value, names) for key, value in zip(keys, node.values, strict=True)}
        return _bounded(found, node)
    if isinstance(node, ast.List | ast.Tuple):
        return _bounded([constant(part, names) for part in node.elts], node)
    if isinstance(node, ast.Subscript):
        return _part(constant(node.value, names), constant(node.slice, names), node)
    return _call(node, names) if isinstance(node, ast.Call) else ast.unparse(node)


def _call(node: ast.Call, names: Mapping[str, Any]) -> Any:
    function = node.func.id if isinstance(node.func, ast.Name) else ""
    keywords = {part.arg: part.value for part in node.keywords}
    if function == "dict" and not node.args and None not in keywords:
        return _bounded({str(key): constant(value, names) for key, value in keywords.items()}, node)
    if function in _FUNCTIONS and node.args and not keywords:
        values = [constant(part, names) for part in node.args]
        if all(_is_number(value) for value in values):
            return _applied(node, _FUNCTIONS[function], values)
    return ast.unparse(node)


def _binary(node: ast.BinOp, names: Mapping[str, Any]) -> Any:
    sides = [constant(side, names) for side in (node.left, node.right)]
    if isinstance(node.op, ast.Pow) and not all(_is_number(side) and abs(side) <= 64 for side in sides):
        return ast.unparse(node)
    if all(_is_number(side) for side in sides):
        return _applied(node, _OPERATORS[type(node.op)], sides)
    return ast.unparse(node)


def _applied(node: ast.expr, function: Callable[..., Any], values: list[Any]) -> Any:
    try:
        result = function(*values)
    except (ArithmeticError, TypeError, ValueError):
        return ast.unparse(node)
    return result if isinstance(result, int | float) and abs(result) <= _LARGEST else ast.unparse(node)


def _bounded(value: Any, node: ast.expr) -> Any:
    """Return a list or dict, or its source text if its names expand to more than `_MOST_PARTS` elements."""
    waiting, count = [value], 0
    while waiting and count <= _MOST_PARTS:
        part = waiting.pop()
        count += 1
        waiting += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return value if not waiting and count <= _MOST_PARTS else ast.unparse(node)


def _part(value: Any, key: Any, node: ast.expr) -> Any:
    if isinstance(value, dict) and isinstance(key, str) and key in value:
        return value[key]
    if isinstance(value, list) and isinstance(key, int) and -len(value) <= key < len(value):
        return value[key]
    return ast.unparse(node)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
