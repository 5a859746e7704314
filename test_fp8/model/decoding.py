"""bench_decode.py's measurements."""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from typing import Any

import torch

from fp8_inference_demo.engine import Engine
from fp8_inference_demo.sampling import Sampling
from fp8_inference_demo.weights import Weights, pack
from model.build import build_model
from model.config import GIB, flops_per_token, load_config, num_parameters, weight_shapes
from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from test_fp8.common.report import Result

GREEDY = Sampling(temperature=0)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def random_weights(config: Any, precision: str) -> Weights:
    """As at the start of a training."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    tensors: dict[str, Any] = {}
    for name, shape in weight_shapes(config).items():
        noise = torch.randn(shape, generator=generator, device=DEVICE) * config.initializer_range
        tensors[name] = (noise if len(shape) > 1 else torch.ones(shape, device=DEVICE)).bfloat16()
    return pack(tensors, config, precision)


def measure(options: argparse.Namespace) -> list[Result]:
    config = load_config(options.config)
    config.eos_token_id = None
    weights = {precision: random_weights(config, precision) for precision in ("fp8", "bf16")}
    results = []
    generator = torch.Generator().manual_seed(1)
    for batch in options.batches:
        prompts = torch.randint(config.vocab_size, (batch, options.prompt), generator=generator)
        results += _decode(options, weights, prompts)
        print(f"batch {batch} is done", flush=True)
    results += _prefill(options, config, weights)
    if options.transformers_batches:
        weights.clear()
        torch.cuda.empty_cache()
        results += _transformers(options, config, generator)
    return results


def _decode(options: argparse.Namespace, weights: dict[str, Weights], prompts: torch.Tensor) -> list[Result]:
    batch, new = len(prompts), options.cache - options.prompt
    engines = {precision: Engine(of, batch, options.cache) for precision, of in weights.items()}
    times: dict[str, list[float]] = defaultdict(list)
    for turn in range(options.rounds + 1):
        for precision, engine in engines.items():
            run = engine.generate(prompts.tolist(), GREEDY, [0] * batch, new)
            for _ in run:
                pass
            if turn:
                times[precision].append(run.timing.decode_s / (new - 1))
    return [
        _result("decode", precision, batch, statistics.median(of), batch, weights[precision])
        for precision, of in times.items()
    ]


def _result(
    what: str, row: str, batch: int, seconds: float, tokens: int, weights: Weights | None = None
) -> Result:
    result = {
        "what": what,
        "row": row,
        "batch": batch,
        "ms": seconds * 1000,
        "tokens_per_s": tokens / seconds,
    }
    return result | ({} if weights is None else {"weights_gib": weights.nbytes / GIB})


def _timed(rounds: int, run: Any) -> float:
    """Median seconds, after a first time."""
    times = []
    for turn in range(rounds + 1):
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        if turn:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def _prefill(options: argparse.Namespace, config: Any, weights: dict[str, Weights]) -> list[Result]:
    batch, length = options.prefill_batch, options.prefill_length
    ids = torch.randint(config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(2))
    whole = flops_per_token(config, length) / 3 * ids.numel()
    # the engine computes the logits of each row's last token alone
    flops = whole - 2 * config.vocab_size * config.hidden_size * (ids.numel() - batch)
    results = []
    for precision, of in weights.items():
        engine = Engine(of, batch, length + 1)
        step, rows = engine.step(batch, GREEDY), ids.tolist()
        seconds = _timed(options.rounds, lambda e=engine, s=step, r=rows: e.prefill(s, r))
        results.append(_result("prefill", precision, batch, seconds, ids.numel()))
        results[-1]["tflops"] = flops / seconds / 1e12
        del engine, step
    model = build_model(config, "te_layer", Precision(PrecisionConfig()))
    micro = min(8, batch)
    ids = ids[:micro].to(DEVICE)
    with torch.no_grad():
        seconds = _timed(options.rounds, lambda: model(ids, is_first_microbatch=None))
    results.append(_result("forward of training", "te_layer fp8", micro, seconds, ids.numel()))
    results[-1]["tflops"] = whole * micro / batch / seconds / 1e12
    return results


def _transformers(options: argparse.Namespace, config: Any, generator: torch.Generator) -> list[Result]:
    from transformers import MistralForCausalLM

    torch.set_default_dtype(torch.bfloat16)
    with DEVICE:
        model: Any = MistralForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    torch.set_default_dtype(torch.float32)
    results = []
    for batch in options.transformers_batches:
        ids = torch.randint(config.vocab_size, (batch, options.prompt), generator=generator).to(DEVICE)

        def generate(new: int, ids: torch.Tensor = ids) -> float:
            start = time.perf_counter()
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                do_sample=False,
                cache_implementation="static",
                pad_token_id=0,
            )
            assert out.shape[1] == options.prompt + new
            out.cpu()
            return time.perf_counter() - start

        new = options.cache - options.prompt
        for tokens in (new, new, 1):
            generate(tokens)
        whole, first = (
            statistics.median(generate(tokens) for _ in range(options.rounds)) for tokens in (new, 1)
        )
        results.append(_result("decode", "transformers", batch, (whole - first) / (new - 1), batch))
        results[-1]["weights_gib"] = num_parameters(config) * 2 / GIB
        print(f"transformers, batch {batch}, is done", flush=True)
    return results
