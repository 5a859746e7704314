"""Functions that need vLLM or its packages, for bench_decode.py and check_exports.py.

    python test_fp8/model/vllm_functions.py REQUEST.json ANSWER.json

The request has the name of a "function" of this file, its arguments in each of several "calls", and the "package" whose
version the answer reports. This script runs with the packages of vLLM, so it imports nothing of this project.
"""

from __future__ import annotations

import gc
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

import torch

BLOCK = 128
PROFILED_STEPS = 64


def measure_decoding(
    folder: str, batches: list[list[list[int]]], cache: int, rounds: int
) -> list[dict[str, Any]]:
    """Measure the time of a decoding step for each batch.

    folder: model folder with a config.json; the weights are random. batches: for each batch, the token ids of its
    prompts, all of the same length. cache: length of the KV cache per sequence, in tokens. rounds: number of timed
    repetitions.

    Returns for each batch "batch" (number of prompts), "seconds" (time per step) and, on a GPU with
    VLLM_ENABLE_V1_MULTIPROCESSING=0, "kernel_seconds" (time of the GPU kernels per step).
    """
    from vllm import LLM, SamplingParams

    length = len(batches[0][0])
    largest, new = max(map(len, batches)), cache - length
    llm = LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=cache,
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
            statistics.median(generate(prompts, tokens) for _ in range(rounds)) for tokens in (new, 1)
        )
        results.append({"batch": len(prompts), "seconds": (whole - first) / (new - 1)})
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


def score_with_vllm(folder: str, texts: list[str], new: int) -> list[dict[str, Any]]:
    """Return the token ids of each text, a greedy continuation of `new` tokens, and the log-probabilities of both."""
    # torch.cuda must not be used before this import, because the engine of vLLM runs in a fork of this process
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder,
        max_model_len=1024,
        max_num_seqs=len(texts),
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=2**30,
        compilation_config={"cudagraph_capture_sizes": [len(texts)]},
    )
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, logprobs=1, prompt_logprobs=0)
    scored = []
    for answer in llm.generate(texts, params, use_tqdm=False):
        ids, tokens = list(answer.prompt_token_ids), list(answer.outputs[0].token_ids)
        found = [*answer.prompt_logprobs[1:], *answer.outputs[0].logprobs]
        logprobs = [at[token].logprob for at, token in zip(found, [*ids[1:], *tokens], strict=True)]
        scored.append({"ids": ids, "tokens": tokens, "logprobs": logprobs})
    return scored


def score_with_transformers(folder: str, texts: list[str], scored: list[dict[str, Any]]) -> dict[str, Any]:
    """Compute the log-probabilities of the tokens that vLLM has scored.

    Returns lists with one number per token of all texts: "exact" in float32 with the stored weights, and "rounded" in
    bf16 and, for FP8 weights, with activations in FP8. "gap" has one number for each token that vLLM generated: the
    highest log-probability at this position minus the log-probability of the token, in float32. "same_ids" and
    "same_greedy" count the texts for which transformers has the same token ids and the same greedy continuation.
    """
    from transformers import AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    exact, rounded = (load(folder, in_float32).to(device) for in_float32 in (True, False))
    found: dict[str, Any] = {"exact": [], "rounded": [], "gap": [], "same_ids": 0, "same_greedy": 0}
    for text, by_vllm in zip(texts, scored, strict=True):
        ids, tokens = by_vllm["ids"], by_vllm["tokens"]
        found["same_ids"] += tokenizer(text)["input_ids"] == ids
        sequence = torch.tensor([ids + tokens], device=device)
        for name, model in (("rounded", rounded), ("exact", exact)):
            with torch.no_grad():
                logprobs = model(input_ids=sequence).logits[0, :-1].float().log_softmax(-1)
            chosen = logprobs.gather(1, sequence[0, 1:, None])[:, 0]
            found[name] += chosen.tolist()
        gap = (logprobs.amax(1) - chosen)[len(ids) - 1 :].tolist()
        found["gap"] += gap
        found["same_greedy"] += not any(gap)
    return found


def load(folder: str, exact: bool) -> Any:
    """Load a model in float32 with its stored weights, or in bf16 with FP8 activations if the weights are in FP8.

    With one scale per row, compressed-tensors runs FP8 kernels. With block scaling, transformers would download
    kernels. This function instead dequantizes the weights, which is exact in bf16, and rounds the activations of each
    FP8 matrix.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    stored: dict[str, Any] = getattr(config, "quantization_config", {})
    blocks = stored.get("quant_method") == "fp8"
    if stored:
        stored["dequantize"] = exact or blocks
        if not exact and not blocks:
            stored["use_optimized_inference"] = True
    dtype = torch.float32 if exact and not blocks else torch.bfloat16
    model: Any = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype)
    model.eval()
    if exact:
        return model.float()
    if blocks:
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name not in stored["modules_to_not_convert"]:
                module.register_forward_pre_hook(lambda _, inputs: round_to_fp8(inputs[0]))
    return model


def round_to_fp8(x: torch.Tensor) -> torch.Tensor:
    """Round activations to FP8 with one scale per 128 values of a row."""
    groups = x.float().unflatten(-1, (-1, BLOCK))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2).to(x.dtype)


def main(asked: str, answered: str) -> None:
    request = json.loads(Path(asked).read_text(encoding="utf-8"))
    found = []
    for arguments in request["calls"]:
        found.append(globals()[request["function"]](**arguments))
        gc.collect()
    answer = {"version": version(request["package"]), "found": found}
    Path(answered).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    del sys.path[0]  # the folder of this script
    main(*sys.argv[1:])
