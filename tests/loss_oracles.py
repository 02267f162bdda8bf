"""Oracles of the losses: each again as naive float64 loops, with nothing taken from the product."""

from typing import Any

import numpy as np

from tests.oracles import Floats, Ints, cosine, each_pair


def triplet(*batch: Any, margin: float = 0.2, miner: str = "semihard") -> float:
    """Mean over the triplets of the miner's kind of what they violate their margin by, of unit embeddings."""
    violations = []
    positive, negative = each_pair(*batch)
    for i, a, p in positive:
        for j, _, n in negative:
            if i != j:
                continue
            near = float(np.linalg.norm(a / np.linalg.norm(a) - p / np.linalg.norm(p)))
            far = float(np.linalg.norm(a / np.linalg.norm(a) - n / np.linalg.norm(n)))
            kind = miner == "all" or (far > near if miner == "semihard" else far <= near)
            if kind and near - far + margin > 0:
                violations.append(near - far + margin)
    return float(np.mean(violations)) if violations else 0.0


def multi_similarity(
    *batch: Any, alpha: float = 2.0, beta: float = 50.0, base: float = 0.5, epsilon: float = 0.1
) -> float:
    """Multi-similarity with its miner: anchor by anchor, and then the mean over anchors."""
    positive, negative = each_pair(*batch)
    count, total = len(batch[0]), 0.0
    for i in range(count):
        near = [cosine(a, b) for anchor, a, b in positive if anchor == i]
        far = [cosine(a, b) for anchor, a, b in negative if anchor == i]
        if not near or not far:
            continue
        pull = [np.exp(-alpha * (s - base)) for s in near if s - epsilon < max(far)]
        push = [np.exp(beta * (s - base)) for s in far if s + epsilon > min(near)]
        total += float(np.log(1 + sum(pull)) / alpha + np.log(1 + sum(push)) / beta)
    return total / count


def proxy_nca(embeddings: Floats, labels: Ints, proxies: Floats, *, temperature: float = 1 / 9) -> float:
    """ProxyNCA++: -log of the softmax, over proxies (C, d), of -‖x − p‖² / T, all at unit length."""
    total = 0.0
    for x, label in zip(embeddings, labels, strict=True):
        apart = [x / np.linalg.norm(x) - p / np.linalg.norm(p) for p in proxies]
        scores = [-float(each @ each) / temperature for each in apart]
        total += max(scores) + float(np.log(sum(np.exp(s - max(scores)) for s in scores))) - scores[label]
    return total / len(labels)


def proxy_anchor(
    embeddings: Floats, labels: Ints, proxies: Floats, *, margin: float = 0.1, alpha: float = 32.0
) -> float:
    """Proxy-Anchor: proxies (C, d) pull their own images, a mean over those present, and push all others."""
    pulls, pushes = [], []
    for c, p in enumerate(proxies):
        own = [cosine(x, p) for x, label in zip(embeddings, labels, strict=True) if label == c]
        others = [cosine(x, p) for x, label in zip(embeddings, labels, strict=True) if label != c]
        if own:
            pulls.append(np.log(1 + sum(np.exp(-alpha * (s - margin)) for s in own)))
        pushes.append(np.log(1 + sum(np.exp(alpha * (s + margin)) for s in others)))
    return float(np.mean(pulls) + np.mean(pushes))


def smoothed_cross_entropy(logits: Floats, labels: Ints, smoothing: float) -> float:
    """Mean over rows (B, C) of −Σ_c q_c log softmax_c, q = 1 − smoothing on the label, the rest spread."""
    total = 0.0
    for row, label in zip(logits, labels, strict=True):
        logs = row - row.max() - np.log(sum(np.exp(x - row.max()) for x in row))
        for c, log in enumerate(logs):
            total -= ((1 - smoothing) * (c == label) + smoothing / len(row)) * log
    return total / len(labels)


def layer_norm(x: Floats, weight: Floats, bias: Floats) -> Floats:
    normal: Floats = (x - x.mean()) / np.sqrt(((x - x.mean()) ** 2).mean() + 1e-5)
    return normal * weight + bias


def libc(
    embeddings: Floats, labels: Ints, weights: dict[str, Floats], *, layers: int = 1, heads: int = 2,
    temperature: float = 0.2, smoothing: float = 0.1,
) -> float:  # fmt: skip
    """LIBC node by node and head by head; `weights` are the loss's own, by name."""
    nodes = embeddings
    for layer in range(layers):
        w = {name.removeprefix(f"messages.{layer}."): value for name, value in weights.items()}
        projected = nodes @ w["self_attn.in_proj_weight"].T + w["self_attn.in_proj_bias"]
        query, key, value = (np.split(part, heads, axis=1) for part in np.split(projected, 3, axis=1))
        refined = []
        for i, node in enumerate(nodes):
            message = list[Floats]()
            for q, k, v in zip(query, key, value, strict=True):  # head by head
                shares = np.exp(k @ q[i] / np.sqrt(len(q[i])))
                message.append(shares @ v / shares.sum())
            told = w["self_attn.out_proj.weight"] @ np.concatenate(message) + w["self_attn.out_proj.bias"]
            x = layer_norm(node + told, w["norm1.weight"], w["norm1.bias"])
            hidden = np.maximum(w["linear1.weight"] @ x + w["linear1.bias"], 0)
            x = x + w["linear2.weight"] @ hidden + w["linear2.bias"]
            refined.append(layer_norm(x, w["norm2.weight"], w["norm2.bias"]))
        nodes = np.array(refined)
    total = 0.0
    for name, rows in (("classify", embeddings), ("classify_refined", nodes)):
        logits = (rows @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]) / temperature
        total += smoothed_cross_entropy(logits, labels, smoothing)
    return total


def mixed_multi_similarity(
    embeddings: Floats, labels: Ints, mixed: Floats, mixtures: list[tuple[int, int, float]], *,
    alpha: float = 2.0, beta: float = 50.0, base: float = 0.5,
) -> float:  # fmt: skip
    """Metrix: multi-similarity of images with mixtures (first, second, share), whose labels lie in [0, 1]."""
    total = 0.0
    for a, label in zip(embeddings, labels, strict=True):
        pull, push = 1.0, 1.0
        for v, (first, second, share) in zip(mixed, mixtures, strict=True):
            y = share * (labels[first] == label) + (1 - share) * (labels[second] == label)
            pull += y * np.exp(-alpha * (cosine(a, v) - base))
            push += (1 - y) * np.exp(beta * (cosine(a, v) - base))
        total += float(np.log(pull) / alpha + np.log(push) / beta)
    return total / len(labels)
