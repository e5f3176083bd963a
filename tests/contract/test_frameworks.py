"""flax NNX and linen, and the parameter trees of model libraries."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

from magma_optax import attention_and_mlp, stacked, summarize, with_magma


class Net(nnx.Module):
    """With a frozen base and LoRA matrices beside it."""

    def __init__(self, rngs):
        self.base = nnx.Linear(6, 6, rngs=rngs)
        self.lora = nnx.LoRA(6, 2, 6, rngs=rngs)

    def __call__(self, x):
        return self.base(x) + self.lora(x)


def nnx_step(model, optimizer, form, wrt):
    x = jax.random.normal(jax.random.key(1), (16, 6))

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            return jnp.mean((model(x) - 2 * x) ** 2)

        value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, wrt))(model)
        optimizer.update(model, grads, **({"grad": grads} if form.needs_grad else {}))
        return value

    return [float(step(model, optimizer)) for _ in range(80)]


@pytest.mark.parametrize("wrt", [nnx.Param, nnx.LoRAParam], ids=["all", "LoRA"])
def test_nnx_optimizer_with_a_filter(form, wrt):
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, form.wrap(optax.adam(3e-2), key=2), wrt=wrt)
    before = jax.tree.map(jnp.array, nnx.to_pure_dict(nnx.state(model)))
    values = nnx_step(model, optimizer, form, wrt)
    assert values[-1] < 0.7 * values[0]
    after = nnx.to_pure_dict(nnx.state(model))
    if wrt is nnx.LoRAParam:
        chex.assert_trees_all_equal(after["base"], before["base"])
    if form.name != "skip_update":
        expected = 4 if wrt is nnx.Param else 2
        assert summarize(optimizer.opt_state)["num_blocks"] == expected


def test_nnx_sharding_metadata_sticks_to_momenta_and_not_to_scores(form):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):

        @nnx.jit
        def create():
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("x", None))
            model = nnx.Linear(16, 4, kernel_init=init, rngs=nnx.Rngs(0))
            tx = form.wrap(optax.rmsprop(1e-2), key=2)
            return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

        model, optimizer = create()
        by_row = NamedSharding(mesh, PartitionSpec("x"))
        assert model.kernel.get_value().sharding.is_equivalent_to(by_row, 2)
        state = form.state(optimizer.opt_state)
        for leaf in jax.tree.leaves((state.alignment, state.step, state.key)):
            assert leaf.sharding.is_fully_replicated
        x = jnp.ones((8, 16))
        grads = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads, **({"grad": grads} if form.needs_grad else {}))
        assert jnp.all(jnp.isfinite(model.kernel.get_value()))


def test_linen_partitioned_train_state_and_get_sharding(form):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    init = nn.with_partitioning(nn.initializers.lecun_normal(), ("x", None))
    model = nn.Dense(4, kernel_init=init)
    tx = form.wrap(optax.rmsprop(1e-2), key=2)

    def create():
        params = model.init(jax.random.key(0), jnp.ones((1, 16)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    sharding = nn.get_sharding(jax.eval_shape(create), mesh)
    state = jax.jit(create, out_shardings=sharding)()
    x = jnp.ones((8, 16))

    @jax.jit
    def step(state):
        grads = jax.grad(lambda p: jnp.mean(model.apply({"params": p}, x) ** 2))(state.params)
        updates, opt_state = tx.update(grads, state.opt_state, state.params, grad=grads)
        return state.replace(params=optax.apply_updates(state.params, updates), opt_state=opt_state)

    state = step(step(state))
    kernel = state.params["kernel"].value
    assert kernel.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec("x")), 2)
    for leaf in jax.tree.leaves(form.state(state.opt_state).alignment):
        assert leaf.sharding.is_fully_replicated and leaf.shape == ()


D, F, H, N, L, E, V = 8, 16, 4, 2, 3, 4, 32  # widths, heads, layers, experts, vocabulary


def kernel(*shape):
    return {"kernel": jnp.ones(shape)}


# Trees as the libraries make them, the axes that count layers and experts, and how many blocks
# attention and MLP have: (tree, blocks, number of blocks).
LIBRARIES = {
    "MaxText, scanned, dense and MoE": (
        {
            "token_embedder": {"embedding": jnp.ones((V, D))},
            "decoder": {
                "decoder_norm": {"scale": jnp.ones(D)},
                "logits_dense": kernel(D, V),
                "layers": {
                    "pre_self_attention_layer_norm": {"scale": jnp.ones((D, L))},
                    "post_self_attention_layer_norm": {"scale": jnp.ones((D, L))},
                    "self_attention": {
                        **{name: kernel(D, L, N, H) for name in ("query", "key", "value")},
                        "out": kernel(N, L, H, D),
                    },
                    "mlp": {
                        "wi_0": kernel(D, L, F),
                        "wi_1": kernel(D, L, F),
                        "wo": kernel(F, L, D),
                    },
                    "MoeBlock_0": {
                        "gate": kernel(D, L, E),
                        "wi_0": jnp.ones((E, L, D, F)),
                        "wi_1": jnp.ones((E, L, D, F)),
                        "wo": jnp.ones((E, L, F, D)),
                    },
                },
            },
        },
        lambda path, _: (0, 1) if "MoeBlock" in path else 1,
        4 * L + 3 * L + 3 * E * L,
    ),
    "Levanter, stacked": (
        {
            "embeddings": {"weight": jnp.ones((V, D))},
            "transformer": {
                "layers": {
                    "stacked": {
                        "input_layernorm": {"weight": jnp.ones((L, D))},
                        "self_attn": {
                            f"{name}_proj": {"weight": jnp.ones((L, D, D))} for name in "qkvo"
                        },
                        "mlp": {
                            name: {"weight": jnp.ones((L, D, F))}
                            for name in ("gate_proj", "up_proj", "down_proj")
                        },
                    }
                }
            },
            "lm_head": {"weight": jnp.ones((V, D))},
        },
        stacked(0),
        7 * L,
    ),
    "flax gemma": (
        {
            "embedder": {"input_embedding": jnp.ones((V, D))},
            "layers": {
                n: {
                    "pre_attention_norm": {"scale": jnp.ones(D)},
                    "attn": {
                        "q_einsum": {"w": jnp.ones((N, D, H))},
                        "kv_einsum": {"w": jnp.ones((2, N, D, H))},
                        "attn_vec_einsum": {"w": jnp.ones((N, H, D))},
                        "_query_norm": {"scale": jnp.ones(H)},
                    },
                    "mlp": {name: kernel(D, F) for name in ("gate_proj", "up_proj", "down_proj")},
                }
                for n in range(L)
            },
        },
        lambda path, _: 0 if path.endswith("kv_einsum/w") else (),  # keys and values apart
        (2 + 2 + 3) * L,
    ),
    "HF-Flax Llama": (
        {
            "model": {
                "embed_tokens": {"embedding": jnp.ones((V, D))},
                "norm": {"weight": jnp.ones(D)},
                "layers": {
                    str(n): {
                        "input_layernorm": {"weight": jnp.ones(D)},
                        "post_attention_layernorm": {"weight": jnp.ones(D)},
                        "self_attn": {f"{name}_proj": kernel(D, D) for name in "qkvo"},
                        "mlp": {
                            "gate_proj": kernel(D, F),
                            "up_proj": kernel(D, F),
                            "down_proj": kernel(F, D),
                        },
                    }
                    for n in range(L)
                },
            },
            "lm_head": kernel(D, V),
        },
        lambda path, _: (),
        7 * L,
    ),
    "EasyLM": (
        {
            "transformer": {
                "wte": {"embedding": jnp.ones((V, D))},
                "ln_f": kernel(D),
                "h": {
                    str(n): {
                        "attention_norm": kernel(D),
                        "ffn_norm": kernel(D),
                        "attention": {name: kernel(D, D) for name in ("wq", "wk", "wv", "wo")},
                        "feed_forward": {
                            "w1": kernel(D, F),
                            "w2": kernel(F, D),
                            "w3": kernel(D, F),
                        },
                    }
                    for n in range(L)
                },
            },
            "lm_head": kernel(D, V),
        },
        lambda path, _: (),
        7 * L,
    ),
    "google-deepmind gemma": (
        {
            "embedder": {"input_embedding": jnp.ones((V, D))},
            "final_norm": {"scale": jnp.ones(D)},
            **{
                f"layer_{n}": {
                    "pre_attention_norm": {"scale": jnp.ones(D)},
                    "pre_ffw_norm": {"scale": jnp.ones(D)},
                    "attn": {
                        "qkv_einsum": {"w": jnp.ones((3, N, D, H))},
                        "attn_vec_einsum": {"w": jnp.ones((N, H, D))},
                        "_key_norm": {"scale": jnp.ones(H)},
                    },
                    "mlp": {"gating_einsum": jnp.ones((2, F, D)), "linear": jnp.ones((F, D))},
                }
                for n in range(L)
            },
        },
        lambda path, _: 0 if path.endswith(("kv_einsum/w", "gating_einsum")) else (),
        (3 + 1 + 2 + 1) * L,
    ),
    "Tunix, dense and MoE": (
        {
            "embedder": {"input_embedding": jnp.ones((V, D))},
            "final_norm": {"w": jnp.ones(D)},
            "layers": [
                {
                    "input_layernorm": {"w": jnp.ones(D)},
                    "post_attention_layernorm": {"w": jnp.ones(D)},
                    "attn": {
                        **{f"{name}_proj": {"w": jnp.ones((D, N, H))} for name in "qkv"},
                        "o_proj": {"w": jnp.ones((N, H, D))},
                        "q_norm": {"w": jnp.ones(H)},
                        "k_norm": {"w": jnp.ones(H)},
                    },
                    "mlp": {
                        "router": kernel(D, E),
                        **{name: jnp.ones((E, D, F)) for name in ("gate_proj", "up_proj")},
                        "down_proj": jnp.ones((E, F, D)),
                    }
                    if n
                    else {
                        **{name: kernel(D, F) for name in ("gate_proj", "up_proj")},
                        "down_proj": kernel(F, D),
                    },
                }
                for n in range(L)
            ],
            "lm_head": {"w": jnp.ones((D, V))},
        },
        lambda path, leaf: 0 if "/mlp/" in path and len(leaf.shape) == 3 else (),
        4 * L + 3 + 3 * E * (L - 1),
    ),
    "flax lm1b": (
        {
            "decoder": {
                "Embed_0": {"embedding": jnp.ones((V, D))},
                "encoderdecoder_norm": {"scale": jnp.ones(D)},
                "logitdense": kernel(D, V),
                **{
                    f"encoderdecoderblock_{n}": {
                        "LayerNorm_0": {"scale": jnp.ones(D), "bias": jnp.ones(D)},
                        "MultiHeadDotProductAttention_0": {
                            **{name: kernel(D, N, H) for name in ("query", "key", "value")},
                            "out": kernel(N, H, D),
                        },
                        "MlpBlock_0": {
                            "Dense_0": {**kernel(D, F), "bias": jnp.ones(F)},
                            "Dense_1": {**kernel(F, D), "bias": jnp.ones(D)},
                        },
                    }
                    for n in range(L)
                },
            }
        },
        lambda path, _: (),
        6 * L,
    ),
    "nanoMoE": (
        {
            "wte": jnp.ones((V, D)),
            "wpe": jnp.ones((F, D)),
            "h": [
                {
                    "ln_1": {"scale": jnp.ones(D)},
                    "attn": {"c_attn": jnp.ones((D, 3 * D)), "c_proj": jnp.ones((D, D))},
                    "mlp": {
                        "router": jnp.ones((E, D)),
                        "experts": {"c_fc": jnp.ones((E, D, F)), "c_proj": jnp.ones((E, F, D))},
                    },
                }
                for _ in range(L)
            ],
        },
        lambda path, _: 0 if "experts" in path else (),
        (2 + 2 * E) * L,
    ),
}


def name_of(path):
    return jax.tree_util.keystr(path, simple=True, separator="/")


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_coin_a_layer_and_an_expert_in_the_trees_of_libraries(library):
    params, blocks, number = LIBRARIES[library]
    tx = with_magma(optax.adam(1e-2), where=attention_and_mlp, blocks=blocks)
    state = tx.init(params)
    assert summarize(state)["num_blocks"] == number
    updates, _ = jax.device_get(jax.jit(tx.update)(params, state, params))
    scored = {name_of(path) for path, _ in jax.tree.leaves_with_path(state.magma.alignment)}
    for path, leaf in jax.tree_util.tree_leaves_with_path(updates):
        name = name_of(path)
        if name not in scored:
            assert (leaf != 0).all(), f"{name} is none of the matrices and may not be masked"
            continue
        axes = blocks(name, leaf)
        axes = axes if isinstance(axes, tuple) else (axes,)
        whole = tuple(n for n in range(leaf.ndim) if n not in axes)
        assert (np.ptp(leaf, axis=whole) == 0).all(), "a slice shares one coin and one score"
