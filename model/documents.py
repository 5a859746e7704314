"""The documents of a packed batch, in the form that attention takes.

The rows of a batch are windows of a stream of documents. For attention and positions within documents, the batch is one
row of B * T tokens that is divided into pieces. A piece is the part of a document within a row, so no piece is longer
than a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# The list of pieces is padded to a power of two, at least this many: attention backends plan for each shape, and a CUDA
# graph has a fixed one.
FEWEST_PIECES = 32


@dataclass(frozen=True)
class Documents:
    """The documents of a batch.

    Attributes:
        positions: int64 [B, T], position of each token in its piece, from 0.
        cu_seqlens: int32 [P + 1], start of each piece in the flattened batch, then B * T. Empty pieces at the end pad
            the list to a size that few batches exceed.
    """

    positions: Tensor
    cu_seqlens: Tensor

    @classmethod
    def of(cls, positions: Tensor) -> Documents:
        """Create documents from positions int64 [B, T], where each 0 starts a piece.

        Each row starts with 0. Pass positions on the CPU and move the result: on a GPU this waits for the number of
        pieces.
        """
        return cls.from_piece_starts(positions, (positions.flatten() == 0).nonzero().flatten())

    @classmethod
    def from_piece_starts(cls, positions: Tensor, starts: Tensor) -> Documents:
        """Create documents, without checks, from the starts of the pieces in the flattened batch: int64 [P]."""
        pieces = max(FEWEST_PIECES, 1 << (len(starts) - 1).bit_length())
        cu_seqlens = torch.full((pieces + 1,), positions.numel(), dtype=torch.int32, device=positions.device)
        cu_seqlens[: len(starts)] = starts
        return cls(positions, cu_seqlens)

    @classmethod
    def whole_rows(cls, B: int, T: int, device: Any) -> Documents:
        """Create documents in which each row is one document."""
        return cls.of(torch.arange(T).expand(B, T)).to(device)

    @property
    def longest(self) -> int:
        """Return the upper bound of a piece's length for any batch: T."""
        return self.positions.shape[1]

    @property
    def pieces(self) -> int:
        """Return the number of pieces that fit, including empty ones."""
        return len(self.cu_seqlens) - 1

    def padded(self, pieces: int) -> Documents:
        """Return a copy with empty pieces at the end, `pieces` in total."""
        missing = pieces - self.pieces
        return Documents(self.positions, torch.cat([self.cu_seqlens, self.cu_seqlens[-1:].expand(missing)]))

    def to(self, device: Any) -> Documents:
        return Documents(
            self.positions.to(device, non_blocking=True), self.cu_seqlens.to(device, non_blocking=True)
        )

    def clone(self) -> Documents:
        return Documents(self.positions.clone(), self.cu_seqlens.clone())

    def copy_(self, other: Documents) -> None:
        """Overwrite these tensors with a batch of the same shape and at most as many pieces."""
        self.positions.copy_(other.positions)
        self.cu_seqlens[: len(other.cu_seqlens)].copy_(other.cu_seqlens)
        self.cu_seqlens[len(other.cu_seqlens) :].fill_(self.positions.numel())

    def attention_arguments(self) -> dict[str, Any]:
        """Return the arguments for attention within pieces (format "thd") of te.DotProductAttention and
        te.TransformerLayer.
        """
        return {
            "cu_seqlens_q": self.cu_seqlens,
            "cu_seqlens_kv": self.cu_seqlens,
            "max_seqlen_q": self.longest,
            "max_seqlen_kv": self.longest,
        }


def reached(window_size: tuple[int, int], longest: int) -> tuple[int, int]:
    """Return Transformer Engine's `window_size`, or (-1, 0) if no sequence of up to `longest` tokens exceeds the
    window.

    The mask is the same, but without a window FlashAttention-4 and cuDNN run faster kernels.
    """
    return (-1, 0) if longest <= window_size[0] + 1 else window_size


def attend(attention: Any, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None) -> Tensor:
    """Compute causal attention with a module of `mistral_base.causal_attention`, within documents if there are any.

    Args:
        q: [B, T, N, D]. With documents, B is 1 and T is the number of tokens in the batch.
        k: [B, T, K, D], as v.

    Returns: [B, T, N * D].
    """
    if documents is None:
        return attention(q, k, v, window_size=reached(attention.window_size, q.shape[1]))
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    arguments = documents.attention_arguments()
    arguments["window_size"] = reached(attention.window_size, documents.longest)
    return attention(q, k, v, qkv_format="thd", attn_mask_type="padding_causal", **arguments)[None]


def random_documents(B: int, T: int, mean_length: float, generator: torch.Generator) -> Documents:
    """Return random documents on the CPU: a stream of documents, cut into B rows of T tokens.

    Lengths are exponentially distributed with mean `mean_length` tokens, and at least 2.
    """
    lengths = torch.empty(B * T).exponential_(1 / mean_length, generator=generator).long().clamp_(min=2)
    ends = lengths.cumsum(0)
    begins = torch.zeros(B * T + 1, dtype=torch.bool)
    begins[ends[ends < B * T]] = True
    begins[: B * T : T] = True
    starts = begins[:-1].nonzero().flatten()
    positions = torch.arange(B * T) - starts[begins[:-1].cumsum(0) - 1]
    return Documents.of(positions.view(B, T))
