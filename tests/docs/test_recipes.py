"""The recipes of docs/wrappers.md do what the page says, on the trees and with stand-ins of others.

The libraries themselves are not installed here: each stand-in has the names and the calls that the
recipe uses, and parameters are laid out as the library lays them out.
"""

import dataclasses
import re
import sys
import types
from typing import ClassVar

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.core import freeze, unfreeze
from flax.serialization import from_state_dict, to_state_dict
from flax.traverse_util import empty_node, flatten_dict, unflatten_dict
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_readme import ROOT, blocks

from magma_optax import MagmaState, attention_and_mlp, magma, skip_update, with_magma

PAGE = "docs/wrappers.md"


@pytest.fixture(scope="module")
def page():
    """The names that the page's own code defines."""
    namespace = {}
    for block in blocks(PAGE, "python"):
        exec(compile(block, PAGE, "exec"), namespace)
    return namespace


def recipe(monkeypatch, page, library, **modules):
    """Run the page's code for ``library``, with ``modules`` in its place; return its names."""
    for name, members in modules.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    [code] = [block for block in blocks(PAGE, "py") if library in block]
    namespace = dict(page)
    exec(compile(code, f"{PAGE} ({library})", "exec"), namespace)
    return namespace


def parameters(text):
    """A tree from lines of a path and a shape."""
    lines = [line.split() for line in text.split("\n") if line.strip()]
    shapes = {path: tuple(int(n) for n in shape.split(",")) for path, shape in lines}
    return unflatten_dict({path: jnp.ones(shape) for path, shape in shapes.items()}, sep="/")


def score_shapes(state):
    return {path: leaf.shape for path, leaf in flatten_dict(state.alignment, sep="/").items()}


MAXTEXT = {  # parameters and the shape of their scores, None if they are not masked
    "llama2": """
        decoder/layers/self_attention/query/kernel 8,3,2,4          3
        decoder/layers/mlp/wi_0/kernel 8,3,16                       3
        decoder/layers/pre_self_attention_layer_norm/scale 8,3      None
    """,
    "deepseek2": """
        decoder/dense_layers/mlp/wo/kernel 16,1,8                   1
        decoder/moe_layers/self_attention/wkv_a/kernel 8,5,4        5
        decoder/moe_layers/DeepSeekMoeBlock_0/MoeBlock_0/wi_0 7,5,8,16            7,5
        decoder/moe_layers/DeepSeekMoeBlock_0/MoeBlock_0/gate/kernel 8,5,7        None
        decoder/moe_layers/DeepSeekMoeBlock_0/shared_experts/wi_0/kernel 8,5,16   5
    """,
    "gpt-oss": """
        decoder/layers/layers_0/GptOssAttention/query/kernel 8,3,2,4              3
        decoder/layers/layers_0/GptOssAttention/sinks 2,3                         None
        decoder/layers/layers_1/GptOssMlp/wo 7,3,16,8                             7,3
    """,
    "gemma3": """
        decoder/layers/layers_5/mlp/wi_0/kernel 8,3,16                            3
        decoder/layers_remainder/layers_0/mlp/wi_0/kernel 8,16                    -
    """,
    "qwen3-next": """
        decoder/layers/global_layer/attention/attention/key/kernel 8,5,2,4        5
        decoder/layers/global_layer/mlp/routed_experts/wi_0 7,5,8,16              7,5
        decoder/layers/local_layers/attention/in_proj_qkvz/kernel 8,5,3,16        5,3
        decoder/layers/local_layers/attention/A_log 2,5,3                         None
        decoder/layers/local_layers/mlp/routed_experts/wi_0 7,5,3,8,16            7,5,3
        decoder/layers/local_layers/mlp/shared_expert/wo/kernel 16,5,3,8          5,3
    """,
    "not scanned": """
        decoder/layers_0/self_attention/query/kernel 8,2,4                        -
        decoder/layers_0/MoeBlock_0/wi_0 7,8,16                                   7
    """,
}


@pytest.mark.parametrize("model", MAXTEXT)
def test_maxtext(model, page, monkeypatch):
    """Layers and experts are blocks, also where their axes differ within one model."""
    trained = []
    optimizers = types.SimpleNamespace(
        get_optimizer=lambda config, rate, model=None: optax.adam(rate)
    )
    train = types.SimpleNamespace(main=trained.append)
    recipe(
        monkeypatch,
        page,
        "maxtext",
        **{
            "maxtext.optimizers": {"optimizers": optimizers},
            "maxtext.trainers.pre_train": {"train": train},
        },
    )
    assert len(trained) == 1
    lines = [line.rsplit(None, 1) for line in MAXTEXT[model].split("\n") if line.strip()]
    params = parameters("\n".join(line for line, _ in lines))
    state = optimizers.get_optimizer(None, 1e-3, model=None).init(params)
    sizes = {line.split()[0]: size for line, size in lines if size != "None"}
    assert score_shapes(state.magma) == {
        path: tuple(int(n) for n in size.split(",") if n != "-") for path, size in sizes.items()
    }


def test_levanter(page, monkeypatch):
    """The optimizer is registered, and wraps what Levanter's Adam builds."""
    registered = {}

    @dataclasses.dataclass(frozen=True)
    class AdamConfig:
        learning_rate: float = 6e-4

        def build(self, num_train_steps):
            rate = optax.linear_schedule(self.learning_rate, 0.0, num_train_steps)

            def chain(learning_rate):
                return optax.chain(optax.scale_by_adam(), optax.scale(-learning_rate))

            return optax.inject_hyperparams(chain)(learning_rate=rate)

    class OptimizerConfig:
        @staticmethod
        def register_subclass(name):
            return lambda cls: registered.setdefault(name, cls)

    recipe(
        monkeypatch,
        page,
        "levanter",
        **{
            "levanter.optim.config": {
                "AdamConfig": AdamConfig,
                "OptimizerConfig": OptimizerConfig,
            }
        },
    )
    params = parameters("""
        transformer/layers/stacked/self_attn/q_proj/weight/0 5,2,4,8
        transformer/layers/stacked/block_sparse_moe/experts/w1/weight/0 5,7,8,16
        transformer/layers/stacked/block_sparse_moe/gate/weight/0 5,7,8
        transformer/layers/stacked/input_layernorm/weight/0 5,8
        transformer/_layers/blocks/0/mlp/up_proj/weight/0 16,8
    """)
    tx = registered["magma"](learning_rate=1e-3).build(10)
    state = tx.init(params)
    assert score_shapes(state.magma) == {
        "transformer/layers/stacked/self_attn/q_proj/weight/0": (5,),
        "transformer/layers/stacked/block_sparse_moe/experts/w1/weight/0": (5, 7),
        "transformer/_layers/blocks/0/mlp/up_proj/weight/0": (),
    }
    assert state.magma.momentum is None  # Adam's own first moment is found inside.
    assert jnp.isclose(state.inner_state.hyperparams["learning_rate"], 1e-3)


BLOCKS = {  # paths and shapes, and the axes that the page's table says
    "big_vision with `scan`": """
        Transformer/encoderblock/MlpBlock_0/Dense_0/kernel 5,8,16                 0
        MAPHead_0/MlpBlock_0/Dense_0/kernel 8,16                                  -
    """,
    "nanoMoE": """
        h/0/mlp/experts/c_fc 7,8,16                                               0
        h/1/mlp/c_fc 8,16                                                         -
    """,
    "flax's Gemma": """
        layers/0/attn/kv_einsum/kernel 2,1,8,4                                    0
        layers/0/attn/qkv_einsum/kernel 3,2,8,4                                   0
        layers/0/attn/q_einsum/kernel 2,8,4                                       -
        layers/0/mlp/gate_proj/kernel 8,16                                        -
    """,
    "Tunix": """
        layers/0/attn/kv_einsum/w 2,1,8,4                                         0
        layers/0/attn/q_proj/w 8,2,4                                              -
        layers/0/mlp/gate_proj 7,8,16                                             0
        layers/0/mlp/up_proj/kernel 8,16                                          -
        layers/0/moe/gating_einsum 7,2,16,8                                       0
    """,
    "google-deepmind's Gemma": """
        layer_0/attn/kv_einsum/w 2,1,8,4                                          0
        layer_0/mlp/gating_einsum 2,16,8                                          0
        layer_0/mlp/linear 16,8                                                   -
    """,
}


@pytest.mark.parametrize("library", BLOCKS)
def test_the_table_of_blocks(library):
    text = (ROOT / PAGE).read_text()
    [function] = re.findall(rf"^\| {re.escape(library)}.*\| `(lambda path.*)` \|$", text, re.M)
    lines = [line.rsplit(None, 1) for line in BLOCKS[library].split("\n") if line.strip()]
    params = parameters("\n".join(line for line, _ in lines))
    tx = with_magma(optax.adam(1e-3), where=attention_and_mlp, blocks=eval(function))
    expected = {}
    for line, axes in lines:
        path, shape = line.split()
        expected[path] = () if axes == "-" else (int(shape.split(",")[int(axes)]),)
    assert score_shapes(tx.init(params).magma) == expected


def test_tunix_finds_the_learning_rate():
    """It looks in the optimizer's state, then in each of its parts."""
    base = optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3)
    state = with_magma(base, where=attention_and_mlp).init(parameters("layers/0/attn/q_proj/w 8,4"))
    assert not hasattr(state, "hyperparams")
    [rate] = [part.hyperparams["learning_rate"] for part in state if hasattr(part, "hyperparams")]
    assert jnp.isclose(rate, 1e-3)


class T5XWrapper:
    """How T5X writes, restores and shards an optax state: flat dicts with "/", no empty ones."""

    def __init__(self, tx):
        self.tx = tx

    def state_dict(self, state):
        return unflatten_dict(flatten_dict(to_state_dict(state), sep="/"), sep="/")

    def restore(self, target, written):
        flat = flatten_dict(written, sep="/")
        for path, value in flatten_dict(
            to_state_dict(target), keep_empty_nodes=True, sep="/"
        ).items():
            assert path in flat or value is empty_node, path
            flat.setdefault(path, value)
        return from_state_dict(target, unflatten_dict(flat, sep="/"))

    def logical_axes(self, state, params_axes):
        none = self.state_dict(jax.tree.map(lambda _: None, state))
        derived = to_state_dict(T5XRules.derive_optax_logical_axes(state, params_axes))
        return self.restore(state, {**none, **unfreeze(derived)})


class T5XRules:
    """A rule for every kind of state, as T5X has them."""

    _RULES: ClassVar = {}

    @staticmethod
    def derive_params_axes(params, axes):
        pick = lambda axis, leaf: leaf if isinstance(leaf, optax.MaskedNode) else axis  # noqa: E731
        return jax.tree.map(pick, axes, params)

    @classmethod
    def derive_optax_logical_axes(cls, state, axes):
        is_state = lambda x: hasattr(x, "_fields") and type(x).__name__.endswith("State")  # noqa: E731
        leaves, treedef = jax.tree.flatten(state, is_leaf=is_state)
        found = [cls._RULES[type(leaf)](leaf, axes) if is_state(leaf) else None for leaf in leaves]
        return jax.tree.unflatten(treedef, found)


T5X_BASES = {
    "adam": lambda: with_magma(optax.adamw(1e-3), where=attention_and_mlp),
    "own momentum": lambda: with_magma(optax.rmsprop(1e-3), where=attention_and_mlp),
    "link": lambda: optax.chain(optax.adamw(1e-3), magma(where=attention_and_mlp)),
    "skip_update": lambda: optax.chain(optax.adamw(1e-3), skip_update(where=attention_and_mlp)),
}


@pytest.mark.parametrize("base", T5X_BASES)
@pytest.mark.filterwarnings("ignore:magma. no `grad`:UserWarning")
def test_t5x(base, page, monkeypatch):
    """A state comes back bit for bit, and its logical axes are those of the parameters."""
    derive = T5XRules.derive_params_axes
    known = {
        optax.EmptyState: lambda state, axes: state,
        optax.ScaleByAdamState: lambda state, axes: optax.ScaleByAdamState(
            count=None, mu=derive(state.mu, axes), nu=derive(state.nu, axes)
        ),
        optax.ScaleByRmsState: lambda state, axes: optax.ScaleByRmsState(derive(state.nu, axes)),
    }
    monkeypatch.setattr(T5XRules, "_RULES", known)
    modules = {"OptaxStatePartitionRules": T5XRules, "OptaxWrapper": T5XWrapper}
    recipe(monkeypatch, page, "t5x", **{"t5x.optimizers": modules})

    params = freeze(
        parameters("""
        decoder/layers_0/mlp/wi_0/kernel 8,16
        decoder/layers_0/self_attention/query/kernel 8,8
        decoder/layers_0/pre_mlp_layer_norm/scale 8
    """)
    )
    axes = jax.tree.map(lambda leaf: P(*["embed", "mlp"][: leaf.ndim]), params)
    tx = T5X_BASES[base]()
    wrapper = T5XWrapper(tx)
    _, state = tx.update(jax.tree.map(jnp.sin, params), tx.init(params), params)

    restored = wrapper.restore(tx.init(params), wrapper.state_dict(state))
    chex.assert_trees_all_equal(restored, state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)

    logical = wrapper.logical_axes(state, axes)
    nodes = jax.tree.leaves(logical, is_leaf=lambda x: isinstance(x, MagmaState))
    [of_magma] = [node for node in nodes if isinstance(node, MagmaState)]
    assert jax.tree.leaves((of_magma.step, of_magma.key, of_magma.alignment)) == []
    moments = jax.tree.leaves_with_path(logical)
    for path, spec in moments:
        vector = "scale" in jax.tree_util.keystr(path)
        assert spec == (P("embed") if vector else P("embed", "mlp"))
    assert len(moments) == {"adam": 6, "own momentum": 5, "link": 8, "skip_update": 6}[base]


def test_regex_rules_for_shardings(page):
    """On 8 devices; without the first rule the scores would get the parameters' shardings."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    params = parameters("""
        layers/attn/q/kernel 2,8,8
        layers/mlp/up/kernel 2,8,16
        layers/norm/scale 2,8
    """)
    tx = with_magma(optax.rmsprop(1e-2), where=attention_and_mlp, blocks=lambda path, leaf: 0)

    def init():
        return {"params": params, "opt_state": tx.init(params)}

    def step(state):
        grads = jax.tree.map(jnp.sin, state["params"])
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}

    def shardings(rules):
        specs = page["match_partition_rules"](rules, jax.eval_shape(init))
        is_leaf = lambda spec: isinstance(spec, P)  # noqa: E731
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_leaf)

    with pytest.raises(ValueError, match="rank"):
        jax.jit(init, out_shardings=shardings(page["rules"][1:]))()
    sharded = shardings(page["rules"])
    state = jax.jit(step, out_shardings=sharded)(jax.jit(init, out_shardings=sharded)())
    chex.assert_trees_all_close(state, step(init()), rtol=1e-6)

    found = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.sharding.spec
        for path, leaf in jax.tree.leaves_with_path(state)
    }
    sharded = {path for path, spec in found.items() if "fsdp" in spec}
    assert sharded == {
        path for path in found if path.endswith("kernel") and "alignment" not in path
    }
    assert {path for path in found if re.search("alignment|key|step", path)} - sharded
