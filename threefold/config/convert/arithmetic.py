"""Values of expressions that are written in a file, without running the file."""

import ast
import operator
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
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"int": int, "float": float, "min": min, "max": max, "round": round}


def constant(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of numbers, names, sums, lists and `dict(…)`; what is none of these stays as it is written, as text."""
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
        return {str(key): constant(value, names) for key, value in zip(keys, node.values, strict=True)}
    if isinstance(node, ast.List | ast.Tuple):
        return [constant(part, names) for part in node.elts]
    return _call(node, names) if isinstance(node, ast.Call) else ast.unparse(node)


def _call(node: ast.Call, names: Mapping[str, Any]) -> Any:
    function = node.func.id if isinstance(node.func, ast.Name) else ""
    keywords = {part.arg: part.value for part in node.keywords}
    if function == "dict" and not node.args and None not in keywords:
        return {str(key): constant(value, names) for key, value in keywords.items()}
    if function in _FUNCTIONS and node.args and not keywords:
        values = [constant(part, names) for part in node.args]
        if all(_is_number(value) for value in values):
            return _applied(node, _FUNCTIONS[function], values)
    return ast.unparse(node)


def _binary(node: ast.BinOp, names: Mapping[str, Any]) -> Any:
    sides = [constant(side, names) for side in (node.left, node.right)]
    if all(_is_number(side) for side in sides):
        return _applied(node, _OPERATORS[type(node.op)], sides)
    return ast.unparse(node)


def _applied(node: ast.expr, function: Callable[..., Any], values: list[Any]) -> Any:
    try:
        result = function(*values)
    except (ArithmeticError, TypeError, ValueError):
        return ast.unparse(node)
    return result if abs(result) <= _LARGEST else ast.unparse(node)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
