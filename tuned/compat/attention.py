"""Derive from an attention's ``forward`` one that computes the norms of queries and keys together with the rotation.

The derived function is made in memory, from the syntax tree of the installed library. It differs in three places. At
its start it asks once whether this call is to be fused. If so, the calls of the two norms give back their argument, and
the call of ``apply_rotary_pos_emb`` goes to our function, with the module. A call that is not to be fused does what the
original does.

A function is derived only if its text shows that each norm is called once, that the norm's result reaches the rotation
through reshapes alone, and that nothing else reads that result. If the norms or the rotation are under an ``if``, a
call is fused only if all these conditions hold; the conditions may read nothing but attributes of the module and
arguments.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import linecache
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

READY, FUSED, NORMS = "_tuned_ready", "_tuned_fused", "_tuned_norms"  # names in the derived function
_OURS = (READY, FUSED, NORMS)
_RESHAPES = ("view", "reshape", "transpose", "contiguous")
_SEEN = ("shape", "device", "ndim", "size", "dim")  # attributes of a tensor that a norm does not change
_PURE = (ast.BoolOp, ast.boolop, ast.UnaryOp, ast.Not, ast.Compare, ast.cmpop, ast.Constant, ast.Load)


class UnfitError(Exception):
    """A forward cannot be derived; the message says why. It never leaves this module."""


@dataclass(frozen=True)
class Derived:
    """What ``derive`` made of a forward."""

    q_norm: str  # the attributes of the module that are the norms
    k_norm: str
    turned: bool  # [b, s, h, d] becomes [b, h, s, d] between norms and rotation, which takes (q, k, cos, sin) alone
    make: Callable[[Callable[..., Any], Callable[..., Any]], Callable[..., Any]]  # (ready, fused) -> derived function


def derive(forward: Any, rotary: str) -> Derived | str:
    """The forward with norms and rotation in one launch, or why none can be derived.

    Args:
        forward: the function in the class's namespace.
        rotary: the name of the rotation in the globals of ``forward``.

    Returns:
        A Derived, whose ``make(ready, fused)`` gives the function. ``ready(module, rotation)`` returns the norms or
        None; ``fused(norms, module, rotation, q, k, ...)`` computes norms and rotation. Or the reason, a string.
    """
    try:
        function = _parsed(forward)
        where = _found(function, rotary)
    except UnfitError as error:
        return str(error)
    derived = ast.fix_missing_locations(_rewritten(function, where, rotary))
    code = compile(derived, forward.__code__.co_filename, "exec", dont_inherit=True)
    of_q, of_k = where.norms
    four = 4  # q, k, cos, sin
    turned = of_q.turned and of_k.turned and len(where.rotation.args) == four and not where.rotation.keywords
    return Derived(of_q.name, of_k.name, turned, functools.partial(_made, code, forward))


@dataclass(frozen=True)
class _Norm:
    """The call of a norm."""

    name: str  # of the module's attribute
    call: ast.Call
    turned: bool  # its result is transposed an odd number of times


@dataclass(frozen=True)
class _Where:
    """What to rewrite."""

    norms: tuple[_Norm, _Norm]  # of the query and of the key
    rotation: ast.Call
    conditions: list[ast.expr]  # of the ifs around norms and rotation, in order


# From the function to its syntax tree, and back


def _parsed(forward: Any) -> ast.FunctionDef:
    """The syntax tree of a function, without annotations and defaults: ``_made`` takes those of the original function."""
    if not inspect.isfunction(forward) or hasattr(forward, "__wrapped__"):
        raise UnfitError("its forward is decorated or no plain function")
    code = forward.__code__
    if code.co_freevars:
        raise UnfitError("its forward is a closure")
    try:
        text = "".join(linecache.getlines(code.co_filename, forward.__globals__))
        tree = ast.parse(text)
        whole = compile(text, code.co_filename, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        raise UnfitError("the source of its forward cannot be read") from None
    # The whole file is compiled, because a call's bytecode depends on what the file imports.
    if not any(one == code for one in _codes(whole)):
        raise UnfitError("its forward is not what its source says")
    at = (code.co_name, code.co_firstlineno)
    found = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and (one.name, one.lineno) == at]
    if len(found) != 1 or found[0].decorator_list:
        raise UnfitError("its forward is decorated or no plain function")
    (definition,) = found
    definition.returns = None
    arguments = definition.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if argument is not None:
            argument.annotation = None
    arguments.defaults, arguments.kw_defaults = [], [None] * len(arguments.kwonlyargs)
    return definition


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and all code objects inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _in_factory(definition: ast.FunctionDef) -> ast.Module:
    """A module with a factory: a function that takes ``ready`` and ``fused``, and returns the derived function."""
    arguments = ast.arguments(
        posonlyargs=[], args=[ast.arg(READY), ast.arg(FUSED)], kwonlyargs=[], kw_defaults=[], defaults=[]
    )
    inner: list[ast.stmt] = [definition, ast.Return(ast.Name(definition.name, ast.Load()))]
    outer = ast.FunctionDef(name="factory", args=arguments, body=inner, decorator_list=[])
    if "type_params" in ast.FunctionDef._fields:  # from Python 3.12 on
        outer.type_params = []  # type: ignore[attr-defined, unused-ignore]
    ast.copy_location(outer, definition)
    return ast.Module(body=[outer], type_ignores=[])


def _made(code: types.CodeType, forward: Any, ready: Callable[..., Any], fused: Callable[..., Any]) -> Any:
    """The derived function, with the globals, the defaults and the names of the original."""
    names: dict[str, Any] = {}
    exec(code, forward.__globals__, names)  # noqa: S102 - the library's own code, which the process runs anyway
    made = names["factory"](ready, fused)
    qualified = {"co_qualname": forward.__qualname__} if hasattr(forward.__code__, "co_qualname") else {}
    made.__code__ = made.__code__.replace(**qualified)  # for profilers and tracebacks
    made.__defaults__, made.__kwdefaults__ = forward.__defaults__, forward.__kwdefaults__
    return functools.update_wrapper(made, forward)


# What flows where


def _found(function: ast.FunctionDef, rotary: str) -> _Where:
    """The norms whose results flow into the only rotation of a forward."""
    nodes = list(ast.walk(function))
    if any(isinstance(node, ast.Name) and node.id in (*_OURS, function.name) for node in nodes):
        raise UnfitError("its forward uses a name that means something else in the derived one")
    private = (n.id if isinstance(n, ast.Name) else n.attr for n in nodes if isinstance(n, (ast.Name, ast.Attribute)))
    if any(name.startswith("__") and not name.endswith("__") for name in private):
        raise UnfitError("its forward uses private names, which mean something else outside of the class")
    uses = [node for node in nodes if isinstance(node, ast.Name) and node.id == rotary]
    calls = [node for node in nodes if isinstance(node, ast.Call) and node.func in uses]
    if len(uses) != 1 or len(calls) != 1:
        raise UnfitError(f"its forward does not call {rotary} exactly once")
    (rotation,) = calls
    path, conditions = _path_to(function.body, rotation)
    statement = path[-1]
    q, k = _rotated(statement, rotation)
    if any(
        isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom, ast.Await)) for one in path for node in ast.walk(one)
    ):
        raise UnfitError("it may return before it rotates")
    of_q, of_q_conditions = _norm_of(q, path[:-1])
    of_k, of_k_conditions = _norm_of(k, path[:-1])
    module = function.args.args[0].arg if function.args.args else ""
    for norm in (of_q, of_k):
        if _text(norm.call.func) != f"{module}.{norm.name}":
            raise UnfitError(f"{_text(norm.call.func)} is none of its modules")
        if _mentions(nodes, module, norm.name) != 1:
            raise UnfitError(f"its {norm.name} is used more than once")
    if of_q.name == of_k.name:
        raise UnfitError(f"{of_q.name} is of the query and the key")
    stored = (one for one in nodes if isinstance(one, ast.Attribute) and not isinstance(one.ctx, ast.Load))
    if any(_text(one.value) == module for one in stored) or _stores(function, module):
        raise UnfitError("its forward sets attributes of the module")
    _refuse_writes(path[:-1])
    _refuse_later_use(function.body, rotation, {q, k} - _targets(statement))
    found = [*of_q_conditions, *(one for one in of_k_conditions if one not in of_q_conditions), *conditions]
    for condition in found:
        _refuse_impure(condition, function, module)
    return _Where((of_q, of_k), rotation, found)


def _path_to(body: Sequence[ast.stmt], call: ast.Call) -> tuple[list[ast.stmt], list[ast.expr]]:
    """The statements up to the one that contains a call, which is last, and the conditions of the ifs around it."""
    path: list[ast.stmt] = []
    for statement in body:
        if not any(node is call for node in ast.walk(statement)):
            path.append(statement)
        elif isinstance(statement, ast.If):
            condition, branch = _branch_with(statement, lambda one: any(node is call for node in ast.walk(one)))
            inner, conditions = _path_to(branch, call)
            return [*path, *inner], [condition, *conditions]
        else:
            return [*path, statement], []
    raise UnfitError("its rotation is in no statement of its own")


def _branch_with(statement: ast.If, holds: Callable[[ast.stmt], bool]) -> tuple[ast.expr, list[ast.stmt]]:
    """The condition and the statements of the only branch of an if that has a statement for which ``holds`` is true."""
    first, second = (any(map(holds, branch)) for branch in (statement.body, statement.orelse))
    if first == second:
        raise UnfitError("what it normalises or rotates depends on both ways of an if")
    if first:
        return statement.test, statement.body
    return ast.copy_location(ast.UnaryOp(ast.Not(), statement.test), statement.test), statement.orelse


def _rotated(statement: ast.stmt, rotation: ast.Call) -> tuple[str, str]:
    """The names of the query and the key in ``a, b = rotation(q, k, ...)``."""
    two = 2
    names = [one.id for one in rotation.args[:two] if isinstance(one, ast.Name)]
    plain = not any(isinstance(one, ast.Starred) for one in rotation.args) and all(k.arg for k in rotation.keywords)
    assigned = isinstance(statement, ast.Assign) and statement.value is rotation and len(_targets(statement)) == two
    if not (plain and assigned and len(set(names)) == two):
        raise UnfitError("its rotation is not of the form q, k = apply_rotary_pos_emb(q, k, ...)")
    others = [*rotation.args[two:], *(keyword.value for keyword in rotation.keywords)]
    if any(_uses(one, name) for one in others for name in names):
        raise UnfitError("its angles depend on the query or the key")
    return names[0], names[1]


def _targets(statement: ast.stmt) -> set[str]:
    """The names that ``a, b = ...`` or ``a = ...`` assigns; none for other statements."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return set()
    (target,) = statement.targets
    parts = target.elts if isinstance(target, ast.Tuple) else [target]
    return (
        {part.id for part in parts if isinstance(part, ast.Name)}
        if all(isinstance(p, ast.Name) for p in parts)
        else set()
    )


def _norm_of(name: str, path: Sequence[ast.stmt]) -> tuple[_Norm, list[ast.expr]]:
    """The norm whose result ``name`` holds at the end of a path, and the conditions of the ifs around the norm."""
    conditions: list[ast.expr] = []
    turned = False
    before = list(path)
    while before:
        statement = before.pop()
        if not _uses(statement, name):
            continue
        if isinstance(statement, ast.If) and _stores(statement, name):
            condition, branch = _branch_with(statement, functools.partial(_stores, name=name))
            if _uses(statement.test, name):
                raise UnfitError(f"{name} is seen between its norm and the rotation")
            conditions.insert(0, condition)
            before += branch
        elif isinstance(statement, ast.Assign) and _targets(statement) == {name} and len(statement.targets) == 1:
            base, transposed = _reshaped(statement.value, name)
            turned ^= transposed
            if isinstance(base, ast.Name) and base.id == name:
                continue
            if _is_norm_call(base):
                return _Norm(_attribute(base), base, turned), conditions
            raise UnfitError(f"what it rotates as {name} is no reshaped result of a norm")
        else:
            raise UnfitError(f"{name} is seen between its norm and the rotation")
    raise UnfitError(f"what it rotates as {name} is no reshaped result of a norm")


def _reshaped(value: ast.expr, name: str) -> tuple[ast.expr, bool]:
    """The expression under all reshapes of ``value``, and whether they transpose it."""
    transposed = False
    while (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and value.func.attr in _RESHAPES
        and not any(_uses(one, name) for one in (*value.args, *(keyword.value for keyword in value.keywords)))
    ):
        if value.func.attr == "transpose":
            if [_text(one) for one in (*value.args, *value.keywords)] != ["1", "2"]:
                raise UnfitError("between a norm and the rotation other axes than 1 and 2 are transposed")
            transposed = not transposed
        value = value.func.value
    return value, transposed


def _is_norm_call(value: ast.expr) -> TypeGuard[ast.Call]:
    """Whether an expression is ``something.name(x)``."""
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and isinstance(value.func.value, ast.Name)
        and len(value.args) == 1
        and not isinstance(value.args[0], ast.Starred)
        and not value.keywords
    )


def _attribute(call: ast.Call) -> str:
    """``name`` in a call of ``something.name``; otherwise an empty string."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _uses(node: ast.AST, name: str) -> bool:
    """Whether a name is read, set or deleted in a node, other than to read an attribute in ``_SEEN``."""
    shapes = {
        id(one.value)
        for one in ast.walk(node)
        if isinstance(one, ast.Attribute) and one.attr in _SEEN and isinstance(one.ctx, ast.Load)
    }
    return any(isinstance(one, ast.Name) and one.id == name and id(one) not in shapes for one in ast.walk(node))


def _stores(node: ast.AST, name: str) -> bool:
    return any(
        isinstance(one, ast.Name) and one.id == name and not isinstance(one.ctx, ast.Load) for one in ast.walk(node)
    )


def _refuse_writes(path: Sequence[ast.stmt]) -> None:
    """Refuse writes in place: a norm that is computed later must read the values that it would have read."""
    for node in (node for statement in path for node in ast.walk(statement)):
        method = _attribute(node) if isinstance(node, ast.Call) else ""
        item = isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
        if item or isinstance(node, ast.AugAssign) or (method.endswith("_") and not method.endswith("__")):
            raise UnfitError("its forward writes in place before it rotates")


def _refuse_later_use(body: Sequence[ast.stmt], rotation: ast.Call, names: set[str]) -> None:
    """Refuse a forward that reads the tensors to be normalised after the rotation."""
    after = False
    for statement in _in_order(body):
        if any(node is rotation for node in ast.walk(statement)):
            after = True
        elif after and any(_uses(statement, name) for name in names):
            raise UnfitError("what was normalised is used again after the rotation")


def _in_order(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements in the order of the text; an if is replaced by its condition and the statements of its branches."""
    for statement in body:
        if isinstance(statement, ast.If):
            yield ast.copy_location(ast.Expr(statement.test), statement)
            yield from _in_order(statement.body)
            yield from _in_order(statement.orelse)
        else:
            yield statement


def _refuse_impure(condition: ast.expr, function: ast.FunctionDef, module: str) -> None:
    """A condition is evaluated at the start as well, so it may only read what does not change up to its own place."""
    arguments = {one.arg for one in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)}
    kept = {name for name in arguments if not _stores(function, name)}
    compared = {
        id(one)
        for node in ast.walk(condition)
        if isinstance(node, ast.Compare) and all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops)
        for one in (node.left, *node.comparators)
    }
    for node in ast.walk(condition):
        if isinstance(node, ast.Name):
            if node.id == module or (node.id in kept and id(node) in compared):
                continue
        elif isinstance(node, ast.Attribute):
            if _text(node).split(".")[0] == module:
                continue
        elif isinstance(node, _PURE):
            continue
        raise UnfitError("a condition of its norm or its rotation reads more than attributes of the module")


def _mentions(nodes: Sequence[ast.AST], module: str, name: str) -> int:
    return sum(isinstance(node, ast.Attribute) and _text(node) == f"{module}.{name}" for node in nodes)


def _text(node: ast.AST) -> str:
    return ast.unparse(node)


# The three places


def _rewritten(function: ast.FunctionDef, where: _Where, rotary: str) -> ast.Module:
    """The factory of the derived function."""
    module = function.args.args[0].arg
    asked: ast.expr = _called(READY, _read(module), _read(rotary))
    if where.conditions:
        test = where.conditions[0] if len(where.conditions) == 1 else ast.BoolOp(ast.And(), where.conditions)
        asked = ast.IfExp(copy.deepcopy(test), asked, ast.Constant(None))
    start = ast.Assign(targets=[ast.Name(NORMS, ast.Store())], value=asked)
    rewritten = _Rewriter(where, module).visit(function)
    documented = ast.get_docstring(function, clean=False) is not None
    rewritten.body.insert(1 if documented else 0, ast.copy_location(start, function))
    return _in_factory(rewritten)


class _Rewriter(ast.NodeTransformer):
    """Makes the two norms and the rotation depend on whether the call is fused."""

    def __init__(self, where: _Where, module: str) -> None:
        self._where, self._module = where, module

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """The call, or the conditional expression that replaces it."""
        if node is self._where.rotation:
            given = [_read(NORMS), _read(self._module), node.func, *node.args]
            ours = ast.Call(ast.Name(FUSED, ast.Load()), given, node.keywords)
        elif any(node is norm.call for norm in self._where.norms):
            ours = node.args[0]  # type: ignore[assignment]
        else:
            self.generic_visit(node)
            return node
        unfused = ast.Compare(_read(NORMS), [ast.Is()], [ast.Constant(None)])
        return ast.copy_location(ast.IfExp(unfused, node, copy.deepcopy(ours)), node)


def _read(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _called(name: str, *given: ast.expr) -> ast.Call:
    return ast.Call(_read(name), list(given), [])
