"""The baselines of examples/paper in float64 NumPy, from the formulas of their papers.

Slow and plain: one matrix at a time, loops over steps, no code shared with the JAX side. Each
function takes the gradients of all steps and returns the directions of all steps.
"""

import numpy as np


def adam(grads, b1=0.9, b2=0.999, eps=1e-8):
    m = v = np.zeros_like(grads[0])
    out = []
    for t, g in enumerate(grads, 1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        out.append((m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps))
    return out


def momenta(grads, b1=0.9):
    m = np.zeros_like(grads[0])
    out = []
    for g in grads:
        m = b1 * m + (1 - b1) * g
        out.append(m)
    return out


def c_adam(grads, b1=0.9, b2=0.999, eps=1e-8):
    out = []
    for u, m, g in zip(adam(grads, b1, b2, eps), momenta(grads, b1), grads, strict=True):
        phi = (m * g > 0).astype(float)
        out.append(u * phi / max(phi.mean(), 1e-3))
    return out


def laprop(grads, b1=0.9, b2=0.999, eps=1e-15):
    m = v = np.zeros_like(grads[0])
    out = []
    for t, g in enumerate(grads, 1):
        v = b2 * v + (1 - b2) * g**2
        m = b1 * m + (1 - b1) * g / (np.sqrt(v / (1 - b2**t)) + eps)
        out.append(m / (1 - b1**t))
    return out


def mgup(grads, tau=0.5, gamma=0.1):
    out = []
    for u, g in zip(adam(grads), grads, strict=True):
        agreement = (u * g).ravel()
        best = sorted(range(agreement.size), key=lambda i: -agreement[i])[: int(tau * u.size)]
        phi = np.full(u.size, gamma)
        phi[best] = 1 / tau
        out.append(phi.reshape(u.shape) * u)
    return out


def apollo(grads, projections, growth=1.01, b1=0.9, b2=0.999, eps=1e-6):
    """`projections`: P of each step, (smaller side, r)."""
    transposed = grads[0].shape[0] > grads[0].shape[1]
    m = v = 0.0
    last, out = None, []
    for t, (g, p) in enumerate(zip(grads, projections, strict=True), 1):
        g = g.T if transposed else g
        r = p.T @ g
        m = b1 * m + (1 - b1) * r
        v = b2 * v + (1 - b2) * r**2
        r_tilde = m / (np.sqrt(v) + eps)
        scaled = np.zeros_like(g)
        for j in range(g.shape[1]):
            s = np.linalg.norm(r_tilde[:, j]) / (np.linalg.norm(r[:, j]) + 1e-8)
            scaled[:, j] = g[:, j] * s
        norm = np.linalg.norm(scaled)
        if last is not None:
            limiter = max(norm / (last + 1e-8), growth) / growth
            scaled, norm = scaled / limiter, norm / limiter
        last = norm
        u = np.sqrt(1 - b2**t) / (1 - b1**t) * scaled
        out.append(u.T if transposed else u)
    return out


def k_means(x, k, steps=10):
    """Lloyd's algorithm on numbers, started at mean + std * (-1 ... 1)."""
    centres = [x.mean() + x.std() * (2 * c / (k - 1) - 1) for c in range(k)]
    for _ in range(steps):
        labels = np.array([np.argmin([abs(value - c) for c in centres]) for value in x])
        centres = [x[labels == c].mean() if (labels == c).any() else centres[c] for c in range(k)]
    return np.array([np.argmin([abs(value - c) for c in centres]) for value in x])


def lower_median(x):
    return np.sort(x)[(len(x) - 1) // 2]


def sgg(grads, k=3, interval=500, decay=0.99, low=0.1, high=10.0):
    """`grads`: for each layer the gradients of all steps. Adam is the base."""
    directions = [adam(layer) for layer in grads]
    moments = [momenta(layer) for layer in grads]
    labels = [np.zeros(layer[0].size, int) for layer in grads]
    scale = [np.ones(k) for _ in grads]
    out = [[] for _ in grads]
    for t in range(1, len(grads[0]) + 1):
        if t % interval == 0:
            m = [layer[t - 1].ravel() for layer in moments]
            deviations = [abs(x - x.mean()) for x in m]
            overall = lower_median(np.concatenate(deviations))
            for i, x in enumerate(m):
                labels[i] = k_means(x, k)
                for c in set(labels[i]):
                    d = lower_median(deviations[i][labels[i] == c])
                    new = decay * scale[i][c] + (1 - decay) * overall / (d + 1e-8)
                    scale[i][c] = min(max(new, low), high)
        for i, layer in enumerate(directions):
            u = layer[t - 1]
            out[i].append(u * scale[i][labels[i]].reshape(u.shape))
    return out


def soap(grads, bases, b1=0.95, b2=0.95, eps=1e-8, b=0.95, interval=10):
    """`bases`: Q_L and Q_R after the first gradient (None: that side is not preconditioned)."""
    rows, columns = grads[0].shape
    ql = np.eye(rows) if bases[0] is None else bases[0]
    qr = np.eye(columns) if bases[1] is None else bases[1]
    left = (1 - b) * grads[0] @ grads[0].T
    right = (1 - b) * grads[0].T @ grads[0]
    m = v = np.zeros_like(grads[0])
    out = [np.zeros_like(grads[0])]
    for t, g in enumerate(grads[1:], 1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * (ql.T @ g @ qr) ** 2
        n = (ql.T @ (m / (1 - b1**t)) @ qr) / (np.sqrt(v / (1 - b2**t)) + eps)
        out.append(ql @ n @ qr.T)
        left = b * left + (1 - b) * g @ g.T
        right = b * right + (1 - b) * g.T @ g
        if t % interval == 0:
            if bases[0] is not None:
                order = np.argsort(-np.diag(ql.T @ left @ ql))
                ql, v = np.linalg.qr((left @ ql)[:, order])[0], v[order]
            if bases[1] is not None:
                order = np.argsort(-np.diag(qr.T @ right @ qr))
                qr, v = np.linalg.qr((right @ qr)[:, order])[0], v[:, order]
    return out


def stable_spam(grads, b1=0.9, b2=0.999, eps=1e-8, g1=0.7, g2=0.9, g3=0.999, interval=1000):
    threshold = norm_m = norm_v = 0.0
    m = v = np.zeros_like(grads[0])
    steps, out = 0, []
    for t, g in enumerate(grads, 1):
        g_max = abs(g).max()
        threshold = g3 * threshold + (1 - g3) * g_max
        t_hat = threshold / (1 - g3**t)
        g = np.where(abs(g) > t_hat, g / g_max * t_hat, g)
        norm = np.linalg.norm(g)
        norm_m = g1 * norm_m + (1 - g1) * norm
        norm_v = g2 * norm_v + (1 - g2) * norm**2
        g = g / norm * (norm_m / (1 - g1**t)) / (np.sqrt(norm_v / (1 - g2**t)) + eps)
        if t % interval == 0:
            m = v = np.zeros_like(g)
            steps = 0
        steps += 1
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        out.append((m / (1 - b1**steps)) / (np.sqrt(v / (1 - b2**steps)) + eps))
    return out
