"""--report TEXT: what FP8 costs and what it brings. How far its next tokens are from bf16's on the same text, by both
paths of the engine (many rows: prefill; few rows: decoding), and how fast and how large both are.

Printed as a table; with --output also a JSON file {"command", "date", "machine", "versions", "model", "text",
"weights_gib", "quality", "speed"} and a plot beside it.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import math
import shlex
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from fp8_inference_demo.engine import Engine
from fp8_inference_demo.errors import EngineError, InferenceError
from fp8_inference_demo.prompts import write_json
from fp8_inference_demo.sampling import Sampling
from fp8_inference_demo.session import Session
from fp8_inference_demo.text import read_text
from fp8_inference_demo.weights import Weights
from model.config import GIB, model_name, num_parameters, trained_length
from model.fp8.machine import describe, headline
from model.hf_folder import find_weights, quantization_of, stored_compute

PRECISIONS = ("bf16", "fp8")
BATCH_SIZES = (1, 4, 16, 64, 256)
WINDOW_TOKENS = 2048  # each begins with BOS; nothing before it is seen
CHARACTERS = 16  # of a text that are read for a token
ROWS = 512  # positions at a time: their float32 logits are 65 MB at 32,000 tokens

# with and without a GPU: tokens compared by each path, and the prompts and answers whose times are taken
COMPARED = {True: {"many rows": 65_536, "few rows": 2_048}, False: {"many rows": 2_048, "few rows": 128}}
LARGEST_BATCH = {True: 64, False: 4}
TIMED = {True: (128, 256), False: (16, 8)}


def windows(ids: Sequence[int], length: int, most: int, bos: int | None) -> Iterator[list[int]]:
    """Parts of a text with up to `most` next tokens: up to `length` ids, of which the first one is BOS, or without BOS
    the last one of the part before."""
    most = min(most, len(ids) - 1)
    for start in range(0, most, length - 1):
        first = ids[start] if bos is None else bos
        yield [first, *ids[start + 1 : min(start + length, most + 1)]]


class Comparison:
    """FP8's next tokens against bf16's: sums over positions, in float64."""

    def __init__(self) -> None:
        self.tokens = 0
        self.nll = dict.fromkeys(PRECISIONS, 0.0)
        self.kl = self.equal = 0.0

    def add(self, bf16_TV: torch.Tensor, fp8_TV: torch.Tensor, next_T: torch.Tensor) -> None:
        """Logits of T positions and the tokens that follow them. Raises ValueError: a logit that is not finite."""
        logs = {}
        for precision, logits in zip(PRECISIONS, (bf16_TV, fp8_TV), strict=True):
            if not logits.isfinite().all():
                raise InferenceError(
                    f"--report: logits in {precision} are not finite (NaN or infinite)",
                    code="not_finite",
                    key=precision,
                )
            logs[precision] = logits.float().log_softmax(-1)
            self.nll[precision] -= float(logs[precision].gather(-1, next_T[:, None]).double().sum())
        p, q = logs["bf16"], logs["fp8"]
        self.kl += float((p.exp() * (p - q)).sum(-1).double().sum())
        self.equal += int((bf16_TV.argmax(-1) == fp8_TV.argmax(-1)).sum())
        self.tokens += len(next_T)

    def result(self, path: str) -> dict[str, Any]:
        perplexity = {p: math.exp(self.nll[p] / self.tokens) for p in PRECISIONS}
        return {
            "path": path,
            "tokens": self.tokens,
            **{f"perplexity_{p}": perplexity[p] for p in PRECISIONS},
            "perplexity_difference_percent": (perplexity["fp8"] / perplexity["bf16"] - 1) * 100,
            "kl_mean_nats": self.kl / self.tokens,
            "equal_greedy_percent": self.equal / self.tokens * 100,
        }


def compare(
    engines: dict[str, Engine], ids: Sequence[int], most: int, path: str, bos: int | None
) -> dict[str, Any]:
    """The first `most` next tokens of a text by one path of both engines."""
    sums, few = Comparison(), path == "few rows"
    for window in windows(ids, engines["bf16"].max_length, most, bos):
        scores = [engines[precision].score(window, few_rows=few)[:-1] for precision in PRECISIONS]
        following = torch.tensor(window[1:], device=scores[0].device)
        for start in range(0, len(following), ROWS):
            part = slice(start, start + ROWS)
            sums.add(scores[0][part], scores[1][part], following[part])
    return sums.result(path)


def times(weights: Weights, precision: str, batch_size: int, ids: Sequence[int]) -> dict[str, Any]:
    """Tokens/s of one batch, greedy, the second time, so that nothing is compiled or captured in it. A "reason" in
    place of figures: it does not fit."""
    result: dict[str, Any] = {"precision": precision, "batch_size": batch_size}
    prompt_tokens, new_tokens = TIMED[torch.cuda.is_available()]
    prompts = [[ids[(row * 17 + i) % len(ids)] for i in range(prompt_tokens)] for row in range(batch_size)]
    try:
        engine = Engine(weights, batch_size, prompt_tokens + new_tokens)
        for _ in range(2):
            run = engine.generate(prompts, Sampling(temperature=0), [0] * batch_size, new_tokens)
            for _ in run:
                pass
    except (EngineError, torch.OutOfMemoryError) as error:
        return result | {"reason": str(error).split(". ")[0]}
    timing = run.timing
    return result | {
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "prefill_tokens_per_s": timing.prefill_tokens / timing.prefill_s,
        "decode_tokens_per_s": timing.decode_tokens / timing.decode_s,
    }


def free() -> None:
    """Give back the memory of engines that are gone."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def write_report(session: Session, text: Path, output: Path | None) -> None:
    """Measure, print, and write where an output is given.

    Raises ValueError: a text that will not do, logits that are not finite. torch.OutOfMemoryError: both models do not
    fit.
    """
    arguments, folder, gpu = session.arguments, session.folder, torch.cuda.is_available()
    compared = COMPARED[gpu]
    content = read_text(text, f"--report {text}")[: max(compared.values()) * CHARACTERS]
    ids = session.encode(content, f"--report {text}")
    if len(ids) < 3:
        raise InferenceError(
            f"--report {text}: {len(ids)} tokens; give a text of some thousand",
            code="short_text",
            key=f"--report {text}",
        )
    stored = "FP8" if quantization_of(folder) else stored_compute(find_weights(folder, session.config))
    if stored == "FP8":
        print("note: the weights are stored in FP8; bf16 is these, multiplied out", file=sys.stderr)
    elif stored in ("fp32", "fp16"):
        print(f"note: the weights are stored in {stored}; bf16 is these, rounded", file=sys.stderr)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
    machine, versions = describe()
    print(headline(machine, versions), file=sys.stderr)

    positions = trained_length(session.config) or session.config.max_position_embeddings
    length = arguments.max_length or min(WINDOW_TOKENS, positions)
    engines = {precision: Engine.load(folder, precision, 1, length) for precision in PRECISIONS}
    bos = session.tokenizer.bos_token_id
    quality = [compare(engines, ids, most, path, bos) for path, most in compared.items()]
    weights = {precision: engine.weights for precision, engine in engines.items()}
    print(*engines["fp8"].report(), sep="\n", file=sys.stderr)
    engines.clear()
    largest = arguments.batch_size or LARGEST_BATCH[gpu]
    speed = []
    for batch_size in (size for size in BATCH_SIZES if size <= largest):
        for precision in PRECISIONS:
            free()
            speed.append(times(weights[precision], precision, batch_size, ids))

    results = {
        "command": command(arguments),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": machine,
        "versions": versions,
        "model": {
            "name": model_name(folder),
            "parameters": num_parameters(session.config),
            "weights": stored,
        },
        "text": {"name": text.name, "sha256": hashlib.sha256(content.encode()).hexdigest()},
        "window_tokens": length,
        "weights_gib": {precision: of.nbytes / GIB for precision, of in weights.items()},
        "quality": quality,
        "speed": speed,
    }
    print("\n".join(lines(results)))
    if output is not None:
        write_json(output, results)
        plot(output.with_suffix(".png"), results)
        print(f"{output} and {output.with_suffix('.png').name}", file=sys.stderr)


def lines(results: dict[str, Any]) -> list[str]:
    """The report as a table."""
    shown = [f"{'':<28}{'bf16':>14}{'fp8':>14}{'fp8 to bf16':>16}"]

    def row(name: str, values: dict[str, float], form: str) -> str:
        bf16, fp8 = (values[precision] for precision in PRECISIONS)
        return f"{name:<28}{bf16:>14{form}}{fp8:>14{form}}{f'{fp8 / bf16:.3f}':>16}"

    shown.append(row("weights, GiB", results["weights_gib"], ",.3f"))
    for q in results["quality"]:
        perplexity = {precision: q[f"perplexity_{precision}"] for precision in PRECISIONS}
        shown.append(row(f"perplexity, {q['path']}", perplexity, ",.4f"))
    for what in ("prefill", "decode"):
        key = f"{what}_tokens_per_s"
        for batch_size in dict.fromkeys(s["batch_size"] for s in results["speed"]):
            both = [s for s in results["speed"] if s["batch_size"] == batch_size]
            name = f"{what} tokens/s, batch {batch_size}"
            if reasons := [f"{s['precision']}: {s['reason']}" for s in both if "reason" in s]:
                shown.append(f"{name:<28}  {'; '.join(reasons)}")
            else:
                shown.append(row(name, {s["precision"]: s[key] for s in both}, ",.1f"))
    for q in results["quality"]:
        shown.append(
            f"{q['path']}, {q['tokens']:,} tokens: perplexity {q['perplexity_difference_percent']:+.3f} %, "
            f"KL(bf16 || fp8) {q['kl_mean_nats']:.5f} nats a token, "
            f"{q['equal_greedy_percent']:.2f} % of the likeliest tokens equal"
        )
    return shown


def command(arguments: argparse.Namespace) -> str:
    """The command line that repeats the report, without folders of this machine and without where it goes."""
    words = ["python", "fp8_inference_demo/fp8_inference.py"]
    for key in ("model", "report", "batch_size", "max_length"):
        value = getattr(arguments, key)
        if value is not None:
            words += [f"--{key}", model_name(value) if isinstance(value, Path) else str(value)]
    return shlex.join(words)


def plot(path: Path, results: dict[str, Any]) -> None:
    """Tokens/s by batch of both precisions, prefill and decode, as a PNG; the quality in its title."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4.5), layout="constrained")
    measured = [s for s in results["speed"] if "reason" not in s]
    for axis, what in zip(axes, ("prefill", "decode"), strict=True):
        for precision in PRECISIONS:
            mine = [s for s in measured if s["precision"] == precision]
            rates = [s[f"{what}_tokens_per_s"] for s in mine]
            axis.plot([s["batch_size"] for s in mine], rates, "o-", label=precision)
        axis.set(xlabel="batch", ylabel="tokens/s", title=what, xscale="log", yscale="log")
        sizes = sorted({s["batch_size"] for s in measured})
        axis.set_xticks(sizes, [str(size) for size in sizes], minor=False)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend()
    machine, quality = results["machine"], results["quality"][0]
    figure.suptitle(
        f"{results['model']['parameters'] / 1e6:,.1f} M parameters, {machine.get('gpu', machine['cpu'])}; FP8 to bf16: "
        f"perplexity {quality['perplexity_difference_percent']:+.2f} %, KL {quality['kl_mean_nats']:.4f} nats, "
        f"{quality['equal_greedy_percent']:.1f} % of the likeliest tokens equal",
        fontsize=9,
    )
    try:
        figure.savefig(path, dpi=120)
    finally:
        pyplot.close(figure)
