"""Measure vLLM's decoding speed for bench_decode.py.

    python test_fp8/model/vllm_decoding.py REQUEST.json ANSWER.json

This script runs with the packages of vLLM, so it imports nothing of this project.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

PROFILED_STEPS = 64


def measure(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure the seconds per decoding step of each batch and, if the engine runs in this process, of its GPU kernels.

    request: "model" (a folder with a config.json; the weights are random), "prompts" (for each batch, the token ids of
    its prompts, all of the same length), "cache" (length of the KV cache per sequence, in tokens) and "rounds" (number
    of timed repetitions).
    """
    import torch
    from vllm import LLM, SamplingParams

    batches, length = request["prompts"], len(request["prompts"][0][0])
    largest, new = max(map(len, batches)), request["cache"] - length
    llm = LLM(
        model=request["model"],
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=request["cache"],
        max_num_seqs=largest,
        max_num_batched_tokens=max(16384, largest * length),
        enable_prefix_caching=False,
        gpu_memory_utilization=0.5,
        compilation_config={"cudagraph_capture_sizes": sorted(map(len, batches))},
    )

    def generate(prompts: list[list[int]], tokens: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert all(len(answer.outputs[0].token_ids) == tokens for answer in answers)
        return seconds

    results = []
    for prompts in batches:
        for tokens in (new, new, 1):  # warm up
            generate(prompts, tokens)
        whole, first = (
            statistics.median(generate(prompts, tokens) for _ in range(request["rounds"]))
            for tokens in (new, 1)
        )
        results.append(
            {"batch": len(prompts), "seconds": (whole - first) / (new - 1), "version": version("vllm")}
        )
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and torch.cuda.is_available():
        for result, prompts in zip(
            results, batches, strict=True
        ):  # last, because profiling slows later steps
            tokens = min(new, PROFILED_STEPS + 1)
            whole, first = (kernel_seconds(partial(generate, prompts, n)) for n in (tokens, 1))
            result["kernel_seconds"] = (whole - first) / (tokens - 1)
    return results


def kernel_seconds(run: Callable[[], Any]) -> float:
    """Return the total duration of the GPU kernels and copies that `run` starts."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
    events = (event for event in profiler.events() if event.device_type == DeviceType.CUDA)
    return sum(event.time_range.elapsed_us() for event in events) / 1e6


if __name__ == "__main__":
    del sys.path[0]  # the folder of this script
    answer = measure(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    Path(sys.argv[2]).write_text(json.dumps(answer), encoding="utf-8")
