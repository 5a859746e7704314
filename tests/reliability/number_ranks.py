"""Test functions for ranks.py in which losses, gradients or weights become wrong."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from model import decoder, te_reference
from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from model.fp8.state import fp8_state, reduce_amaxes
from tests.conftest import random_ids
from tests.reliability.launching import build_micro_step
from train import run as training
from train import trainer
from train.config.load import build_arguments, open_inputs, resolve_arguments
from train.data.stream import Batch
from train.engine.step import MicroStep, SkipDecision
from train.monitor import signals
from train.monitor.replicas import ReplicaError
from train.trainer import TrainingError

RIGHT_LOSS = decoder.causal_lm_loss


def spoil(kind: str | None) -> None:
    """Make the loss on this rank wrong until the next call.

    kind: the fault.

    - "nan_loss": the loss is NaN.
    - "inf_loss": the loss is infinite, but the gradient is finite.
    - "nan_gradient": the gradient is NaN, but the loss is finite.
    - "large_loss": the loss and the gradient are ten times as large.
    - None: the loss is correct again.
    """

    def wrong(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = RIGHT_LOSS(logits, labels)
        match kind:
            case "nan_loss":
                return loss * float("nan")
            case "inf_loss":
                return loss + float("inf")
            case "nan_gradient":
                return loss + (logits.float() * 0).sum().clamp(min=0).sqrt()  # 0, with gradient 0 * inf
        return loss * 10

    decoder.causal_lm_loss = RIGHT_LOSS if kind is None else wrong


def hash_tensors(tensors: Iterable[torch.Tensor]) -> str:
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def digests(engine: Any, precision: Precision) -> dict[str, str]:
    """Return hashes of all state on this rank that a step may change.

    This includes the weights, the float32 weights and moments of the optimizer, and the FP8 state.
    """
    optimizer = engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    moments = [leaf for leaf in tree_leaves(dict(inner.state)) if isinstance(leaf, torch.Tensor)]
    parts = {
        "weights": [getattr(p, "ds_tensor", p).data for p in engine.module.parameters()],
        "optimizer": [*(p.data for group in inner.param_groups for p in group["params"]), *moments],
        "fp8": list(fp8_state(engine.module, precision).values()),
    }
    return {name: hash_tensors(tensors) for name, tensors in parts.items()}


@contextlib.contextmanager
def nan_in_a_weight(module: torch.nn.Module) -> Iterator[None]:
    """Set an element of this rank's copy of a weight to NaN within the `with` block.

    Captured CUDA graphs also compute with this value.
    """
    element = dict(module.named_parameters())[a_matrix(module)].data.view(-1)[:1]
    right = element.clone()
    element.fill_(float("nan"))
    yield
    element.copy_(right)


def skip(
    stage: int,
    precision: dict,
    data_types: dict,
    clipping: float,
    config: str,
    speed: dict | None = None,
    sizes: tuple[int, int] = (2, 16),
    optim: str = "adamw",
) -> dict[str, Any]:
    """Run two correct steps, one step with each kind of fault on the last rank, and a correct step.

    sizes: samples per micro-batch and tokens per sample. With speed.cuda_graphs, only faults in tensors that the graph
    reads are possible.

    Returns: for each step, the fault, whether the step was skipped, and which state changed.
    """
    samples, tokens = sizes
    rank, is_last = dist.get_rank(), dist.get_rank() == dist.get_world_size() - 1
    micro_step, args = build_micro_step(
        config,
        precision=precision,
        speed=speed or {},
        max_seq_length=tokens,
        per_device_train_batch_size=samples,
        gradient_accumulation_steps=2,
        max_grad_norm=clipping,
        optim=optim,
        deepspeed={"zero_optimization": {"stage": stage}, "data_types": data_types},
    )
    engine, how = micro_step.engine, micro_step.precision
    skip_decision = SkipDecision(engine, how)
    kinds = ["nan_weight"] if stage < 3 else []  # ZeRO 3 computes with weights that it has gathered before
    if not args.speed.cuda_graphs:
        kinds += ["nan_loss", "inf_loss", "nan_gradient"]
    kinds += ["nan_in_buffer"] if getattr(engine.optimizer, "fp32_groups_gradients", None) else []
    steps = []
    right_backward = engine.backward

    def spoiled_backward(loss: torch.Tensor) -> None:
        """Run the backward pass, then write NaN to the gradient buffer.

        With speed.main_grad, a weight-gradient GEMM that adds to this buffer could have the same effect.
        """
        right_backward(loss)
        engine.optimizer.fp32_groups_gradients[0][0].view(-1)[0] = float("nan")

    for step, kind in enumerate([None, None, *kinds, None], 1):
        bad = is_last and kind is not None
        spoil(kind if bad and kind not in ("nan_in_buffer", "nan_weight") else None)
        engine.backward = spoiled_backward if bad and kind == "nan_in_buffer" else right_backward
        before = digests(engine, how)
        skip_decision.keep_fp8_state()
        with nan_in_a_weight(engine.module) if bad and kind == "nan_weight" else contextlib.nullcontext():
            for index in range(2):
                seed = step * 100 + index * 10 + rank
                ids = random_ids(engine.module.config, *sizes, seed).to(engine.device)
                micro_step(Batch(ids, ids), index)
        skipped = skip_decision.is_skipped(step)
        after = digests(engine, how)
        finite = all(bool(p.isfinite().all()) for p in engine.module.parameters())
        changed = [name for name in before if before[name] != after[name]]
        steps.append({"kind": kind, "skipped": skipped, "changed": changed, "finite": finite})
    spoil(None)
    return {"steps": steps, "count": engine.skipped_steps}


def whole_run(
    settings: dict, spoiled: dict[str, str], rank: int = 0, left_out: list | None = None
) -> dict[str, Any]:
    """Train a run with injected faults.

    Args:
        spoiled: number of the step in this process -> fault on `rank`: wrong_labels, flip, or stop (a signal).
        left_out: replaces skipped_samples of the checkpoint from which the run resumes.
    """
    arguments = resolve_arguments(build_arguments(settings), dist.get_world_size())
    right, right_read = MicroStep.__call__, training.read_state
    calls = 0

    def read(path: Path) -> Any:
        state = right_read(path)
        if left_out is not None:
            state.skipped_samples = left_out
        return state

    def call(self: MicroStep, batch: Batch, index: int) -> torch.Tensor:
        nonlocal calls
        calls += 1
        accumulation = arguments.gradient_accumulation_steps or 1
        step, last = -(-calls // accumulation), calls % accumulation == 0
        kind = spoiled.get(str(step)) if dist.get_rank() == rank else None
        if kind == "stop":
            os.kill(os.getpid(), signal.SIGUSR1)
        if kind == "wrong_labels":
            batch = batch._replace(labels=self.engine.module.config.vocab_size - 1 - batch.labels)
        spoil(None if kind in ("flip", "stop", "wrong_labels") else kind)
        loss = right(self, batch, index)
        spoil(None)
        if kind == "flip" and last:
            weight = dict(self.engine.module.named_parameters())[a_matrix(self.engine.module)]
            weight.data.view(-1).view(torch.int16)[7] ^= 1  # the lowest bit of the mantissa
        return loss

    Path(settings["output_dir"]).mkdir(parents=True, exist_ok=True)  # which the lock of train.py has done
    try:
        with mock.patch.object(MicroStep, "__call__", call), mock.patch.object(training, "read_state", read):
            training.run_training(arguments, open_inputs(arguments))
    except (TrainingError, ReplicaError, signals.Stopped) as error:
        return {"error": str(error)}
    finally:
        signals.received.clear()
        spoil(None)
    return {"error": None}


def run_with_given_losses(settings: dict, losses: list[tuple[float, float]]) -> dict[str, Any]:
    """Train on devices with a peak of 0.5 TFLOP/s.

    losses: for each rank, the loss of a micro-batch as the step returns it (loss x share), and its share of tokens with
        a label.
    """
    right, (loss, share) = MicroStep.__call__, losses[dist.get_rank()]
    with (
        mock.patch.object(MicroStep, "__call__", lambda *values: right(*values) * 0 + loss),
        mock.patch.object(Batch, "labelled", lambda batch: torch.tensor(share)),
        mock.patch.object(trainer, "peak_tflops", lambda name: 0.5),
    ):
        return whole_run(settings, {})


def a_matrix(module: torch.nn.Module) -> str:
    """Return the name of a weight matrix in the middle of the model."""
    names = [name for name, parameter in module.named_parameters() if parameter.ndim == 2]
    return names[len(names) // 2]


def reduced_state() -> list[dict[str, list]]:
    """Run a step of a Linear module, and return its FP8 state before and after `reduce_amaxes`.

    The operands and gradients of the second rank are twice those of the first rank.
    """
    precision = Precision(PrecisionConfig(backend="reference", amax_history_len=4))
    factor = 1.0 + dist.get_rank()
    model = torch.nn.Sequential(te_reference.Linear(32, 32, bias=False, params_dtype=torch.float32))
    with precision.autocast():
        y = model(torch.full((16, 32), factor))
    (y * factor).sum().backward()
    found = []
    for reduce in (lambda state: None, reduce_amaxes):
        reduce(fp8_state(model, precision))
        found.append({key: tensor.tolist() for key, tensor in fp8_state(model, precision).items()})
    return found
