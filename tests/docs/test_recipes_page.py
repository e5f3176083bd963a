"""Each recipe of docs/recipes.md runs by itself, and does what it says."""

import pathlib
import re

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from test_readme import ROOT

SECTIONS = dict(
    re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", (ROOT / "docs/recipes.md").read_text(), re.M | re.S)
)


def run(title, folder, monkeypatch):
    """Run the code of one recipe in a folder of its own; return its names."""
    monkeypatch.chdir(folder)
    namespace = {}
    for code in re.findall(r"^```python\n(.*?)^```$", SECTIONS[title], re.M | re.S):
        exec(compile(code, f"docs/recipes.md ({title})", "exec"), namespace)
    assert namespace, f"{title} has no code"
    return namespace


CHECKED = {}


def check(title):
    return lambda function: CHECKED.setdefault(title, function)


@check("Bare Optax")
def _(names):
    assert float(names["value"]) < float(
        names["loss"]({**names["params"], "norm": 9 * jnp.ones(4)})
    )


@check("Gradient accumulation")
def _(names):
    [updates] = jax.tree.leaves(names["updates"])
    assert int(names["state"].gradient_step) == 1 and updates.shape == (4, 4)


@check("Restore onto another mesh")
def _(names):
    state = names["state"]
    chex.assert_trees_all_equal(
        jax.device_get(state), jax.device_get(names["tx"].init(names["params"]))
    )
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(state)} == {
        jax.device_count()
    }
    assert state.magma.momentum["mlp"]["up"].sharding.spec[0] == "fsdp"


@check("From the wrapper to a chain")
def _(names):
    chex.assert_trees_all_close(names["by_chain"], names["by_wrapper"], rtol=1e-5)
    chain_state = names["chain_state"]
    back = (
        names["wrapper"]
        .init(names["params"])
        ._replace(inner_state=chain_state[0], magma=chain_state[1]._replace(momentum=None))
    )
    chex.assert_trees_all_equal(back, names["state"])


@check("A checkpoint of version 0.1")
def _(names):
    tx, params = names["tx"], names["params"]
    assert list(names["old"].magma.alignment) == ["layers/mlp/up_proj"]
    assert jax.tree.structure(names["target"]) == jax.tree.structure(names["old"])
    chex.assert_trees_all_equal(
        tx.update(params, names["old"], params)[0], tx.update(params, names["state"], params)[0]
    )


@check("Anneal p")
def _(names):
    tx, params = names["tx"], {"mlp": {f"w{n}": jnp.ones((2, 2)) for n in range(20)}}
    state = tx.init(params)
    updates, state = tx.update(params, state, params)
    assert all(jnp.all(x != 0) for x in jax.tree.leaves(updates))  # p is 1 at first
    late = state._replace(magma=state.magma._replace(step=jnp.int32(1000)))
    dropped = [not x.any() for x in jax.tree.leaves(tx.update(params, late, params)[0])]
    assert 3 < sum(dropped) < 17


@check("Scores per layer in TensorBoard")
def _(names):
    [events] = pathlib.Path("runs").glob("events.*")
    text = events.read_bytes()
    assert all(f"score/layers/mlp/up/{layer}".encode() in text for layer in range(6))


@check("pmap")
def _(names):
    grads = jax.grad(lambda p: jnp.mean((names["x"] @ p["w"]) ** 2))(names["params"])
    tx, params = names["tx"], names["params"]
    expected = optax.apply_updates(params, tx.update(grads, tx.init(params), params)[0])
    for replica in names["new_params"]["w"]:
        chex.assert_trees_all_close(replica, expected["w"], rtol=1e-5)


@check("FSDP")
def _(names):
    tx, params = names["tx"], jax.device_get(names["params"])
    chex.assert_trees_all_close(
        jax.device_get(names["updates"]), tx.update(params, tx.init(params), params)[0], rtol=1e-6
    )
    assert names["state"].inner_state[0].mu["mlp"]["up"].sharding.spec[0] == "fsdp"


@pytest.mark.parametrize("title", SECTIONS)
def test_recipe(title, tmp_path, monkeypatch):
    names = run(title, tmp_path, monkeypatch)
    CHECKED.get(title, lambda names: None)(names)


def test_checks_belong_to_recipes():
    assert CHECKED.keys() <= SECTIONS.keys()
