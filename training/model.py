"""The model: a qwen3moe decoder in JAX with a mixture of experts in every layer.

Owns the configuration, the parameters' shapes and the forward pass, once for training (experts have a capacity)
and once for evaluation (no token is dropped). Matrix products take bfloat16 inputs and sum in float32.
"""
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

F32, BF16 = jnp.float32, jnp.bfloat16


@dataclass(frozen=True)
class Config:
    vocab: int = 4096
    layers: int = 6
    d_model: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    experts: int = 32
    top_k: int = 4
    expert_ff: int = 128
    context: int = 512
    rope_base: float = 10000.0
    norm_eps: float = 1e-6


def init_params(config: Config, key: jax.Array) -> dict:
    """Normal(0, 0.02) matrices, the ones that write into the residual stream scaled by 1/sqrt(2 layers)."""
    c = config
    residual_scale = (2 * c.layers) ** -0.5
    matrices = {
        "q": (c.d_model, c.heads * c.head_dim), "k": (c.d_model, c.kv_heads * c.head_dim),
        "v": (c.d_model, c.kv_heads * c.head_dim), "o": (c.heads * c.head_dim, c.d_model),
        "router": (c.d_model, c.experts), "gate": (c.experts, c.d_model, c.expert_ff),
        "up": (c.experts, c.d_model, c.expert_ff), "down": (c.experts, c.expert_ff, c.d_model),
    }
    norms = {"q_norm": c.head_dim, "k_norm": c.head_dim, "attn_norm": c.d_model, "ffn_norm": c.d_model}

    def init_layer(key):
        keys = jax.random.split(key, len(matrices))
        layer = {n: 0.02 * jax.random.normal(k, s, F32) for k, (n, s) in zip(keys, matrices.items())}
        for name in ("o", "down"):
            layer[name] = layer[name] * residual_scale
        return layer | {name: jnp.ones(size) for name, size in norms.items()}

    key, *layer_keys = jax.random.split(key, c.layers + 1)
    return {"embedding": 0.02 * jax.random.normal(key, (c.vocab, c.d_model), F32),
            "layers": [init_layer(k) for k in layer_keys], "out_norm": jnp.ones(c.d_model)}


# --- matrix products ---------------------------------------------------------------------------------------------

def _row_major(x: jax.Array) -> jax.Array:
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """(..., m, k) x (..., k, n) with bfloat16 inputs and a float32 sum. XLA's fast CPU kernel takes row-major operands
    only; the constraints and barriers keep it from turning a transposition into another layout of the operand."""
    a, b = (_row_major(x) for x in jax.lax.optimization_barrier((a.astype(BF16), b.astype(BF16))))
    return _row_major(jnp.matmul(a, b, preferred_element_type=F32))


def _transposed(x: jax.Array) -> jax.Array:
    return _row_major(jnp.swapaxes(x.astype(BF16), -1, -2))


@jax.custom_vjp
def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """x (m, k) @ w (k, n), or the same with a leading batch axis on both."""
    return _dot(x, w)


def _matmul_forward(x, w):
    return _dot(x, w), (x, w)


def _matmul_backward(saved, dy):
    x, w = saved
    dx = _dot(dy, _transposed(w))
    dw = _dot(_transposed(x), dy)
    return dx.astype(x.dtype), dw.astype(w.dtype)


matmul.defvjp(_matmul_forward, _matmul_backward)


# --- attention ---------------------------------------------------------------------------------------------------

def rms_norm(x, weight, eps):
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps) * weight


def rope(x, base):
    """NEOX rotary embedding: rotates (x[i], x[i + head_dim / 2]). x: (batch, time, heads, head_dim)."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] * base ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def causal_attention(q, k, v, block=128):
    """q, k, v: (batch, heads, time, head_dim). Each block of queries sees only the keys up to its own end."""
    time, outputs = q.shape[2], []
    for start in range(0, time, block):
        end = min(start + block, time)
        scores = matmul(q[:, :, start:end], jnp.swapaxes(k[:, :, :end], -1, -2))
        allowed = jnp.arange(start, end)[:, None] >= jnp.arange(end)[None, :]
        weights = jax.nn.softmax(jnp.where(allowed, scores, -1e30), axis=-1)
        outputs.append(matmul(weights, v[:, :, :end]))
    return jnp.concatenate(outputs, axis=2)


def attention(config: Config, layer: dict, x):
    c, (batch, time, _) = config, x.shape
    flat = x.reshape(-1, c.d_model)
    q = matmul(flat, layer["q"]).reshape(batch, time, c.heads, c.head_dim)
    k = matmul(flat, layer["k"]).reshape(batch, time, c.kv_heads, c.head_dim)
    v = matmul(flat, layer["v"]).reshape(batch, time, c.kv_heads, c.head_dim)
    q = rope(rms_norm(q, layer["q_norm"], c.norm_eps), c.rope_base) * c.head_dim ** -0.5
    k = rope(rms_norm(k, layer["k_norm"], c.norm_eps), c.rope_base)
    k, v = (jnp.repeat(t, c.heads // c.kv_heads, axis=2) for t in (k, v))
    y = causal_attention(*(jnp.swapaxes(t, 1, 2) for t in (q, k, v)))
    return matmul(jnp.swapaxes(y, 1, 2).reshape(-1, c.heads * c.head_dim), layer["o"]).reshape(x.shape)


# --- mixture of experts ------------------------------------------------------------------------------------------
# A "slot" is a row of an expert's input buffer, a "choice" is one of the top_k experts of a token. Both directions
# are gathers: the backward pass of one is the forward pass of the other, so that no scatter-add is needed.

@jax.custom_vjp
def to_slots(x, token_of_slot, slot_of_choice):
    """Rows of x (tokens, d) into the slots; a slot without a token (index = tokens) gets zeros."""
    return jnp.take(x, token_of_slot, axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def from_slots(y, token_of_slot, slot_of_choice):
    """Sums the slots of each token's choices; a dropped choice (index = slots) adds zero."""
    return sum(jnp.take(y, slot_of_choice[:, i], axis=0, mode="fill", fill_value=0)
               for i in range(slot_of_choice.shape[1]))


to_slots.defvjp(lambda x, t, s: (to_slots(x, t, s), (t, s)),
                lambda saved, dy: (from_slots(dy, *saved), None, None))
from_slots.defvjp(lambda y, t, s: (from_slots(y, t, s), (t, s)),
                  lambda saved, dy: (to_slots(dy, *saved), None, None))


@jax.custom_vjp
def weights_to_slots(weights, choice_of_slot, slot_of_choice):
    return jnp.take(weights.reshape(-1), choice_of_slot, mode="fill", fill_value=0)


weights_to_slots.defvjp(lambda w, c, s: (weights_to_slots(w, c, s), s),
                        lambda s, dy: (jnp.take(dy, s, mode="fill", fill_value=0), None, None))


def assign_slots(chosen, experts, capacity):
    """chosen: (tokens, top_k) expert numbers. Returns for each slot its choice, and for each choice its slot."""
    choices = chosen.size
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    rank = jnp.argsort(order)
    counts = jnp.sum(flat[:, None] == jnp.arange(experts)[None, :], axis=0)
    starts = jnp.cumsum(counts) - counts
    place = rank - starts[flat]
    slot_of_choice = jnp.where(place < capacity, flat * capacity + place, experts * capacity)
    place = jnp.arange(capacity)[None, :]
    source = jnp.minimum(starts[:, None] + place, choices - 1)
    choice_of_slot = jnp.where(place < counts[:, None], order[source], choices)
    return choice_of_slot.reshape(-1), slot_of_choice.reshape(chosen.shape), counts


def moe(config: Config, layer: dict, x, capacity: int):
    """x: (tokens, d_model). Returns the output, the load-balancing loss, the tokens per expert and the dropped share.

    The loss is experts * sum_e(share of choices that fell on e * mean router probability of e), from the Switch
    Transformer (arXiv 2101.03961, equations 4 to 6) with top-k choices instead of top-1; it is 1 when balanced.
    """
    c = config
    probabilities = jax.nn.softmax(jnp.matmul(x, layer["router"], preferred_element_type=F32), axis=-1)
    weights, chosen = jax.lax.top_k(probabilities, c.top_k)
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    choice_of_slot, slot_of_choice, counts = assign_slots(chosen, c.experts, capacity)
    token_of_slot = choice_of_slot // c.top_k
    inputs = to_slots(x.astype(BF16), token_of_slot, slot_of_choice).reshape(c.experts, capacity, c.d_model)
    hidden = jax.nn.silu(matmul(inputs, layer["gate"])) * matmul(inputs, layer["up"])
    slot_weights = weights_to_slots(weights, choice_of_slot, slot_of_choice)
    hidden = hidden * slot_weights.reshape(c.experts, capacity, 1)
    outputs = matmul(hidden, layer["down"]).reshape(-1, c.d_model)
    y = from_slots(outputs, token_of_slot, slot_of_choice)
    share = counts / chosen.size
    balance = c.experts * jnp.sum(share * jnp.mean(probabilities, axis=0))
    dropped = jnp.mean(slot_of_choice == c.experts * capacity)
    return y, balance, counts, dropped


# --- the whole model ---------------------------------------------------------------------------------------------

def forward(config: Config, params: dict, tokens, capacity: int):
    """tokens: (batch, time). Returns the logits (batch * time, vocab) and per-layer balance, counts, dropped."""
    c = config
    x = params["embedding"][tokens]
    statistics = []
    for layer in params["layers"]:
        x = x + attention(c, layer, rms_norm(x, layer["attn_norm"], c.norm_eps))
        normed = rms_norm(x, layer["ffn_norm"], c.norm_eps).reshape(-1, c.d_model)
        y, *seen = moe(c, layer, normed, capacity)
        x = x + y.reshape(x.shape)
        statistics.append(seen)
    x = rms_norm(x, params["out_norm"], c.norm_eps).reshape(-1, c.d_model)
    logits = matmul(x, params["embedding"].T)
    return logits, [jnp.stack(column) for column in zip(*statistics)]


def token_losses(logits, targets):
    """Cross entropy of each target, in nats."""
    picked = jnp.take_along_axis(logits, targets.reshape(-1, 1), axis=-1)[:, 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def training_loss(config: Config, params: dict, windows, balance_weight: float, capacity_factor: float):
    """windows: (batch, context + 1) tokens. Returns the loss and its parts."""
    inputs, targets = windows[:, :-1], windows[:, 1:]
    capacity = int(capacity_factor * inputs.size * config.top_k / config.experts)
    logits, (balance, counts, dropped) = forward(config, params, inputs, capacity)
    cross_entropy = jnp.mean(token_losses(logits, targets))
    parts = {"loss": cross_entropy, "balance": jnp.mean(balance), "dropped": jnp.mean(dropped)}
    return cross_entropy + balance_weight * jnp.mean(balance), parts


@partial(jax.jit, static_argnums=0)
def evaluate(config: Config, params: dict, windows):
    """Losses (batch, time) of the targets and the tokens per expert (layers, experts), with no token dropped."""
    inputs, targets = windows[:, :-1], windows[:, 1:]
    logits, (_, counts, _) = forward(config, params, inputs, inputs.size)
    return token_losses(logits, targets).reshape(targets.shape), counts
