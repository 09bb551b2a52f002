"""Constant Python expressions of foreign configs, evaluated without running anything."""

import ast
import operator
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final

_LARGEST: Final = 10**18
_LARGEST_IN_POWER: Final = 64
_MOST_PARTS: Final = 10_000
"""Limit on the elements of a list or dict, including nested ones; a larger one stays source text."""
_OPERATORS: Final[dict[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {"int": int, "float": float, "min": min, "max": max, "round": round}


def parsed(text: str, expression: bool = False) -> ast.AST:
    """Parse foreign Python code, which may be invalid or too deeply nested, without Python's warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text, mode="eval" if expression else "exec")


def constant(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Evaluate numbers, names, arithmetic, lists and `dict(…)`; anything else stays source text."""
    try:
        return _value(node, names)
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return ast.unparse(node)


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Evaluate an expression; raise an error of Python's if it is not constant or its value is too large."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return names[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand, names)
        case ast.BinOp(left=left, op=op, right=right):
            sides = [_number(side, names) for side in (left, right)]
            if isinstance(op, ast.Pow) and max(map(abs, sides)) > _LARGEST_IN_POWER:
                raise ValueError
            return _limited(_OPERATORS[type(op)](*sides))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS and args:
            return _limited(_FUNCTIONS[name](*(_number(part, names) for part in args)))
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return _bounded([constant(part, names) for part in parts])
        case ast.Dict(keys=keys, values=values) if all(isinstance(key, ast.Constant) for key in keys):
            found = zip((key.value for key in keys if isinstance(key, ast.Constant)), values, strict=True)
            return _bounded({str(key): constant(value, names) for key, value in found})
        case ast.Call(func=ast.Name(id="dict"), args=[], keywords=keywords) if all(part.arg for part in keywords):
            return _bounded({str(part.arg): constant(part.value, names) for part in keywords})
        case ast.Subscript(value=container, slice=place):
            whole, key = constant(container, names), constant(place, names)
            if isinstance(whole, dict | list) and isinstance(key, str if isinstance(whole, dict) else int):
                return whole[key]  # type: ignore[index]  # the type of key goes with that of whole
    raise ValueError


def _number(node: ast.expr, names: Mapping[str, Any]) -> int | float:
    value = constant(node, names)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    raise ValueError


def _limited(result: Any) -> int | float:
    if isinstance(result, int | float) and abs(result) <= _LARGEST:
        return result
    raise ValueError


def _bounded(value: Any) -> Any:
    """Return a list or dict whose names do not expand to more than `_MOST_PARTS` elements."""
    waiting, count = [value], 0
    while waiting:
        part = waiting.pop()
        count += 1
        if count > _MOST_PARTS:
            raise ValueError
        waiting += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return value
