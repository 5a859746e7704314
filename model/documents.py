"""The documents of a packed batch, in the form that attention takes.

The rows of a batch are windows of a stream of documents. Attention and positions within documents see the batch as one
row of B * T tokens, cut into pieces: what a row has of a document. No piece is longer than a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Shapes of the list of pieces come in powers of two from here on: attention backends plan anew for each shape, and
# CUDA graphs are for one.
FEWEST_PIECES = 32


@dataclass(frozen=True)
class Documents:
    """positions: int64 [B, T], of each token in its piece, from 0. cu_seqlens: int32 [P + 1], where the pieces begin
    among the B * T tokens in a row, and B * T; behind the last piece, empty ones up to a number that few batches
    exceed."""

    positions: Tensor
    cu_seqlens: Tensor

    @classmethod
    def of(cls, positions: Tensor) -> Documents:
        """From positions int64 [B, T], where a 0 begins a piece. Does its work where `positions` are: give it those of
        the data, on the CPU, and move the result; from a GPU it would wait for the number of pieces.

        Raises ValueError: a row that does not begin with 0, or a position that is neither 0 nor the one before it + 1.
        """
        if positions.dim() != 2 or not positions.numel():
            raise ValueError(f"positions must be [B, T], not {list(positions.shape)}")
        steps = positions[:, 1:] - positions[:, :-1]
        if positions[:, 0].any() or not ((steps == 1) | (positions[:, 1:] == 0)).all():
            raise ValueError("positions must begin each row with 0, and go on by 1 or begin anew with 0")
        return cls.of_pieces(positions, (positions.flatten() == 0).nonzero().flatten())

    @classmethod
    def of_pieces(cls, positions: Tensor, starts: Tensor) -> Documents:
        """The same, unchecked, from where the pieces begin among the B * T tokens in a row, int64 [P]."""
        pieces = max(FEWEST_PIECES, 1 << (len(starts) - 1).bit_length())
        cu_seqlens = torch.full((pieces + 1,), positions.numel(), dtype=torch.int32, device=positions.device)
        cu_seqlens[: len(starts)] = starts
        return cls(positions, cu_seqlens)

    @classmethod
    def whole_rows(cls, B: int, T: int, device: Any) -> Documents:
        """Each row is one document."""
        return cls.of(torch.arange(T).expand(B, T)).to(device)

    @property
    def longest(self) -> int:
        """What no piece is longer than, whatever the batch: T."""
        return self.positions.shape[1]

    @property
    def pieces(self) -> int:
        """How many there is room for."""
        return len(self.cu_seqlens) - 1

    def padded(self, pieces: int) -> Documents:
        """With empty pieces at the end, up to `pieces`."""
        missing = pieces - self.pieces
        return Documents(self.positions, torch.cat([self.cu_seqlens, self.cu_seqlens[-1:].expand(missing)]))

    def to(self, device: Any) -> Documents:
        return Documents(
            self.positions.to(device, non_blocking=True), self.cu_seqlens.to(device, non_blocking=True)
        )

    def clone(self) -> Documents:
        return Documents(self.positions.clone(), self.cu_seqlens.clone())

    def copy_(self, other: Documents) -> None:
        """Overwrite these tensors with a batch of the same shape that has no more pieces than there is room for."""
        self.positions.copy_(other.positions)
        self.cu_seqlens[: len(other.cu_seqlens)].copy_(other.cu_seqlens)
        self.cu_seqlens[len(other.cu_seqlens) :].fill_(self.positions.numel())

    def attention_arguments(self) -> dict[str, Any]:
        """What te.DotProductAttention and te.TransformerLayer take to attend within pieces (format "thd")."""
        return {
            "cu_seqlens_q": self.cu_seqlens,
            "cu_seqlens_kv": self.cu_seqlens,
            "max_seqlen_q": self.longest,
            "max_seqlen_kv": self.longest,
        }


def reached(window_size: tuple[int, int], longest: int) -> tuple[int, int]:
    """Transformer Engine's `window_size`, or none, (-1, 0), where no sequence (of up to `longest` tokens) reaches
    beyond it. The mask is the same; given a window, FlashAttention-4 and cuDNN run their slower kernels for one."""
    return (-1, 0) if longest <= window_size[0] + 1 else window_size


def attend(attention: Any, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None) -> Tensor:
    """Causal attention (`mistral_base.causal_attention`) of q [B, T, N, D], k and v [B, T, K, D], within documents
    where there are any: then B is 1 and T the tokens of the batch in a row. Returns [B, T, N * D]."""
    if documents is None:
        return attention(q, k, v, window_size=reached(attention.window_size, q.shape[1]))
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    arguments = documents.attention_arguments()
    arguments["window_size"] = reached(attention.window_size, documents.longest)
    return attention(q, k, v, qkv_format="thd", attn_mask_type="padding_causal", **arguments)[None]


def random_documents(B: int, T: int, mean_length: float, generator: torch.Generator) -> Documents:
    """Documents whose lengths are distributed exponentially around `mean_length` tokens, 2 or more each, in a stream
    that is cut into B rows of T tokens; on the CPU."""
    lengths = torch.empty(B * T).exponential_(1 / mean_length, generator=generator).long().clamp_(min=2)
    ends = lengths.cumsum(0)
    begins = torch.zeros(B * T + 1, dtype=torch.bool)
    begins[ends[ends < B * T]] = True
    begins[: B * T : T] = True
    starts = begins[:-1].nonzero().flatten()
    positions = torch.arange(B * T) - starts[begins[:-1].cumsum(0) - 1]
    return Documents.of(positions.view(B, T))
