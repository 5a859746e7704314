"""The unigram loss of counted tokens: what a model that only knows how frequent tokens are would score."""

import math

import numpy as np


def unigram_loss(train_counts: np.ndarray, eval_counts: np.ndarray) -> float | None:
    """Cross entropy in nats per token of the eval counts [V] under the add-one-smoothed train counts [V]; None when
    either is empty."""
    if not train_counts.sum() or not eval_counts.sum():
        return None
    log_p = np.log(train_counts + 1.0) - math.log(float(train_counts.sum()) + len(train_counts))
    return float(-(eval_counts * log_p).sum() / eval_counts.sum())
