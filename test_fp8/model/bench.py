"""Measure the training speed of whole models for bench_model.py.

Each round builds, checks, warms up, times and frees the model of each benchmark case.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.modeling_outputs import CausalLMOutput

from model.build import build_model
from model.checks.startup import (
    attention_in_use,
    check_attention,
    check_startup,
    verify_fp8,
)
from model.config import GIB, flops_per_token, load_config, num_parameters
from model.conversion import to_hf_state_dict
from model.decoder import causal_lm_loss
from model.errors import UserError
from model.fp8.modules import fp8_modules
from model.fp8.precision import Precision
from model.fp8.recipes import FP8_TRAIN_ROW_MULTIPLE, PrecisionConfig
from model.fp8.te_backend import package_version
from model.variants import VARIANTS, cuda_graphs_problem
from test_fp8.common.cases import Case, Unavailable
from test_fp8.common.report import Outcome, Result, measured
from test_fp8.common.same_model import (
    LOSS_TOLERANCE,
    Conditions,
    DifferentModel,
    Reference,
    check_same_model,
    loss_error,
)
from test_fp8.common.timing import enqueue_ms, free_memory, laps_ms, memory_facts, timed_ms
from test_fp8.model import megatron
from test_fp8.model.cases import BASELINE, SEED, Setting, chosen_cases
from train.config.arguments import TrainingArguments
from train.config.ds_config import resolve_ds_config
from train.data.stream import Batch
from train.engine.process_group import call_on_rank_0, init_distributed, make_deterministic
from train.engine.step import MicroStep, build_engine, release
from train.phase import build_model_and_precision

SDPA_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
LIGER = "liger-kernel"
OUT_OF_MEMORY = "out of memory"
# torch and Transformer Engine raise errors that start with these words if no allowed attention supports the inputs.
NO_ATTENTION = ("No available kernel", "No dot product attention backend is available")
CONDITION_KEYS = ("seq_length", "accumulation", "rounds", "steps", "deterministic")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an exception or one of its causes is an out-of-memory error.

    The causes are checked because a failed CUDA graph capture raises a different error.
    """
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or OUT_OF_MEMORY in str(error).lower():
            return True
        error = error.__cause__ or error.__context__
    return False


@dataclass
class Series:
    """All measurements of a benchmark case.

    case: the benchmark case. settings: the settings to try, with their training arguments. found: the results for each
    setting. reasons: why a setting could not be measured. failed: the error of a failed case, or "". A failed case is
    reported without a speed.
    """

    case: Case
    settings: Mapping[Setting, TrainingArguments]
    found: dict[Setting, list[Result]] = field(default_factory=dict)
    reasons: dict[Setting, str] = field(default_factory=dict)
    failed: str = ""

    def candidates(self, turn: int) -> list[Setting]:
        """Return the settings to measure in a round.

        The first round tries all settings, and later rounds use only the fastest setting.
        """
        best = self.best()
        return list(self.settings) if not turn else [best] if best else []

    def refuse(self, setting: Setting, error: BaseException) -> None:
        """Record why a setting could not be measured.

        The case is marked as failed unless the setting is unsupported or runs out of memory.
        """
        text, is_fault = " ".join(str(error).split()), False
        if is_out_of_memory(error):
            text = OUT_OF_MEMORY
        elif not isinstance(error, Unavailable) and not text.startswith(NO_ATTENTION):
            is_fault = True
            if not isinstance(error, UserError):
                traceback.print_exception(error)
                text = f"{type(error).__name__}: {text[:300]}"
        self.reasons[setting] = text
        self.failed = text if is_fault else self.failed

    def best(self) -> Setting | None:
        return max(self.found, key=self.tokens_per_second, default=None)

    def speeds(self, setting: Setting) -> list[float]:
        """Return the measured speeds of a setting in tokens/s, with one value per round."""
        tokens = self.settings[setting].train_batch_size_tokens or 0
        return [tokens / one["ms"] * 1e3 for one in self.found[setting]]

    def tokens_per_second(self, setting: Setting) -> float:
        return statistics.median(self.speeds(setting))

    def result(self, flops_per_token: float) -> Result:
        setting = None if self.failed else self.best()
        arguments = self.settings[setting or next(iter(self.settings))]
        measured = [s._asdict() | {"tokens_per_second": self.tokens_per_second(s)} for s in self.found]
        result: Result = {
            "row": self.case.name,
            "variant": "megatron_core" if self.case.megatron is not None else arguments.model.variant,
            "compute": arguments.precision.compute,
            "configuration": {**self.case.overrides, **(self.case.megatron or {})},
            "tried": measured + [s._asdict() | {"reason": why} for s, why in self.reasons.items()],
        }
        if setting is None:
            reason = self.failed or next(iter(self.reasons.values()), "not measured")
            return result | {"reason": reason, "failed": bool(self.failed)}
        each, speeds, speed = self.found[setting], self.speeds(setting), self.tokens_per_second(setting)
        largest = {
            key: max(one[key] for one in each) for key in ("allocated_gib", "reserved_gib", "loss_error")
        }
        figures = {
            "micro_batch": setting.micro_batch,
            "tokens_per_second": speed,
            "tflops": speed * flops_per_token / 1e12,
            "step_ms": statistics.median(one["ms"] for one in each),
            "rounds": speeds,
            "drift": max(speeds) / min(speeds) - 1,
        }
        return result | each[-1] | largest | figures


def measure(options: argparse.Namespace) -> Outcome:
    """Measure all benchmark cases that the command line selects.

    Raises ValueError for a sequence length that the model or FP8 does not support.
    """
    config = load_config(options.config)
    longest, parameters = config.max_position_embeddings, num_parameters(config)
    if options.seq_length % FP8_TRAIN_ROW_MULTIPLE or options.seq_length > longest:
        raise ValueError(
            f"--seq_length {options.seq_length} is not supported; use a multiple of {FP8_TRAIN_ROW_MULTIPLE} that is "
            f"at most {longest} (max_position_embeddings of the model)"
        )
    series = [Series(case, settings) for case, settings in chosen_cases(options)]
    flops = flops_per_token(config, options.seq_length)
    if options.deterministic:
        make_deterministic()
    is_own_group = not dist.is_initialized()
    if is_own_group:
        init_distributed()
    conditions = make_conditions(options, config)
    tolerance = conditions.reference.logits_tolerance()
    print(
        f"{Path(options.config).name}: {parameters / 1e6:,.1f} M parameters, {flops / 1e9:.3f} GFLOP per token; ranks: "
        f"{dist.get_world_size()}\nAllowed relative errors compared with transformers: {LOSS_TOLERANCE} for the loss, "
        f"{tolerance} for the logits",
        flush=True,
    )
    for turn in range(options.rounds):
        for one in series if turn % 2 == 0 else reversed(series):
            measure_turn(one, turn, conditions)
    free_memory()
    results = [one.result(flops) for one in series]
    add_ratios(measured(results))
    more = {
        "model": Path(options.config).name,
        "parameters": parameters,
        "gflop_per_token": flops / 1e9,
        **{key: getattr(options, key) for key in CONDITION_KEYS},
        "ranks": dist.get_world_size(),
        "loss_tolerance": LOSS_TOLERANCE,
        "logits_tolerance": tolerance,
    }
    if is_own_group:
        dist.destroy_process_group()
    failures = [f"{r['row']}: {r['reason']}" for r in results if r.get("failed")]
    return Outcome(
        results,
        more,
        ['* marks the fastest bf16 case. The column "x bf16" contains the speed relative to this case.'],
        failures,
    )


def make_conditions(options: argparse.Namespace, config: Any) -> Conditions:
    """Create a random batch, and compute the reference results with the transformers model in bf16."""
    generator = torch.Generator().manual_seed(SEED)
    shape = max(options.micro_batch), options.seq_length + 1
    ids = torch.randint(config.vocab_size, shape, generator=generator)
    ids = ids.to("cuda" if torch.cuda.is_available() else "cpu")
    batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    model = build_model(config, "hf", Precision(PrecisionConfig(compute="bf16")), seed=SEED)
    reference = Reference.compute(model, batch.input_ids, batch.labels)
    return Conditions(config, reference, batch, options.seconds, options.steps)


def measure_turn(one: Series, turn: int, conditions: Conditions) -> None:
    """Measure one round of a benchmark case. On a single rank, an error does not stop the other cases."""
    for setting in one.candidates(turn):
        if one.failed:
            return
        arguments = one.settings[setting]
        label = f"{one.case.name:<38} {' '.join(map(str, setting))}"
        try:
            if one.case.megatron is not None:
                found = megatron.measure_case(arguments, one.case.megatron, conditions)
            else:
                found = measure_case(arguments, setting, conditions)
        except Exception as error:
            if dist.get_world_size() > 1:  # the other ranks may be waiting for this one
                error.add_note(f"benchmark case {label}")
                raise
            one.refuse(setting, error)
            print(f"{label}: {one.reasons[setting]}", flush=True)
            continue
        one.found.setdefault(setting, []).append(found)
        speed = one.speeds(setting)[-1]
        print(
            f"{label}: {speed:,.0f} tokens/s, loss {found['loss']:.5f}, attention {found['attention']}",
            flush=True,
        )


def add_ratios(results: Sequence[Result]) -> None:
    """Add the speed relative to the baseline case and to the fastest bf16 case to each result."""
    base = next((r["tokens_per_second"] for r in results if r["row"] == BASELINE), None)
    bf16 = [r for r in results if r["compute"] == "bf16"]
    best = max(bf16, key=lambda r: r["tokens_per_second"], default=None)
    for r in results:
        speed = r["tokens_per_second"]
        r[f"ratio_to_{BASELINE}"] = speed / base if base else None
        r["ratio_to_best_bf16"] = speed / best["tokens_per_second"] if best else None
        r["best_bf16"] = r is best


def measure_case(arguments: TrainingArguments, setting: Setting, conditions: Conditions) -> Result:
    """Measure a benchmark case once, and return the values for the report.

    The value "ms" is the time in milliseconds for an optimizer step. arguments: the resolved training arguments. Raises
    Unavailable, DifferentModel, StartupCheckError, PrecisionError, or any error that occurs when the model runs.
    """
    free_memory()
    before = torch.cuda.memory_allocated() / GIB
    no_graphs = cuda_graphs_problem(arguments.model.variant, emulated=not torch.cuda.is_available())
    if arguments.speed.cuda_graphs and no_graphs:
        raise Unavailable(no_graphs)
    config = load_config(arguments.model.config)
    model, precision = build_model_and_precision(arguments, config)
    model.train()
    is_te, engine = VARIANTS[arguments.model.variant].te, None
    pinned = "auto" if is_te else setting.attention
    try:
        with pin_sdpa(pinned):
            if not is_te:
                use_loss(model, setting.loss)
            facts = check_case(model, precision, arguments, conditions)
            ds_config = resolve_ds_config(arguments, config, dist.get_world_size())
            engine = build_engine(model, arguments, ds_config)
            facts |= time_steps(engine, precision, arguments, conditions)
            facts |= memory_facts(before)
    finally:
        if engine is not None:
            release(engine)  # DeepSpeed's global tables keep references to the engine and its model
    check_attention(model, precision, facts["attention"])
    if pinned != "auto":
        facts["attention"] += f", {pinned}"
    fused = is_te and model.fused_cross_entropy is not None
    return facts | {"loss_kind": "fused" if fused else "torch" if is_te else setting.loss}


@contextmanager
def pin_sdpa(name: str) -> Iterator[None]:
    """Select the backend of torch's SDPA for the `with` block. With "auto", torch chooses the backend."""
    if name == "auto":
        yield
        return
    # disable torch's disk cache: its key does not include the backend, so code compiled for another backend would run
    with sdpa_kernel(SDPA_BACKENDS[name]), functorch_config.patch(enable_autograd_cache=False):
        yield


def use_loss(model: Any, name: str) -> None:
    """Select the loss implementation of a model that is built from transformers modules.

    - "torch" computes the cross entropy of float32 logits.
    - "compiled" compiles the loss with torch.compile, which stores only bf16 logits.
    - "liger" fuses lm_head and loss in one kernel, which stores no logits and computes gradients in the forward pass.

    Raises Unavailable if this host or this model does not support the loss.
    """
    if name == "torch":
        model.loss_of = causal_lm_loss
    elif name == "compiled":
        model.loss_of = torch.compile(causal_lm_loss, fullgraph=True, dynamic=False)
    else:
        plain, linear_loss = model.forward, _liger(model)

        def forward(
            input_ids: torch.Tensor,
            labels: torch.Tensor | None = None,
            is_first_microbatch: bool | None = None,
            documents: None = None,
        ) -> CausalLMOutput:
            if labels is None:
                return plain(input_ids)
            hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state
            loss = linear_loss(hidden.flatten(0, 1), model.lm_head.weight, labels.flatten())
            return CausalLMOutput(loss=loss)

        model.forward = forward


def _liger(model: Any) -> Callable[..., torch.Tensor]:
    if package_version(LIGER) is None or not torch.cuda.is_available():
        raise Unavailable(
            f"the loss implementation 'liger' needs a GPU and the package {LIGER} (pip install -r "
            "requirements-gpu.txt)"
        )
    if type(model.lm_head) is not nn.Linear:
        raise Unavailable(
            "the loss implementation 'liger' needs a bf16 lm_head, but this case has an FP8 lm_head"
        )
    return importlib.import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy


def check_case(
    model: nn.Module, precision: Precision, arguments: TrainingArguments, conditions: Conditions
) -> Result:
    """Check that a model equals the transformers model, and that it uses the configured precision and attention.

    Returns the values for the report. Raises DifferentModel or StartupCheckError.
    """
    compute, asked_for = precision.config.compute, arguments.model.attention_backend
    weights, ids = to_hf_state_dict(model), conditions.batch.input_ids
    error = check_same_model(model, weights, compute, conditions.reference, ids)
    lines = check_startup(model, precision, asked_for, arguments.seed, arguments.max_seq_length)
    attention = attention_in_use(model, precision)
    if asked_for != "auto" and attention != "torch SDPA" and not attention.startswith(asked_for):
        raise DifferentModel(f"attention backend {asked_for} was requested, but {attention} was used")
    planned = len(fp8_modules(model, precision).planned)
    return {"logits_error": error, "fp8_modules": planned, "attention": attention, "startup_checks": lines}


def first_loss(
    run: Callable[[], Any], model: nn.Module, precision: Precision, samples: int, reference: Reference
) -> Result:
    """Run the first forward and backward pass of a model, and return the values for the report.

    The FP8 GEMMs are checked, and the loss is compared with the loss of the transformers model.

    Raises StartupCheckError or DifferentModel.
    """
    start = time.perf_counter()
    with verify_fp8(model, precision):
        loss = float(run())
    prepare_s = time.perf_counter() - start
    error = loss_error(loss, precision.config.compute, reference, samples)
    return {"loss": loss, "loss_error": error, "prepare_s": prepare_s}


def time_steps(
    engine: Any, precision: Precision, arguments: TrainingArguments, conditions: Conditions
) -> Result:
    """Time whole optimizer steps, which run as in train.py, and return the values for the report."""
    samples = arguments.per_device_train_batch_size
    batch = Batch(*(t[:samples].contiguous() for t in conditions.batch[:2]))
    micro_step = MicroStep(engine, precision, arguments)
    one_pass = partial(micro_step, batch, 0)

    def micro_batches(first: int = 0) -> None:
        for index in range(first, arguments.gradient_accumulation_steps or 1):
            micro_step(batch, index)

    facts = first_loss(one_pass, engine.module, precision, samples, conditions.reference)
    micro_batches(1)
    step_ms = timed_ms(micro_batches)
    # rank 0 determines the number of steps for all ranks
    count = call_on_rank_0(lambda: conditions.count_steps(step_ms))
    launch_ms = enqueue_ms(one_pass)
    micro_batches(1)
    ms = statistics.median(laps_ms([micro_batches] * count))
    return facts | {"ms": ms, "launch_ms": launch_ms, "notes": micro_step.notes}
