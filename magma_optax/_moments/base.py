"""Which leaves of a base optimizer's state are EMAs of the raw gradient.

The type of a state does not tell: ADOPT keeps a preconditioned average in the `ScaleByAdamState`
in which Adam keeps mu. So the base's own update is traced and read: a state leaf counts if its new
value is a * old + b * g, for the gradient g of one parameter and numbers 0 < a < 1 and b > 0. What
only a running program knows of a and b is taken to be so, as far as their signs allow.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.tree_util import GetAttrKey

from magma_optax._blocks.paths import NamedTree


class _Number(NamedTuple):
    """A number, or an array filled with it; ``value`` is None if only a running program knows it.

    ``steady`` means that it depends on nothing but constants, hyperparameters and this step's
    gradient (clipping): an average weighted by a learned step size is no EMA of the raw gradient.
    ``presumed`` is the sign of a value that is not known, 0 if anything is possible.
    Hyperparameters are taken to be positive, and so are differences such as 1 - b1.
    """

    value: float | None
    steady: bool
    presumed: int = 1

    @property
    def sign(self) -> int:
        return self.presumed if self.value is None else (self.value > 0) - (self.value < 0)


class _Linear(NamedTuple):
    """A sum of inputs times numbers; states have indices from 0 up, gradients from -1 down."""

    terms: dict[int, _Number]

    @property
    def steady(self) -> bool:
        return all(index < 0 for index in self.terms)


class _Other(NamedTuple):
    """Any other array."""

    steady: bool


class Ema(NamedTuple):
    """Where a base keeps the EMA of one gradient: new = a * old + b * g.

    Attributes:
      place: where it is in the base's state, as in `leaves_by_place`.
      numbers: (a, b), or None if only a running program knows them.
    """

    place: str
    numbers: tuple[float, float] | None


_Value = _Number | _Linear | _Other
_CALLS = frozenset("jit pjit closed_call remat2 checkpoint custom_jvp_call custom_vjp_call".split())
_IDENTITIES = {"convert_element_type", "copy", "copy_p", "reduce_precision", "sharding_constraint"}
_MINUS_ONE = _Number(-1.0, True)


def leaves_by_place(state: Any) -> dict[str, Any]:
    """Return the leaves of a state by where they are in it: ``[0].mu['w']``."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


class FirstMoments:
    """Finds the EMA of each parameter's gradient in a base's state; reads each tree but once."""

    def __init__(self, update: Callable[..., Any]) -> None:
        self._update = update
        self._found: dict[Any, dict[str, Ema]] = {}

    def __reduce__(self) -> Any:
        """Pickle without what was found: not every tree definition can be."""
        return FirstMoments, (self._update,)

    def find(self, gradients: Any, state: Any) -> dict[str, Ema]:
        """Return where ``state`` keeps the EMA of each parameter's gradient.

        Args:
          gradients: a tree of arrays shaped like the parameters.
          state: the base's state.

        Returns:
          By the path of the parameter, for those parameters that have an EMA. Empty if the update
          wants extra arguments that only a real step has.
        """
        leaves, treedef = jax.tree.flatten((gradients, state))
        tree = treedef, tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves)
        if tree not in self._found:
            self._found[tree] = _find_emas(self._update, *tree)
        return self._found[tree]


def _find_emas(update: Callable[..., Any], treedef: Any, avals: tuple[Any, ...]) -> dict[str, Ema]:
    inputs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in avals]
    gradients, state = jax.tree.unflatten(treedef, inputs)
    try:
        closed, new = jax.make_jaxpr(lambda g, s, p: update(g, s, p)[1], return_shape=True)(
            gradients, state, gradients
        )
    except Exception:  # A fault of the base itself shows again at the real update.
        return {}
    paths = [path for path, _ in NamedTree(gradients).pairs]
    places = list(leaves_by_place(state))
    values: list[_Value] = [_Linear({~n: _Number(1.0, True)}) for n in range(len(paths))]
    values += [
        _state_input(n, path, aval)
        for n, (path, aval) in enumerate(jax.tree_util.tree_leaves_with_path(state))
    ]
    values += [_Other(False)] * len(paths)

    found: dict[str, Ema] = {}
    outputs: list[Any] = _evaluate(closed.jaxpr, closed.consts, values)
    # By place: a gradient that is None takes leaves out of the state, and moves all after them.
    for place, output in zip(leaves_by_place(new), outputs, strict=True):
        index = places.index(place) if place in places else None
        gradient = _averaged_gradient(index, output)
        if index is not None and gradient is not None:
            a, b = output.terms[index].value, output.terms[gradient].value
            numbers = None if a is None or b is None else (a, b)
            found.setdefault(paths[~gradient], Ema(place, numbers))
    return found


def _state_input(index: int, path: Sequence[Any], aval: jax.ShapeDtypeStruct) -> _Value:
    if GetAttrKey("hyperparams") in path:  # optax.inject_hyperparams: numbers that a person set
        return _Number(None, True)
    if jnp.issubdtype(aval.dtype, jnp.inexact):
        return _Linear({index: _Number(1.0, True)})
    return _Number(None, False) if aval.shape == () else _Other(False)


def _averaged_gradient(state: int | None, value: Any) -> int | None:
    """Index of the gradient whose EMA ``value`` is, continuing ``state``; None if it is none."""
    if not isinstance(value, _Linear) or len(value.terms) != 2 or state not in value.terms:
        return None
    (gradient,) = value.terms.keys() - {state}
    a, b = value.terms[state], value.terms[gradient]
    decays = a.steady and a.sign >= 0 and (a.value is None or 0 < a.value < 1)
    mixes = b.steady and b.sign > 0
    return gradient if gradient < 0 and decays and mixes else None


def _evaluate(jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[_Value]) -> list[_Value]:
    """Interpret a jaxpr over `_Value`."""
    env: dict[Any, _Value] = dict(zip(jaxpr.invars, inputs, strict=True))
    env.update({var: _constant(const) for var, const in zip(jaxpr.constvars, consts, strict=True)})

    def read(atom: Any) -> _Value:
        return _constant(atom.val) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        results = _apply(eqn, [read(atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _apply(eqn: Any, values: list[_Value]) -> list[_Value]:
    name, params = eqn.primitive.name, eqn.params
    if name in _CALLS:
        return _call(params.get("jaxpr", params.get("call_jaxpr")), values)
    if name == "cond":
        branches = [_call(branch, values[1:]) for branch in params["branches"]]
        results = [_choose(values[0], cases) for cases in zip(*branches, strict=True)]
    elif name in _IDENTITIES or (name == "integer_pow" and params["y"] == 1):
        return values
    else:
        results = [_arithmetic(name, values)] * len(eqn.outvars)
    other = _Other(all(value.steady for value in values))
    return [
        result or (_Number(None, other.steady) if var.aval.shape == () else other)
        for var, result in zip(eqn.outvars, results, strict=True)
    ]


def _arithmetic(name: str, values: list[_Value]) -> _Value | None:
    """The result of an operation that keeps numbers or linear sums; None for all others."""
    match name, values:
        case "broadcast_in_dim" | "reshape", [_Number() as x, *_]:
            return x
        case "neg", [x]:
            return _times(x, _MINUS_ONE)
        case "mul", [_Number() as x, y]:
            return _times(y, x)
        case "mul", [x, _Number() as y]:
            return _times(x, y)
        case "div", [x, _Number() as y]:
            inverse = y._replace(value=1 / y.value) if y.value else _Number(None, y.steady, y.sign)
            return _times(x, inverse)
        case "add" | "add_any", [x, y]:
            return _plus(x, y)
        case "sub", [x, y]:
            return _plus(x, _times(y, _MINUS_ONE))
        case "select_n", [index, *cases]:
            return _choose(index, cases)
    return None


def _call(jaxpr: Any, values: list[_Value]) -> list[_Value]:
    if isinstance(jaxpr, ClosedJaxpr):
        return _evaluate(jaxpr.jaxpr, jaxpr.consts, values)
    return _evaluate(jaxpr, (), values)


def _constant(value: Any) -> _Value:
    if jnp.shape(value) != ():
        return _Other(True)
    if isinstance(value, Tracer) or jnp.iscomplexobj(value):  # a hyperparameter under vmap or grad
        return _Number(None, True, 0)
    try:
        return _Number(float(value), True)
    except TypeError:  # A typed key, a reference or a float0: no number.
        return _Other(False)


def _fold(op: Callable[[float, float], float], x: _Number, y: _Number, presumed: int) -> _Number:
    steady = x.steady and y.steady
    if x.value is None or y.value is None:
        return _Number(None, steady, presumed)
    return _Number(op(x.value, y.value), steady)


def _times(x: _Value | None, y: _Number) -> Any:
    match x:
        case _Number():
            return _fold(operator.mul, x, y, x.sign * y.sign)
        case _Linear():
            return _Linear({index: _times(factor, y) for index, factor in x.terms.items()})
    return None


def _plus(x: _Value | None, y: _Value | None) -> Any:
    match x, y:
        case _Number(), _Number():
            return _fold(operator.add, x, y, x.sign if x.sign == y.sign else 1)
        case _Linear(), _Linear():
            shared = x.terms.keys() & y.terms.keys()
            both = {index: _plus(x.terms[index], y.terms[index]) for index in shared}
            return _Linear({**x.terms, **y.terms, **both})
        case (_Linear() as linear, _Number(value=0.0)) | (_Number(value=0.0), _Linear() as linear):
            return linear
    return None


def _choose(index: _Value, cases: Sequence[_Value]) -> _Value | None:
    """One of ``cases``: a step that may be skipped or a gradient that may be clipped is linear."""
    if all(case == cases[0] for case in cases):
        return cases[0]
    if not isinstance(index, _Number):
        return None
    if all(isinstance(case, _Number) for case in cases):
        return _either([case for case in cases if isinstance(case, _Number)], index.steady)
    if not all(isinstance(case, _Linear) for case in cases):
        return None
    terms = [case.terms for case in cases if isinstance(case, _Linear)]
    return _Linear(
        {
            index: _either([term[index] for term in terms if index in term], True)
            for index in set().union(*terms)
        }
    )


def _either(cases: Sequence[_Number], steady: bool) -> _Number:
    signs = {case.sign for case in cases}
    sign = signs.pop() if len(signs) == 1 else 0
    return _Number(None, steady and all(case.steady for case in cases), sign)
