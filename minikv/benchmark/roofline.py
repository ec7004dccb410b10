"""Bytes and operations counted from a model's shape, and the time that they take at least on a machine.

A decode step reads every weight once and every kept key and value once: memory bounds it. A prefill multiplies every
weight with every token and every query with every earlier key: arithmetic bounds it.
"""

from __future__ import annotations

from minikv.config import Config

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def linear_weights(config: Config) -> int:
    """Weights of all layers' projections, biases and norms apart: those that each token is multiplied with."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    attention = config.hidden_size * (2 * queries + 2 * keys)
    return config.layers * (attention + 3 * config.hidden_size * config.intermediate_size)


def _small_weights(config: Config) -> int:
    """Norms, and biases where there are some."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    biases = config.qkv_bias * (queries + 2 * keys) + config.output_bias * config.hidden_size
    return config.layers * (2 * config.hidden_size + biases) + config.hidden_size


def all_weights(config: Config) -> int:
    """Weights of the whole model; a tied head is the embedding table and counts once."""
    tables = 1 if config.tied_head else 2
    return linear_weights(config) + _small_weights(config) + tables * config.vocab_size * config.hidden_size


def weight_bytes_read(config: Config, element_bytes: int) -> int:
    """Bytes of weights that one decode step reads: all layers, the head, and one row of the embeddings."""
    read = linear_weights(config) + _small_weights(config) + config.hidden_size * (config.vocab_size + 1)
    return read * element_bytes


def entry_bytes(config: Config, element_bytes: int) -> int:
    """Bytes of the keys and values of one token in one layer."""
    return 2 * config.kv_heads * config.head_dim * element_bytes


def entries_read(kept: int, layers: int, steps: int) -> float:
    """Cache entries of all layers that a decode step reads, as a mean over `steps`: step i reads i more in each layer.

    `kept` is what all layers together hold after the prefill.
    """
    return kept + layers * (steps + 1) / 2


def prefill_multiply_adds(config: Config, length: int) -> int:
    """Multiply-adds of a prompt of `length` tokens: projections, causal attention, the head for the last token only.

    Query i meets i keys, once for the score and once for the value.
    """
    pairs = length * (length + 1) // 2
    attention = config.layers * config.heads * config.head_dim * 2 * pairs
    return length * linear_weights(config) + attention + config.vocab_size * config.hidden_size
