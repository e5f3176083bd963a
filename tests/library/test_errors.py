"""Every refusal says which value is wrong and what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from magma_optax import attention_and_mlp, control, magma, skip_update, stacked, with_magma

PARAMS = {"layers": [{"w": jnp.ones((2, 3))}, {"w": jnp.ones((2, 3))}], "bias": jnp.ones(3)}
ADAM = optax.adam(1e-2)


def wrapped(*args, **kwargs):
    return with_magma(ADAM, *args, **kwargs)


@pytest.mark.parametrize("factory", [magma, wrapped, skip_update])
@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"survival_prob": 0.0}, ValueError, r"survival_prob must be in \(0, 1\], got 0.0"),
        ({"survival_prob": 1.5}, ValueError, r"survival_prob must be in \(0, 1\], got 1.5"),
        ({"survival_prob": float("nan")}, ValueError, r"survival_prob .* got nan"),
        ({"survival_prob": "half"}, TypeError, r"survival_prob must be .* got 'half'"),
        ({"survival_prob": None}, TypeError, r"survival_prob must be .* got None"),
        ({"survival_prob": True}, TypeError, r"survival_prob must be .* got True"),
        (
            {"survival_prob": jnp.array(True)},
            TypeError,
            r"survival_prob must be .* got Array\(True",
        ),
        ({"survival_prob": np.complex64(0.5)}, TypeError, r"survival_prob must be a number .*0.5"),
        (
            {"survival_prob": jnp.float32(3)},
            ValueError,
            r"survival_prob must be in .* got Array\(3",
        ),
        (
            {"survival_prob": np.full(1, 0.5)},
            ValueError,
            r"must be one number, got .* shape \(1,\)",
        ),
        ({"blocks": "layer"}, ValueError, r"blocks must be one of 'leaf', 'row', .* got 'layer'"),
        ({"blocks": 0}, ValueError, r"blocks must be one of .* such as stacked\(0\), got 0"),
        ({"blocks": [0]}, ValueError, r"blocks must be one of .* such as stacked\(0\), got \[0\]"),
        (
            {"key": 2**64},
            ValueError,
            "key must be an int of up to 64 bits, got 18446744073709551616",
        ),
        ({"key": 1.5}, TypeError, r"key must be an int, .* got 1.5"),
        ({"key": jnp.ones(2)}, TypeError, r"key must be an int, .* got Array"),
    ],
)
def test_shared_arguments(factory, kwargs, error, message):
    with pytest.raises(error, match=message):
        factory(**kwargs)


@pytest.mark.parametrize("factory", [magma, wrapped])
@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"temperature": 0}, ValueError, "temperature must be greater than 0, got 0"),
        ({"temperature": -1.0}, ValueError, "temperature must be greater than 0, got -1.0"),
        ({"b1": 1.0}, ValueError, r"b1 must be in \[0, 1\), got 1.0"),
        ({"b1": lambda step: 0.9}, TypeError, "b1 must be a number, got"),
        ({"b1": jnp.ones(2)}, ValueError, r"b1 must be one number, got .* shape \(2,\)"),
        ({"score_decay": -0.1}, ValueError, r"score_decay must be in \[0, 1\), got -0.1"),
        ({"initial_score": 2}, ValueError, r"initial_score must be in \[0, 1\], got 2"),
        ({"damping": "no"}, TypeError, "damping must be True or False, got 'no'"),
        ({"rescale": 1}, TypeError, "rescale must be True or False, got 1"),
        ({"momentum_dtype": "int8"}, ValueError, "momentum_dtype must be a float dtype, .*'int8'"),
        ({"momentum_dtype": "foo"}, ValueError, "momentum_dtype must be a float dtype, .*'foo'"),
        ({"momentum_dtype": "complex64"}, ValueError, "must be a float dtype, got 'complex64'"),
        ({"axis_name": 3}, TypeError, "axis_name must be a mesh axis or a tuple .* got 3"),
        ({"axis_name": ["x"]}, TypeError, r"axis_name must be .* got \['x'\]"),
    ],
)
def test_arguments_of_magma(factory, kwargs, error, message):
    with pytest.raises(error, match=message):
        factory(**kwargs)


def test_arguments_of_one():
    with pytest.raises(ValueError, match='base must be "momentum" or "gradient", got \'adam\''):
        magma(base="adam")
    with pytest.raises(ValueError, match=r"first_moment must be .* got 'mu'"):
        wrapped(first_moment="mu")
    with pytest.raises(TypeError, match="sparse_state must be True or False, got 'yes'"):
        wrapped(sparse_state="yes")
    with pytest.raises(TypeError, match=r"with_magma wraps .* got 0.5; magma\(\) is the link"):
        with_magma(0.5)
    with pytest.raises(TypeError, match=r"magma\(survival_prob='alignment'\) samples by alignment"):
        skip_update("alignment")
    with pytest.raises(TypeError, match="axis must be an int or ints, got 'layers'"):
        stacked("layers")
    with pytest.raises(TypeError, match="axis must be an int or ints, got True"):
        stacked(True)
    with pytest.raises(ValueError, match=r"axis \(0, 1\) and axis_name 'x' differ in length"):
        stacked((0, 1), axis_name="x")
    with pytest.raises(
        TypeError, match=r"one mesh axis, or None, for each .* got \(\('x', 'y'\),\)"
    ):
        stacked((0,), axis_name=(("x", "y"),))


def test_numbers_of_inject_hyperparams():
    with pytest.raises(ValueError, match=r"temperature must be greater than 0, got Array\(-1"):
        optax.inject_hyperparams(magma)(temperature=-1).init(PARAMS)
    tx = optax.inject_hyperparams(magma)()
    state = tx.init(PARAMS)
    for name, value in (("where", attention_and_mlp), ("momentum_dtype", jnp.bfloat16)):
        with pytest.raises((TypeError, ValueError), match="static_args"):
            optax.inject_hyperparams(magma)(**{name: value}).init(PARAMS)
    state.hyperparams["survival_prob"] = jnp.array([0.5])
    with pytest.raises(ValueError, match=r"survival_prob must be one number, got .* shape \(1,\)"):
        jax.jit(tx.update)(PARAMS, state, grad=PARAMS)


@pytest.mark.parametrize("name", ["survival_prob", "temperature", "score_decay"])
def test_schedules_of_more_than_one_number(name):
    tx = magma(**{name: lambda step: jnp.full(3, 0.5)})
    with pytest.raises(ValueError, match=rf"{name} must be one number, .* gave an array \(3,\)"):
        tx.update(PARAMS, tx.init(PARAMS), grad=PARAMS)


@pytest.mark.parametrize("factory", [magma, wrapped, skip_update])
def test_where_that_selects_nothing_lists_what_it_saw(factory):
    with pytest.raises(ValueError, match="selects none of the 3 leaves; it saw 'bias', 'layers/0"):
        factory(where=attention_and_mlp).init(PARAMS)
    with pytest.raises(ValueError, match="and 92 more"):
        factory(where=attention_and_mlp).init({f"p{n}": jnp.ones(1) for n in range(100)})


@pytest.mark.parametrize("factory", [magma, wrapped, skip_update, control])
def test_where_that_selects_nothing_beside_none_is_refused(factory):
    """As in an Equinox module, whose functions and absent biases eqx.filter turns into None."""
    params = {"layers": [{"weight": jnp.ones((2, 2)), "bias": None}], "activation": None}
    with pytest.raises(ValueError, match="selects none of the 1 leaves"):
        factory(where=attention_and_mlp).init(params)


@pytest.mark.parametrize("factory", [magma, wrapped, skip_update])
def test_where_tree_that_misses_a_leaf_names_it(factory):
    with pytest.raises(ValueError, match="no entry for 'layers/0/w'; it has 'bias'"):
        factory(where={"bias": True}).init(PARAMS)
    with pytest.raises(ValueError, match="no entry for 'bias'; it is empty"):
        factory(where={}).init(PARAMS)


@pytest.mark.parametrize("factory", [magma, wrapped, skip_update])
def test_where_that_is_neither_a_predicate_nor_bools(factory):
    with pytest.raises(TypeError, match=r"`where` must be a predicate .* got 'attention_and_mlp'$"):
        factory(where="attention_and_mlp").init(PARAMS)
    with pytest.raises(TypeError, match=r"`where` must be .* got 'frozen' at 'bias'"):
        factory(where={"layers": True, "bias": "frozen"}).init(PARAMS)
    with pytest.raises(TypeError, match=r"`where` must be .* at 'bias'"):
        factory(where=PARAMS).init(PARAMS)


@pytest.mark.parametrize("axes", [None, 0.0, "row", False, [[0]]])
def test_axes_that_are_no_ints(axes):
    with pytest.raises(TypeError, match="blocks: the axes of 'bias' must be an int or ints, got"):
        magma(blocks=lambda path, leaf: axes).init(PARAMS)


@pytest.mark.parametrize("factory", [magma, wrapped, skip_update])
def test_two_leaves_of_one_path(factory):
    with pytest.raises(ValueError, match="two leaves have the same path 'a/b'"):
        factory().init({"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}})


@pytest.mark.parametrize("factory", [magma, wrapped, skip_update])
def test_axes_that_a_leaf_does_not_have(factory):
    with pytest.raises(
        ValueError, match=r"axes \(1,\) are out of range for 'bias' of shape \(3,\)"
    ):
        factory(blocks=stacked(1)).init(PARAMS)
    with pytest.raises(ValueError, match=r"repeat one axis of 'layers/0/w' of shape \(2, 3\)"):
        factory(where=lambda path, _: path != "bias", blocks=stacked((0, -2))).init(PARAMS)


class TestGrad:
    tx = magma()
    state = tx.init(PARAMS)

    def update(self, grad):
        return self.tx.update(PARAMS, self.state, PARAMS, grad=grad)

    def test_missing_leaf(self):
        grad = {"layers": [PARAMS["layers"][0]], "bias": PARAMS["bias"]}
        with pytest.raises(ValueError, match=r"`grad` differs .* first at 'layers/1/w'"):
            self.update(grad)

    def test_other_names(self):
        grad = {"layers": [{"kernel": x["w"]} for x in PARAMS["layers"]], "bias": jnp.ones(3)}
        with pytest.raises(ValueError, match=r"first at 'layers/0/w': .* 'layers/0/kernel'"):
            self.update(grad)

    def test_other_shape(self):
        grad = {**PARAMS, "bias": jnp.ones(4)}
        with pytest.raises(ValueError, match=r"first at 'bias': shape \(4,\) instead of \(3,\)"):
            self.update(grad)

    def test_wrapped_in_another_container(self):
        with pytest.raises(ValueError, match=r"first at 'bias': .* 'params/bias'"):
            self.update({"params": PARAMS})

    def test_empty(self):
        with pytest.raises(ValueError, match=r"first at 'bias': .* which is empty"):
            self.update({})


@pytest.mark.parametrize("factory", [magma, wrapped])
class TestState:
    def test_of_other_parameters(self, factory):
        tx = factory()
        with pytest.raises(
            ValueError, match="block 'extra' is in the updates but not in the state"
        ):
            tx.update({**PARAMS, "extra": jnp.ones(1)}, tx.init(PARAMS), grad=PARAMS)
        with pytest.raises(ValueError, match="block 'layers/0/w' is in the state but not in the"):
            tx.update({"bias": jnp.ones(3)}, tx.init(PARAMS), grad=PARAMS)

    def test_of_other_blocks(self, factory):
        with pytest.raises(ValueError, match=r"'bias' has scores of shape \(\) .* shape \(3,\)"):
            factory(blocks="element").update(PARAMS, factory().init(PARAMS), grad=PARAMS)


def test_first_moment_that_lacks_a_leaf():
    tx = wrapped(first_moment=lambda state: {"bias": state[0].mu["bias"]})
    with pytest.raises(ValueError, match=r"`first_moment` differs .* at 'layers/0/w'.* updates$"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)


def test_sparse_state_of_factored_moments_within_a_leaf():
    params = {"w": jnp.ones((256, 128))}
    tx = with_magma(optax.adafactor(1e-2), sparse_state=True, blocks="row")
    with pytest.raises(ValueError, match=r"shape \(\w+,\) for 'w' of shape \(256, 128\).*'leaf'"):
        tx.init(params)
    # Whole leaves can be held whatever the shape of their state.
    tx = with_magma(optax.adafactor(1e-2), sparse_state=True)
    jax.block_until_ready(tx.update(params, tx.init(params), params))


def test_sparse_state_of_a_list_per_parameter():
    """SM3 keeps one vector per axis of a parameter."""
    params = {"w": jnp.ones((4, 4))}
    tx, kept = with_magma(optax.sm3(1e-2), sparse_state=True), []
    state = tx.init(params)
    for _ in range(6):
        updates, new = tx.update(params, state, params)
        same = [
            jnp.array_equal(a, b)
            for a, b in zip(*(x[1][0].mu["w"] for x in (state, new)), strict=True)
        ]
        assert all(same) != bool(updates["w"].any()) and any(same) == all(same)
        kept.append(all(same))
        state = new
    assert {True, False} == set(kept)
    with pytest.raises(ValueError, match=r"a state of shape \(4,\) for 'w'.*blocks='leaf'"):
        with_magma(optax.sm3(1e-2), sparse_state=True, blocks="row").init(params)


@pytest.mark.parametrize("base", [optax.adam, optax.sm3])
def test_sparse_state_of_a_bare_array(base):
    """Its path is empty."""
    params, tx, seen = jnp.ones((2, 3)), with_magma(base(1e-2), sparse_state=True), set()
    state = tx.init(params)
    for _ in range(6):
        updates, new = tx.update(params, state, params)
        moments = (jax.tree.leaves(x.inner_state[0].mu) for x in (state, new))
        kept = all(jnp.array_equal(a, b) for a, b in zip(*moments, strict=True))
        assert kept != bool(updates.any())
        seen.add(kept)
        state = new
    assert seen == {True, False}


def test_missing_gradient_warns_once_and_names_both_exact_ways():
    tx = optax.chain(ADAM, magma())
    state = tx.init(PARAMS)
    with pytest.warns(UserWarning, match=r"grad=grads.* with_magma\(base\)") as record:
        tx.update(PARAMS, state, PARAMS)
        tx.update(PARAMS, state, PARAMS)
        jax.jit(tx.update)(PARAMS, state, PARAMS)
    assert len(record) == 1
    other = magma(base="gradient")
    with pytest.warns(UserWarning, match="base='gradient'"):
        other.update(PARAMS, other.init(PARAMS))
