"""Algorithm 1 of the paper in float64 NumPy: one step, one leaf, one block at a time.

Slow, and written from the paper and the documented behaviour alone: it shares no code with the
package. Trees are flat dicts from the leaf's path to its array. Updates carry the paper's sign,
theta <- theta - update. Coins are an input, path -> array of bools with one entry a block, so that
nothing here draws a random number.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Tree = dict[str, Any]


# Blocks.


def block_axes(blocks: Any, path: str, leaf: np.ndarray) -> tuple[int, ...]:
    """The axes that index the blocks of a leaf; the others lie within each block."""
    axes = tuple(range(leaf.ndim))
    if leaf.ndim == 0 or blocks == "leaf":
        return ()
    if blocks == "row":
        return axes[:-1]
    if blocks == "column":
        return axes if leaf.ndim == 1 else axes[:-2] + axes[-1:]
    if blocks == "element":
        return axes
    chosen = blocks(path, leaf)
    chosen = (chosen,) if isinstance(chosen, int) else chosen
    return tuple(sorted(axis % leaf.ndim for axis in chosen))


def block_shape(leaf: np.ndarray, axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(leaf.shape[axis] for axis in axes)


def each_block(leaf: np.ndarray, axes: tuple[int, ...]) -> Iterator[tuple[tuple, tuple]]:
    """(index of a block, place of its elements in the leaf), for every block."""
    for index in np.ndindex(*block_shape(leaf, axes)):
        place = [slice(None)] * leaf.ndim
        for axis, i in zip(axes, index, strict=True):
            place[axis] = i
        yield index, tuple(place)


# Algorithm 1.


def sigmoid(x: float) -> float:
    return 1 / (1 + np.exp(-x))


def cossim(mu: np.ndarray, g: np.ndarray) -> float:
    """Re <mu, g> / (|mu| |g|); zero where either vector is."""
    mu, g = np.ravel(mu), np.ravel(g)
    norms = np.linalg.norm(mu) * np.linalg.norm(g)
    return np.vdot(mu, g).real / norms if norms else 0.0


def at(value: Any, t: int) -> Any:
    """A number, or a schedule at the zero-based step t."""
    return value(t) if callable(value) else value


def everywhere(path: str, leaf: np.ndarray) -> bool:
    return True


@dataclasses.dataclass
class Magma:
    """Magma and its state: s, one score a block; mu, an EMA of gradients; t, the step."""

    survival_prob: Any = 0.5
    temperature: Any = 2.0
    b1: float = 0.9
    score_decay: Any = 0.9
    initial_score: float = 0.5
    damping: bool = True
    rescale: bool = False
    where: Callable = everywhere
    blocks: Any = "leaf"
    t: int = 0
    s: Tree = dataclasses.field(default_factory=dict)
    s_tilde: Tree = dataclasses.field(default_factory=dict)
    mu: Tree = dataclasses.field(default_factory=dict)
    previous: Tree = dataclasses.field(default_factory=dict)

    def step(self, delta: Tree, g: Tree, mu: Tree, coins: Tree) -> Tree:
        """Mask and damp the update delta, given gradients and first moments."""
        masked = {path: self._leaf(path, delta[path], g, mu, coins) for path in delta}
        self.t += 1
        return masked

    def _leaf(self, path: str, delta: np.ndarray, g: Tree, mu: Tree, coins: Tree) -> np.ndarray:
        if not self.where(path, delta):
            return delta
        axes = block_axes(self.blocks, path, delta)
        decay, tau = at(self.score_decay, self.t), at(self.temperature, self.t)
        s = self.s.setdefault(path, np.full(block_shape(delta, axes), self.initial_score, float))
        s_tilde = self.s_tilde.setdefault(path, np.empty(s.shape))
        masked = np.empty_like(delta)
        for b, place in each_block(delta, axes):
            s_tilde[b] = sigmoid(cossim(mu[path][place], g[path][place]) / tau)
            s[b] = decay * s[b] + (1 - decay) * s_tilde[b]
            p = s_tilde[b] if self.survival_prob == "alignment" else at(self.survival_prob, self.t)
            factor = (s[b] if self.damping else 1) / (p if self.rescale else 1)
            masked[place] = factor * delta[place] if coins[path][b] else 0
        return masked

    def ema(self, g: Tree) -> Tree:
        """The first moment with g mixed in; kept for the next step."""
        mu = {p: self.b1 * self.mu.get(p, 0) + (1 - self.b1) * g[p] for p in g}
        self.mu = mu
        return mu

    def step_from_momentum(self, delta: Tree, coins: Tree) -> Tree:
        """No gradients given, delta moves like a momentum: undo its EMA."""
        g = {p: delta[p] - self.b1 * self.previous.get(p, 0) for p in delta}
        self.previous = delta
        return self.step(delta, g, delta, coins)

    def step_from_gradient(self, delta: Tree, coins: Tree) -> Tree:
        """No gradients given, delta moves like a gradient: its EMA is the first moment."""
        return self.step(delta, delta, self.ema(delta), coins)


def skip_update(
    delta: Tree, coins: Tree, p: float, where: Callable = everywhere, blocks: Any = "leaf"
) -> Tree:
    masked = {path: np.array(leaf) for path, leaf in delta.items()}
    for path, leaf in delta.items():
        if where(path, leaf):
            for b, place in each_block(leaf, block_axes(blocks, path, leaf)):
                masked[path][place] = leaf[place] / p if coins[path][b] else 0
    return masked


# Base optimizers, for one leaf: (state, g, t = 1, 2, ...) -> (delta, state). An EMA of raw
# gradients is called "mu" in the state. State starts at zero.

LEARNING_RATE = 0.03


def adam(state, g, t, b1=0.9, b2=0.999, eps=1e-8, nesterov=False):
    mu = b1 * state.get("mu", 0) + (1 - b1) * g
    nu = b2 * state.get("nu", 0) + (1 - b2) * np.abs(g) ** 2
    mu_hat, nu_hat = mu / (1 - b1**t), nu / (1 - b2**t)
    if nesterov:  # Dozat 2016: the next step's momentum, with this step's gradient.
        mu_hat = b1 * mu / (1 - b1 ** (t + 1)) + (1 - b1) * g / (1 - b1**t)
    return LEARNING_RATE * mu_hat / (np.sqrt(nu_hat) + eps), {"mu": mu, "nu": nu}


def rmsprop(state, g, t, decay=0.9, eps=1e-8):
    """As in torch: eps outside the root, no bias correction."""
    nu = decay * state.get("nu", 0) + (1 - decay) * np.abs(g) ** 2
    return LEARNING_RATE * g / (np.sqrt(nu) + eps), {"nu": nu}


def sgd(state, g, t, momentum=0.9):
    trace = momentum * state.get("trace", 0) + g
    return LEARNING_RATE * trace, {"trace": trace}


def laprop(state, g, t, b1=0.9, b2=0.999, eps=1e-15):
    """Normalise first, then average: its momentum is no EMA of raw gradients."""
    nu = b2 * state.get("nu", 0) + (1 - b2) * np.abs(g) ** 2
    normalised = g / (np.sqrt(nu / (1 - b2**t)) + eps)
    m = b1 * state.get("m", 0) + (1 - b1) * normalised
    return LEARNING_RATE * m / (1 - b1**t), {"m": m, "nu": nu}


def muon(state, g, t, beta=0.95):
    """Orthogonalised Nesterov momentum for matrices, NAdam for the rest."""
    if g.ndim != 2:
        return adam(state, g, t, nesterov=True)
    mu = beta * state.get("mu", 0) + (1 - beta) * g
    mu_hat = beta * mu / (1 - beta ** (t + 1)) + (1 - beta) * g / (1 - beta**t)
    fan_in, fan_out = g.shape
    scale = np.sqrt(max(1, fan_out / fan_in))
    return LEARNING_RATE * scale * newton_schulz(mu_hat), {"mu": mu}


def newton_schulz(x: np.ndarray, steps: int = 5, eps: float = 1e-8) -> np.ndarray:
    """Move every singular value of x towards 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x / (np.linalg.norm(x) + eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


BASES = {"adam": adam, "rmsprop": rmsprop, "sgd": sgd, "laprop": laprop, "muon": muon}


# Training.


@dataclasses.dataclass
class Step:
    """What one step of training did."""

    update: Tree
    scores: Tree
    s_tilde: Tree


def train(
    theta: Tree,
    gradient: Callable[[Tree, int], Tree],
    base: Callable,
    magma: Magma,
    coins: list[Tree],
    mu_from: str = "own",
    sparse_state: bool = False,
) -> tuple[Tree, list[Step]]:
    """Train for one step per entry of coins.

    mu_from: "own" for Magma's EMA of the gradients, "base" for the "mu" in the base's state;
    "momentum" or "gradient" for an estimate from the base's update, without gradients.
    """
    state: Tree = {path: {} for path in theta}
    history = []
    for t, m in enumerate(coins):
        g = gradient(theta, t)
        moved = {path: base(state[path], g[path], t + 1) for path in theta}
        delta = {path: d for path, (d, _) in moved.items()}
        new_state = {path: new for path, (_, new) in moved.items()}
        old_mu = magma.mu
        if mu_from == "momentum":
            update = magma.step_from_momentum(delta, m)
        elif mu_from == "gradient":
            update = magma.step_from_gradient(delta, m)
        elif mu_from == "base":
            update = magma.step(delta, g, {p: new_state[p]["mu"] for p in theta}, m)
        else:
            update = magma.step(delta, g, magma.ema(g), m)
        if sparse_state:
            new_state = {p: hold_dropped(new_state[p], state[p], p, magma, m) for p in theta}
            magma.mu = hold_all_dropped(magma.mu, old_mu, magma, m)
        state = new_state
        theta = {path: theta[path] - update[path] for path in theta}
        history.append(Step(update, _copies(magma.s), _copies(magma.s_tilde)))
    return theta, history


def hold_dropped(new: Tree, old: Tree, path: str, magma: Magma, coins: Tree) -> Tree:
    """The sparse-momentum ablation: what is kept of a dropped block stays as it was."""
    held = {name: np.array(leaf) for name, leaf in new.items()}
    for name, leaf in held.items():
        if magma.where(path, leaf):
            before = np.broadcast_to(old.get(name, 0), leaf.shape)
            for b, place in each_block(leaf, block_axes(magma.blocks, path, leaf)):
                if not coins[path][b]:
                    leaf[place] = before[place]
    return held


def hold_all_dropped(new: Tree, old: Tree, magma: Magma, coins: Tree) -> Tree:
    pairs = {p: ({"mu": new[p]}, {"mu": old.get(p, 0)}) for p in new}
    return {p: hold_dropped(*pair, p, magma, coins)["mu"] for p, pair in pairs.items()}


def _copies(tree: Tree) -> Tree:
    return {path: leaf.copy() for path, leaf in tree.items()}
