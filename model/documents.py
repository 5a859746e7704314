"""Document boundaries in a packed batch, in the form that attention expects.

Each row of a batch is a window of a stream of documents. With a document mask, attention and positions are restricted
to one document. The B rows of T tokens are then flattened into one row of B * T tokens and divided into pieces. A piece
is the part of a document within one row, so a piece has at most T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Minimum length of the list of pieces. The list is padded to a power of two, because attention backends plan for each
# shape and a CUDA graph has a fixed shape.
FEWEST_PIECES = 32


def copy_to(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to `device` without waiting for the GPU.

    From memory that is not pinned, the copy would wait for all earlier kernels of the stream.
    """
    is_pageable = tensor.device.type == "cpu" and torch.device(device).type == "cuda"
    return (tensor.contiguous().pin_memory() if is_pageable else tensor).to(device, non_blocking=True)


@dataclass(frozen=True)
class Documents:
    """Document boundaries in one batch of B rows with T tokens each, divided into P pieces.

    A piece is the part of a document within one row.

    Attributes:
        positions: int64 [B, T], position of each token within its piece, starting at 0.
        cu_seqlens: int32 [P + 1], start of each piece in the flattened batch, followed by B * T. Empty pieces at the
            end pad the list to a common size.
    """

    positions: Tensor
    cu_seqlens: Tensor

    @classmethod
    def from_positions(cls, positions: Tensor) -> Documents:
        """Create Documents from token positions, int64 [B, T] (B rows of T tokens), where each 0 starts a piece of a
        document.

        Each row must start with 0. Pass positions on the CPU and move the result to the GPU. With positions on a GPU,
        this function would wait for the GPU to count the pieces.
        """
        return cls.from_piece_starts(positions, (positions.flatten() == 0).nonzero().flatten())

    @classmethod
    def from_piece_starts(cls, positions: Tensor, starts: Tensor) -> Documents:
        """Create Documents from the first token of each document piece.

        Args:
            positions: int64 [B, T], as in `Documents`.
            starts: int64 [P], index of the first token of each piece in the flattened batch. Inputs are not checked.
        """
        pieces = max(FEWEST_PIECES, 1 << (len(starts) - 1).bit_length())
        cu_seqlens = torch.full((pieces + 1,), positions.numel(), dtype=torch.int32, device=positions.device)
        cu_seqlens[: len(starts)] = starts
        return cls(positions, cu_seqlens)

    @classmethod
    def whole_rows(cls, B: int, T: int, device: Any) -> Documents:
        """Create Documents that treat each of the B rows of T tokens as one document."""
        return cls.from_positions(torch.arange(T).expand(B, T)).to(device)

    @property
    def longest(self) -> int:
        """Return the row length, which is an upper bound for the length of a document piece in any batch."""
        return self.positions.shape[1]

    @property
    def pieces(self) -> int:
        """Return the number of document pieces, including the empty pieces that pad the list."""
        return len(self.cu_seqlens) - 1

    def padded(self, pieces: int) -> Documents:
        """Return a copy that is padded with empty pieces to `pieces` pieces in total."""
        missing = pieces - self.pieces
        return Documents(self.positions, torch.cat([self.cu_seqlens, self.cu_seqlens[-1:].expand(missing)]))

    def to(self, device: Any) -> Documents:
        return Documents(copy_to(self.positions, device), copy_to(self.cu_seqlens, device))

    def clone(self) -> Documents:
        return Documents(self.positions.clone(), self.cu_seqlens.clone())

    def copy_(self, other: Documents) -> None:
        """Copy `other` into the existing tensors. `other` must have the same shape and at most as many pieces."""
        self.positions.copy_(other.positions)
        self.cu_seqlens[: len(other.cu_seqlens)].copy_(other.cu_seqlens)
        self.cu_seqlens[len(other.cu_seqlens) :].fill_(self.positions.numel())

    def attention_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments with which te.DotProductAttention restricts attention to document pieces.

        The arguments are for qkv_format "thd", in which all pieces form one sequence.
        """
        return {
            "cu_seqlens_q": self.cu_seqlens,
            "cu_seqlens_kv": self.cu_seqlens,
            "max_seqlen_q": self.longest,
            "max_seqlen_kv": self.longest,
        }


def reached(window_size: tuple[int, int], longest: int) -> tuple[int, int]:
    """Return (-1, 0) (no window) if `longest` tokens fit into the attention window, and `window_size` otherwise.

    The resulting mask is the same, but FlashAttention-4 and cuDNN have faster kernels for attention without a window.
    """
    return (-1, 0) if longest <= window_size[0] + 1 else window_size


def attend(attention: Any, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None) -> Tensor:
    """Compute causal attention, restricted to documents if `documents` is given.

    Shapes: B batch, T tokens, N query heads, K key/value heads, D head dimension. With documents, B is 1 and T is the
    number of tokens in the batch.

    Args:
        attention: a module returned by `decoder.causal_attention`.
        q: [B, T, N, D].
        k, v: [B, T, K, D].

    Returns: [B, T, N * D].
    """
    if documents is None:
        return attention(q, k, v, window_size=reached(attention.window_size, q.shape[1]))
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    arguments = documents.attention_arguments()
    arguments["window_size"] = reached(attention.window_size, documents.longest)
    return attention(q, k, v, qkv_format="thd", attn_mask_type="padding_causal", **arguments)[None]


def random_documents(B: int, T: int, mean_length: float, generator: torch.Generator) -> Documents:
    """Return random document boundaries on the CPU for B rows of T tokens.

    Document lengths are drawn from an exponential distribution with a mean of `mean_length` tokens and are at least 2.
    Documents are also cut at the end of each row.
    """
    lengths = torch.empty(B * T).exponential_(1 / mean_length, generator=generator).long().clamp_(min=2)
    ends = lengths.cumsum(0)
    begins = torch.zeros(B * T + 1, dtype=torch.bool)
    begins[ends[ends < B * T]] = True
    begins[: B * T : T] = True
    starts = begins[:-1].nonzero().flatten()
    positions = torch.arange(B * T) - starts[begins[:-1].cumsum(0) - 1]
    return Documents.from_positions(positions.view(B, T))
