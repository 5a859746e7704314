"""Measure the decoding and prefill speeds for bench_decode.py."""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from fp8_inference_demo.engine import Engine
from fp8_inference_demo.sampling import Sampling
from fp8_inference_demo.weights import Weights, pack
from model.config import GIB, flops_per_token, num_parameters, weight_shapes
from model.serving import quantization_config
from test_fp8.common.launch import call_with_vllm, vllm_environment
from test_fp8.common.report import Result
from test_fp8.common.timing import median_ms

GREEDY = Sampling(temperature=0)
# vLLM's engine in its own process, which is the default, and in the process of the caller
VLLM_SETTINGS = [{"VLLM_ENABLE_V1_MULTIPROCESSING": own_process} for own_process in "10"]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def measure(options: argparse.Namespace, config: Any) -> list[Result]:
    config.eos_token_id = None
    weights = {precision: random_weights(config, precision) for precision in ("fp8", "bf16")}
    generator = torch.Generator().manual_seed(1)
    results, prompts = [], []
    for batch in options.batches:
        prompts.append(torch.randint(config.vocab_size, (batch, options.prompt), generator=generator))
        results += decode(options, weights, prompts[-1])
        print(f"measured the decoding speed with batch size {batch}", flush=True)
    results += prefill(options, config, weights)
    weights.clear()
    torch.cuda.empty_cache()
    if options.transformers_batches:
        results += decode_with_transformers(options, config, generator)
        torch.cuda.empty_cache()
    if environment := vllm_environment():
        results += decode_with_vllm(options, config, prompts, environment)
    else:
        print("vLLM is not installed, so the vLLM cases are skipped", flush=True)
    return results


def random_weights(config: Any, precision: str) -> Weights:
    """Return random weights with the standard deviation initializer_range, in the given precision."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    tensors: dict[str, Any] = {}
    for name, shape in weight_shapes(config).items():
        noise = torch.randn(shape, generator=generator, device=DEVICE) * config.initializer_range
        tensors[name] = (noise if len(shape) > 1 else torch.ones(shape, device=DEVICE)).bfloat16()
    return pack(tensors, config, precision)


def make_result(what: str, row: str, batch: int, seconds: float, tokens: int, **more: Any) -> Result:
    rate = {"ms": seconds * 1000, "tokens_per_s": tokens / seconds}
    return {"what": what, "row": row, "batch": batch, **rate, **more}


def decode(options: argparse.Namespace, weights: dict[str, Weights], prompts: torch.Tensor) -> list[Result]:
    batch, new = len(prompts), options.cache - options.prompt
    engines = {precision: Engine(of, batch, options.cache) for precision, of in weights.items()}
    times: dict[str, list[float]] = defaultdict(list)
    for turn in range(options.rounds + 1):  # the first round is a warm-up
        for precision, engine in engines.items():
            run = engine.generate(prompts.tolist(), GREEDY, [0] * batch, new)
            for _ in run:
                pass
            if turn:
                times[precision].append(run.timing.decode_s / (new - 1))
    return [
        make_result("decode", p, batch, statistics.median(of), batch, weights_gib=weights[p].nbytes / GIB)
        for p, of in times.items()
    ]


def prefill(options: argparse.Namespace, config: Any, weights: dict[str, Weights]) -> list[Result]:
    batch, length = options.prefill_batch, options.prefill_length
    ids = torch.randint(config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(2))
    flops = flops_per_token(config, length) / 3  # FLOPs for the forward pass of one token
    # the engine computes logits only for the last token of each prompt
    of_logits = 2 * config.vocab_size * config.hidden_size
    engine_flops = flops * ids.numel() - of_logits * (ids.numel() - batch)
    results = []
    for precision, of in weights.items():
        engine = Engine(of, batch, length + 1)
        step, prompts = engine.step(batch, GREEDY), ids.tolist()
        seconds = median_ms(partial(engine.prefill, step, prompts), options.rounds) / 1e3
        tflops = engine_flops / seconds / 1e12
        results.append(make_result("prefill", precision, batch, seconds, ids.numel(), tflops=tflops))
        del engine, step
    return results


def decode_with_transformers(
    options: argparse.Namespace, config: Any, generator: torch.Generator
) -> list[Result]:
    from transformers import AutoModelForCausalLM

    torch.set_default_dtype(torch.bfloat16)
    with DEVICE:
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    torch.set_default_dtype(torch.float32)
    results, new = [], options.cache - options.prompt
    for batch in options.transformers_batches:
        ids = torch.randint(config.vocab_size, (batch, options.prompt), generator=generator).to(DEVICE)

        def seconds(tokens: int, ids: torch.Tensor = ids) -> float:
            start = time.perf_counter()
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                cache_implementation="static",
                pad_token_id=0,
            )
            out.cpu()
            return time.perf_counter() - start

        for tokens in (new, new, 1):  # warm up and compile
            seconds(tokens)
        whole, first = (statistics.median(seconds(n) for _ in range(options.rounds)) for n in (new, 1))
        each = (whole - first) / (new - 1)
        gib = num_parameters(config) * 2 / GIB
        results.append(make_result("decode", "transformers", batch, each, batch, weights_gib=gib))
        print(f"measured the decoding speed of transformers with batch size {batch}", flush=True)
    return results


def decode_with_vllm(
    options: argparse.Namespace, config: Any, prompts: list[torch.Tensor], environment: Mapping[str, str]
) -> list[Result]:
    """Measure decoding with vLLM in FP8 (one scale per row, as in train/export.py) and in bf16.

    Returns one result per precision and batch size, measured with the fastest of VLLM_SETTINGS. Settings that fail are
    skipped.
    """
    results = []
    for precision in ("fp8", "bf16"):
        stored = copy.deepcopy(config)
        stored.architectures = [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
        stored.dtype = torch.bfloat16
        if precision == "fp8":
            stored.quantization_config = quantization_config(False, ["lm_head"])
        measured: dict[int, list[Result]] = defaultdict(list)
        with tempfile.TemporaryDirectory() as folder:
            stored.save_pretrained(folder)
            call = {"folder": folder, "batches": [ids.tolist() for ids in prompts]}
            call |= {"cache": options.cache, "rounds": options.rounds}
            for settings in VLLM_SETTINGS:
                try:
                    answer = call_with_vllm("measure_decoding", [call], {**environment, **settings})
                except ValueError as error:
                    print(
                        f"vLLM failed and is skipped; precision: {precision}, settings: {settings}, error: {error}",
                        flush=True,
                    )
                    continue
                for found in answer["found"][0]:
                    found |= {"version": answer["version"], "settings": settings}
                    measured[found["batch"]].append(found)
                print(
                    f"measured the decoding speed of vLLM; precision: {precision}, settings: {settings}",
                    flush=True,
                )
        for batch, found in measured.items():
            best = min(found, key=lambda r: r["seconds"])
            kernels = min((r["kernel_seconds"] for r in found if "kernel_seconds" in r), default=0)
            more = {key: best[key] for key in ("version", "settings")} | {"kernel_ms": kernels * 1000 or None}
            results.append(make_result("decode", f"vllm {precision}", batch, best["seconds"], batch, **more))
    return results
