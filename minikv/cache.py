"""The KV cache: which entries are kept, at which positions, in how many bytes.

Each layer owns its buffers and knows the original position of every entry it keeps. The next token's position
follows from the tokens seen, never from the number of entries kept. All state of a prompt is in here, so two
calls cannot influence each other.
"""

from __future__ import annotations

import torch
from einops import repeat
from torch import Tensor


class LayerCache:
    """Keys and values of one layer, with the original position of each entry.

    Buffers are allocated once for `capacity` entries and written in place; when they are full they double.
    """

    def __init__(self, batch: int, kv_heads: int, head_dim: int, capacity: int, dtype: torch.dtype, device: torch.device):
        shape = (batch, kv_heads, max(capacity, 1))
        self._keys = torch.empty(*shape, head_dim, dtype=dtype, device=device)
        self._values = torch.empty(*shape, head_dim, dtype=dtype, device=device)
        self._chosen = torch.empty(batch, kv_heads, 0, dtype=torch.long, device=device)  # positions left by an eviction
        self.kept = 0  # entries held
        self.seen = 0  # tokens this layer has been given, evicted ones included: the next token's position

    @property
    def keys(self) -> Tensor:  # [batch, kv_heads, kept, head_dim]
        return self._keys[:, :, : self.kept]

    @property
    def values(self) -> Tensor:  # [batch, kv_heads, kept, head_dim]
        return self._values[:, :, : self.kept]

    @property
    def positions(self) -> Tensor:  # [batch, kv_heads, kept] int64, ascending
        batch, kv_heads, chosen = self._chosen.shape
        later = torch.arange(self.seen - (self.kept - chosen), self.seen, device=self._chosen.device)  # one after another
        return torch.cat([self._chosen, repeat(later, "new -> batch kv_heads new", batch=batch, kv_heads=kv_heads)], -1)

    @property
    def entry_bytes(self) -> int:
        """Bytes of the keys and values of one token, for each prompt of the batch."""
        _, kv_heads, _, head_dim = self._keys.shape
        return 2 * kv_heads * head_dim * self._keys.element_size()

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values of the kept entries."""
        return self._keys.shape[0] * self.kept * self.entry_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes that the key and value buffers take, room for further tokens included."""
        return self._keys.nbytes + self._values.nbytes

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add the next tokens' keys and values [batch, kv_heads, new, head_dim]; return all that are kept."""
        self._write(keys, values)
        self.seen += keys.shape[2]
        return self.keys, self.values

    def keep(self, positions: Tensor, reserve: int) -> LayerCache:
        """A new layer with only the entries at `positions`, and room for `reserve` new tokens. This one stays.

        positions [batch, kv_heads, kept], ascending. Only of a layer that has evicted nothing: there, entry i is the
        token at position i.
        """
        assert self.kept == self.seen, "what was evicted cannot be kept"
        batch, kv_heads, _, head_dim = self._keys.shape
        kept = LayerCache(batch, kv_heads, head_dim, positions.shape[2] + reserve, self._keys.dtype, self._keys.device)
        index = repeat(positions, "batch kv_heads kept -> batch kv_heads kept dim", dim=head_dim)
        kept._write(self.keys.gather(2, index), self.values.gather(2, index))
        kept._chosen, kept.seen = positions, self.seen
        return kept

    def truncate(self, length: int) -> None:
        """Forget the entries after the first `length`; the buffers stay. Only of a layer that has evicted nothing."""
        assert length <= self.kept == self.seen, "what was evicted cannot be counted from the start"
        self._chosen = self._chosen[..., :length]
        self.kept = self.seen = length

    def clear(self) -> None:
        """Forget everything; the buffers stay."""
        self._chosen = self._chosen[..., :0]
        self.kept = self.seen = 0

    def _write(self, keys: Tensor, values: Tensor) -> None:
        end = self.kept + keys.shape[2]
        if end > self._keys.shape[2]:
            self._grow(max(end, 2 * self._keys.shape[2]))
        self._keys[:, :, self.kept : end] = keys
        self._values[:, :, self.kept : end] = values
        self.kept = end

    def _grow(self, capacity: int) -> None:
        for name in ("_keys", "_values"):
            old = getattr(self, name)
            buffer = old.new_empty(*old.shape[:2], capacity, old.shape[3])
            buffer[:, :, : self.kept] = old[:, :, : self.kept]
            setattr(self, name, buffer)


class KVCache:
    """The caches of all layers. `cache[layer]` is a LayerCache; layers may keep different numbers of entries."""

    def __init__(self, layers: list[LayerCache]):
        self.layers = layers

    def __getitem__(self, layer: int) -> LayerCache:
        return self.layers[layer]

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def length(self) -> int:
        """Tokens seen, evicted ones included: the position of the next token."""
        return self.layers[0].seen

    @property
    def kept(self) -> list[int]:
        """Entries that each KV head keeps, layer by layer."""
        return [layer.kept for layer in self.layers]

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values of the kept entries."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def allocated_bytes(self) -> int:
        """Bytes that the key and value buffers take, room for further tokens included."""
        return sum(layer.allocated_bytes for layer in self.layers)
