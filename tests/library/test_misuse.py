"""What trained silently wrong is an error or a warning that says what to do."""

import inspect
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

from magma_optax import attention_and_mlp, magma, skip_update, stacked, summarize, with_magma

PARAMS = {"mlp": {"w": jnp.ones((4, 3))}}
GRADS = {"mlp": {"w": jnp.full((4, 3), 0.1)}}
ADAM = optax.adam(1e-3)


def update(tx, **kwargs):
    return tx.update(GRADS, tx.init(PARAMS), PARAMS, **kwargs)


def warned(call):
    """The only warning that ``call`` gives, and the line of this file that it points at."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    [warning] = caught
    assert warning.filename == __file__
    line = inspect.getsource(inspect.getmodule(update)).splitlines()[warning.lineno - 1]
    return str(warning.message), line


# ---------------------------------------------------------------------------------------------
# The order of a chain


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_magma_before_the_base_is_warned_of(wrap):
    tx = optax.chain(magma(), ADAM)
    step = wrap(lambda g, s: tx.update(g, s, PARAMS, grad=g))  # this line
    message, line = warned(lambda: step(GRADS, tx.init(PARAMS)))
    assert "optax.chain(base, magma())" in message and line.endswith("# this line")
    tx = optax.named_chain(("magma", magma()), ("adam", ADAM))
    assert "before magma" in warned(lambda: update(tx, grad=GRADS))[0]


def test_magma_after_any_base_or_alone_is_not():
    for base in (optax.sgd(0.1), optax.clip(1.0), ADAM):
        update(optax.chain(base, magma()), grad=GRADS)
    update(magma(), grad=GRADS)
    update(optax.inject_hyperparams(magma)(), grad=GRADS)


def test_the_warning_is_given_once():
    tx = optax.chain(magma(), ADAM)
    warned(lambda: [update(tx, grad=GRADS) for _ in range(3)])


def test_the_warning_of_the_estimate_points_at_the_caller():
    tx = optax.chain(optax.chain(ADAM, magma()), optax.identity())
    state = tx.init(PARAMS)
    message, line = warned(lambda: tx.update(GRADS, state, PARAMS))  # here
    assert "with_magma" in message and "learning rate that changes" in message
    assert line.endswith("# here")


# ---------------------------------------------------------------------------------------------
# Gradient accumulation


@pytest.mark.parametrize(
    "inner",
    [
        lambda: optax.MultiSteps(ADAM, 2),
        lambda: optax.MultiSteps(ADAM, 2).gradient_transformation(),
        lambda: optax.chain(optax.clip(1.0), optax.MultiSteps(ADAM, 2).gradient_transformation()),
        lambda: optax.masked(optax.MultiSteps(ADAM, 2).gradient_transformation(), True),
    ],
)
def test_multi_steps_inside_with_magma_is_refused(inner):
    with pytest.raises(ValueError, match=r"optax.MultiSteps\(with_magma\(base\)"):
        with_magma(inner()).init(PARAMS)


@pytest.mark.parametrize("link", [magma, lambda: with_magma(ADAM)], ids=["magma", "with_magma"])
def test_multi_steps_before_magma_in_a_chain_is_seen_by_summarize(link):
    collect = optax.MultiSteps(ADAM, 2).gradient_transformation()
    for tx in (
        optax.chain(collect, link()),
        optax.chain(optax.clip(1.0), optax.chain(collect, optax.identity()), link()),
    ):
        state = tx.init(PARAMS)
        message, line = warned(lambda s=state: summarize(s))  # at this call
        assert "MultiSteps(with_magma(base), k)" in message and line.endswith("# at this call")


def test_multi_steps_around_magma_or_beside_it_is_fine():
    around = optax.MultiSteps(optax.chain(optax.identity(), with_magma(ADAM)), 2)
    assert summarize(around.init(PARAMS))["num_blocks"] == 1
    kinds = {"a": optax.MultiSteps(ADAM, 2).gradient_transformation(), "b": with_magma(ADAM)}
    beside = optax.partition(kinds, {"x": "a", "y": "b"})
    assert summarize(beside.init({"x": jnp.ones(2), "y": jnp.ones(2)}))["num_blocks"] == 1


def test_a_group_without_parameters_has_no_block():
    kinds = {"body": with_magma(ADAM), "head": with_magma(ADAM, initial_score=1.0)}
    found = summarize(optax.partition(kinds, {"w": "body"}).init({"w": jnp.ones(2)}))
    assert found["num_blocks"] == 1 and found["alignment_max"] == 0.5
    assert summarize(with_magma(ADAM).init(jnp.ones(2)))["num_blocks"] == 1  # A bare array is one.


# ---------------------------------------------------------------------------------------------
# Nothing to summarize


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (lambda: ADAM.init(PARAMS), "holds no MagmaState"),
        (lambda: with_magma(ADAM).init(PARAMS)._asdict()["inner_state"], "holds no MagmaState"),
        (lambda: skip_update().init(PARAMS), "skip_update keeps none"),
        (lambda: magma().init({"n": jnp.ones(3, int)}), "no leaf carries a block"),
        (
            lambda: optax.masked(
                with_magma(ADAM), lambda params: jax.tree.map(lambda _: False, params)
            ).init(PARAMS),
            "no leaf carries",
        ),
    ],
)
def test_summarize_says_why_it_found_no_scores(state, why):
    state = state()
    message, line = warned(lambda: summarize(state))  # summarize
    assert why in message and line.endswith("# summarize")


# ---------------------------------------------------------------------------------------------
# Arguments that are something else


def one_argument(path):
    return True


@pytest.mark.parametrize("make", [magma, skip_update, lambda **kw: with_magma(ADAM, **kw)])
@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"survival_prob": ADAM}, r"got an optimizer.*optax.chain\(base, magma\(\)\)"),
        ({"survival_prob": optax.adam}, r"got an optimizer.*with_magma\(base\)"),
        ({"where": one_argument}, r"two arguments.*one_argument.*where=mask\(params\)"),
        ({"where": lambda params: params}, r"two arguments.*where=mask\(params\)"),
        ({"where": lambda: True}, "two arguments"),
        ({"blocks": stacked}, r"blocks=stacked\(0\)"),
        ({"blocks": one_argument}, "two arguments.*one_argument"),
    ],
)
def test_wrong_arguments_are_named_with_the_cure(make, kwargs, message):
    with pytest.raises(TypeError, match=message):
        make(**kwargs)


def test_an_optimizer_given_by_position_is_named():
    for make in (magma, skip_update):
        for optimizer in (ADAM, optax.chain(ADAM), optax.adam, optax.contrib.muon):
            with pytest.raises(TypeError, match="links of a chain"):
                make(optimizer)


@pytest.mark.parametrize("function", [optax.adam, optax.sgd, optax.contrib.muon])
def test_a_base_that_is_not_called_is_named(function):
    with pytest.raises(TypeError, match=rf"call it, as in with_magma\({function.__name__}"):
        with_magma(function)


@pytest.mark.parametrize("inner", [0.5, None, "adam", attention_and_mlp, optax.Params])
def test_what_is_no_base_is_named(inner):
    with pytest.raises(TypeError, match=r"wraps an optax.GradientTransformation, got"):
        with_magma(inner)


def test_predicates_of_other_shapes_are_taken():
    class Callable:
        def __call__(self, path, leaf, deep=True):
            return True

    for where in (Callable(), lambda *args: True, lambda path, leaf=None: True):
        magma(where=where).init(PARAMS)


def test_an_error_inside_a_predicate_says_what_it_was_asked():
    tx = magma(where=lambda path, leaf: path[-1].key == "w")
    with pytest.raises(AttributeError) as caught:
        tx.init(PARAMS)
    assert "the path 'mlp/w', a string" in caught.value.__notes__[0]


@pytest.mark.parametrize("value", ["half", None, jnp.ones(2), ADAM])
def test_a_schedule_that_gives_no_number_is_named(value):
    with pytest.raises((TypeError, ValueError), match="temperature must be one number"):
        update(magma(temperature=lambda step: value), grad=GRADS)


def test_first_moment_of_another_shape_is_named():
    with pytest.raises(TypeError, match="first_moment must be a function of one argument"):
        with_magma(ADAM, first_moment=lambda a, b: a)
