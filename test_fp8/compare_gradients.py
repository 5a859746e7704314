#!/usr/bin/env python3
"""How far the gradients of FP8 and bf16 are from float32's, at the same weights and on the same samples.

    python test_fp8/compare_gradients.py --init_from output/RUN/hf --data data/pretrain [--output FILE.json]

Two trainings drift apart by chance, and a difference of half a percent between their losses needs many of them to be
told from that. Here nothing drifts: every row computes the gradient of the same samples at the same weights.

"loss": how far it is from float32's. "error": |g - r| / |r| over all parameters, r in float32, of a micro-batch (the
mean over --batches of them) and of the sum of all of them: chance averages out in the sum, what remains is systematic.
"along": (g . r) / (r . r) of the sum: below 1 the gradient is too short. "worst": the largest error of the sum in one
weight matrix.

Weights that were trained for a while tell more than random ones: --init_from takes the Hugging Face folder that a run
leaves. Without a GPU the CPU reference computes the rows; float32 always is the reference modules' with torch's SDPA.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model.build import build_model
from model.config import load_config
from model.fp8.calibration import calibrate
from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from test_fp8.common import report
from test_fp8.model.options import positive
from train.data.format import DataError
from train.data.stream import Batch, open_stream

PROGRAM = "test_fp8/compare_gradients.py"
FLOAT32 = {"compute": "fp32", "backend": "reference"}
ROWS: dict[str, dict[str, Any]] = {
    "bf16": {"compute": "bf16"},
    "delayed_hybrid": {"recipe": "delayed", "fp8_format": "hybrid"},
    "delayed_e4m3": {"recipe": "delayed", "fp8_format": "e4m3"},
    "delayed_e4m3_fp8_head": {"recipe": "delayed", "fp8_format": "e4m3", "bf16_modules": []},
    "delayed_e4m3_fast_wgrad": {"recipe": "delayed", "fp8_format": "e4m3", "fast_accumulation_wgrad": True},
    "current_hybrid": {"recipe": "current", "fp8_format": "hybrid"},
    "current_e4m3": {"recipe": "current", "fp8_format": "e4m3"},
    "block": {"recipe": "block"},
}
Batches = Sequence[Batch]


def gradients(
    how: dict[str, Any], config: Any, init_from: str | None, batches: Batches
) -> tuple[float, list[dict[str, Tensor]]]:
    """Mean loss, and what each micro-batch adds to the gradient, float32 by parameter name: te_layer with the precision
    `how`."""
    precision = Precision(PrecisionConfig(**how))
    model = build_model(config, "te_layer", precision, seed=42, init_from=init_from)
    model.train()
    on_device = [batch.to(precision.device) for batch in batches]
    calibrate(model, precision, on_device[0].input_ids, on_device[0].labels, len(on_device))
    loss, found = 0.0, []
    for ids, labels, _ in on_device:
        model.zero_grad(set_to_none=True)
        out = model(ids, labels=labels).loss
        (out / len(on_device)).backward()  # as accumulation scales it, and calibration has assumed
        loss += out.item() / len(on_device)
        found.append({name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None})
    return loss, found


def compare(name: str, own: list[dict[str, Tensor]], exact: list[dict[str, Tensor]]) -> dict[str, Any]:
    """The figures of a row, see the module's docstring."""
    of_batch = [_error([g[k] - r[k] for k in r], list(r.values())) for g, r in zip(own, exact, strict=True)]
    g, r = ({key: sum(batch[key] for batch in batches) for key in batches[0]} for batches in (own, exact))
    by_matrix = {key: _error([g[key] - r[key]], [r[key]]) for key in r if r[key].dim() == 2}
    worst = max(by_matrix, key=by_matrix.__getitem__)
    squares = sum(float((t.double() ** 2).sum()) for t in r.values())
    return {
        "row": name,
        "error_of_batch": sum(of_batch) / len(of_batch),
        "error_of_sum": _error([g[k] - r[k] for k in r], list(r.values())),
        "along": sum(float((g[k].double() * r[k].double()).sum()) for k in r) / squares,
        "worst": by_matrix[worst],
        "worst_matrix": worst,
    }


def _error(differences: list[Tensor], of: list[Tensor]) -> float:
    norms = [float(torch.stack([t.double().norm() for t in ts]).norm()) for ts in (differences, of)]
    return norms[0] / norms[1]


def read_batches(options: argparse.Namespace, vocabulary: int) -> Batches:
    """Samples of --data in the order of training; random tokens without it."""
    size = options.micro_batch
    if options.data is None:
        ids = torch.randint(
            vocabulary,
            (options.batches * size, options.seq_length + 1),
            generator=torch.Generator().manual_seed(42),
        )
        return [Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in ids.split(size)]
    stream = open_stream({"data": options.data}, None, options.seq_length, seed=42)
    stream.check_vocabulary(vocabulary)
    return [stream.batch(index * size, size) for index in range(options.batches)]


def read_config(options: argparse.Namespace) -> Any:
    """The configuration of --init_from, else of --config. Raises ValueError, which names the option."""
    folder = options.init_from
    if folder and not (Path(folder) / "config.json").is_file():
        what = "has no config.json" if Path(folder).is_dir() else "is not a folder"
        raise ValueError(
            f"--init_from: {folder!r} {what}; give a Hugging Face folder, such as a run's output/RUN/hf"
        )
    try:
        return load_config(folder or options.config)
    except ValueError as error:
        option = "--init_from" if folder else "--config"
        raise ValueError(f"{option}: {str(error).removeprefix('model.config: ')}") from error


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    config = read_config(options)
    batches = read_batches(options, config.vocab_size)
    exact_loss, exact = gradients(FLOAT32, config, options.init_from, batches)
    print(f"float32: loss {exact_loss:.4f}", flush=True)
    print(f"{'row':24} {'loss':>9} {'error':>8} {'of sum':>8} {'along':>8} {'worst':>8}", flush=True)
    results = []
    for name in options.rows:
        loss, own = gradients(ROWS[name], config, options.init_from, batches)
        r = {**compare(name, own, exact), "loss_difference": loss - exact_loss}
        del own
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        print(
            f"{name:24} {r['loss_difference']:+9.5f} {r['error_of_batch']:8.4f} {r['error_of_sum']:8.4f} "
            f"{r['along']:8.4f} {r['worst']:8.4f} {r['worst_matrix']}",
            flush=True,
        )
        results.append(r)
    return results


def plot(results: Sequence[dict[str, Any]], title: str, output: Path) -> None:
    figure, axes = report.subplots(1, 1, figsize=(8, 0.5 * len(results) + 1.4))
    axis, places = axes[0, 0], range(len(results))
    axis.barh(
        [i - 0.2 for i in places], [r["error_of_batch"] for r in results], 0.4, label="of a micro-batch"
    )
    axis.barh([i + 0.2 for i in places], [r["error_of_sum"] for r in results], 0.4, label="of their sum")
    axis.set_yticks(list(places), [r["row"] for r in results], fontsize=8)
    axis.invert_yaxis()
    axis.set(xlabel="relative error of the gradient to float32", title=title)
    axis.grid(axis="x", alpha=0.3)
    axis.legend(fontsize=8)
    report.save_plot(figure, output)


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, gpu = parser.add_argument, torch.cuda.is_available()
    add(
        "--config",
        default="mistral_0.4b" if gpu else "tiny",
        help="the model, with random weights (%(default)s)",
    )
    add("--init_from", metavar="FOLDER", help="weights and configuration of a Hugging Face folder instead")
    add("--data", type=Path, metavar="FOLDER", help="of prepare_data.py; default: random tokens")
    add("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), help="default: all of these")
    add("--micro_batch", type=positive, default=2, help="samples of a micro-batch (%(default)s)")
    add("--batches", type=positive, default=8, help="micro-batches (%(default)s)")
    add("--seq_length", type=positive, default=2048 if gpu else 64, help="tokens of a sample (%(default)s)")
    add("--output", type=report.output_file, metavar="FILE.json", help="write JSON and a plot")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    options = parse_arguments(argv)
    machine, versions = report.describe()
    print(report.headline(machine, versions), flush=True)
    try:
        results = measure(options)
    except (ValueError, OSError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.output:
        # folders by their names: where they lie is of no use to others
        words: list[object] = ["--init_from", Path(options.init_from).name] if options.init_from else []
        words = words or ["--config", options.config]
        words += ["--data", options.data.name] if options.data else []
        words += ["--rows", *options.rows]
        for key in ("micro_batch", "batches", "seq_length"):
            words += [f"--{key}", getattr(options, key)]
        report.write_json(options.output, report.command_line(PROGRAM, words), results)
        plot(results, f"gradients against float32, {machine.get('gpu', machine['cpu'])}", options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
