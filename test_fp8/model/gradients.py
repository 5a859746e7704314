"""Compute the gradients of a model in each precision for compare_gradients.py, from the same weights and samples."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from model.autotune import release_memory
from model.build import build_model
from model.checks.startup import verify_fp8
from model.config import load_config
from model.fp8.modules import full_gradients, use_main_grads
from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from model.fp8.state import calibrate, relative_error
from test_fp8.common.report import Outcome, Result
from test_fp8.model.cases import PRECISIONS, SEED
from train.data.encoder import check_model_tokenizer
from train.data.source import check_fit
from train.data.stream import Batch, open_stream

FLOAT32 = {"compute": "fp32", "backend": "reference"}

Gradients = list[dict[str, Tensor]]
"""The contribution of each micro-batch to the gradient, by parameter name."""


def gradients(
    how: Mapping[str, Any], config: Any, options: argparse.Namespace, batches: Sequence[Batch]
) -> tuple[float, Gradients]:
    """Return the mean loss and the gradients of a model with Transformer Engine layers at a given precision.

    lm_head computes its FP8 gradients in several parts, as in a training run with many tokens per micro-batch.

    how: the settings of the "precision" section of the training configuration, and optionally gradient_checkpointing
        and main_grad (speed.main_grad).
    config: the model configuration.
    options: options of compare_gradients.py, which select the weights.

    Raises StartupCheckError if a GEMM did not run in FP8 as configured.
    """
    section = {key: value for key, value in how.items() if key not in ("gradient_checkpointing", "main_grad")}
    precision = Precision(PrecisionConfig(**section))
    model = build_model(
        config,
        "te_layer",
        precision,
        seed=SEED,
        initialization=options.initialization,
        init_from=options.init_from,
        gradient_checkpointing=how.get("gradient_checkpointing", False),
    )
    with torch.no_grad():
        for parameter in model.parameters():  # all precisions use the same bf16 values
            parameter.copy_(parameter.bfloat16())
    model.train()
    model.lm_head.rows = max(32, batches[0].input_ids.numel() // 64 * 32)
    on_device = [batch.to(precision.device) for batch in batches]
    calibrate(model, precision, on_device[0].input_ids, on_device[0].labels, len(on_device))
    loss, found = 0.0, []
    with verify_fp8(model, precision, len(on_device)):
        for ids, labels, _ in on_device:
            model.zero_grad(set_to_none=True)
            if how.get("main_grad"):
                use_main_grads(model, precision)
            out = model(ids, labels=labels).loss
            (out / len(on_device)).backward()  # scaled as in gradient accumulation, which calibration assumes
            loss += out.item() / len(on_device)
            found.append(full_gradients(model))
    return loss, found


def compare(name: str, own: Gradients, exact: Gradients, bf16: Mapping[str, Tensor] | None) -> Result:
    """Compare the gradients in one precision with the float32 gradients, and return the entry for the report.

    bf16: bf16 gradients of the matrices in the decoder layers for the first micro-batch, if known.
    """
    of_batch = [relative_error(g, r) for g, r in zip(own, exact, strict=True)]
    g, r = (
        {key: sum(batch[key].float() for batch in batches) for key in batches[0]} for batches in (own, exact)
    )
    by_matrix = {key: relative_error({key: g[key]}, {key: r[key]}) for key in r if r[key].dim() == 2}
    worst = max(by_matrix, key=by_matrix.__getitem__)
    squares = sum(float((t.double() ** 2).sum()) for t in r.values())
    return {
        "row": name,
        "error_of_batch": sum(of_batch) / len(of_batch),
        "error_of_sum": relative_error(g, r),
        "along": sum(float((g[k].double() * r[k].double()).sum()) for k in r) / squares,
        "worst": by_matrix[worst],
        "worst_matrix": worst,
        "decoder_error_to_bf16": bf16 and relative_error(own[0], bf16),
    }


def read_batches(options: argparse.Namespace, config: Any) -> list[Batch]:
    """Return micro-batches from the folder --data in training order, or random tokens without --data."""
    size = options.micro_batch
    if options.data is None:
        shape, generator = (
            (options.batches * size, options.seq_length + 1),
            torch.Generator().manual_seed(SEED),
        )
        ids = torch.randint(config.vocab_size, shape, generator=generator)
        return [Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in ids.split(size)]
    stream = open_stream({"data": options.data}, None, options.seq_length, seed=SEED)
    check_fit(stream.sources, config.vocab_size, config.max_position_embeddings)
    if options.init_from:
        check_model_tokenizer(options.data, options.init_from, "--data")
    return [stream.batch(index * size, size) for index in range(options.batches)]


def measure(options: argparse.Namespace) -> Outcome:
    config = load_config(options.init_from or options.config)
    batches = read_batches(options, config)
    exact_loss, exact = gradients(FLOAT32, config, options, batches)
    results, bf16 = [], None
    for name in sorted(options.rows, key=lambda row: row != "bf16"):
        loss, own = gradients(PRECISIONS[name], config, options, batches)
        if name == "bf16":
            bf16 = {key: g for key, g in own[0].items() if ".layers." in key and g.dim() == 2}
        results.append({**compare(name, own, exact, bf16), "loss_difference": loss - exact_loss})
        print(f"{name}: relative error of the gradients {results[-1]['error_of_batch']:.4f}", flush=True)
        del own
        release_memory()
    return Outcome(results)
