"""Measure Megatron-Core with the same model, for the benchmark cases megatron_core_* of bench_model.py.

The model is Megatron-Core's GPTModel with Transformer Engine modules and all supported fusions. Megatron-Core's
schedule and distributed optimizer train the model. Megatron-Core (license: Apache 2.0) must be installed. This file
contains no code from Megatron-Core.
"""

from __future__ import annotations

import importlib
import itertools
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MistralConfig
from transformers.modeling_outputs import CausalLMOutput

from model.checks.startup import verify_attention
from model.config import GIB, has_qk_norm, head_dim, rope_parameters, window_size
from model.documents import reached
from model.fp8 import te_backend
from model.fp8.precision import Precision
from model.variants import ATTENTION_BACKENDS
from test_fp8.common.cases import Unavailable
from test_fp8.common.report import Result
from test_fp8.common.same_model import Conditions, DifferentModel, check_same_model, loss_error
from test_fp8.common.timing import enqueue_ms, free_memory, laps_ms, memory_facts, timed_ms
from train.config.arguments import TrainingArguments

PACKAGE, VERSION = "megatron-core", "0.19.2"
NONDETERMINISTIC = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"  # read by Transformer Engine's attention; "0" forbids
# Megatron imports a GEMM that accumulates into float32 gradients from apex. Transformer Engine has the same GEMM.
APEX_GEMM = "fused_weight_gradient_mlp_cuda"
RECIPES = {"delayed": "delayed", "current": "tensorwise"}  # this project's names -> Megatron's names
FP8_GEMMS_A_LAYER = 12  # output, input gradient and weight gradient of qkv, proj, fc1 and fc2
LAYER = (
    *("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
NORMS = {  # of q and k in Qwen3
    "self_attn.q_norm": "self_attention.q_layernorm.weight",
    "self_attn.k_norm": "self_attention.k_layernorm.weight",
}
core = partial(importlib.import_module, package="megatron.core")


def require_megatron() -> None:
    """Raise Unavailable if there is no GPU, or if the supported version of Megatron-Core is not installed."""
    if (found := te_backend.package_version(PACKAGE)) != VERSION:
        raise Unavailable(
            f"{PACKAGE} {VERSION} is required (installed: {found}). Run pip install --no-deps "
            f"{PACKAGE}=={VERSION} with Python 3.12."
        )
    if not torch.cuda.is_available():
        raise Unavailable(
            "no CUDA GPU is available, but Megatron-Core needs a GPU for Transformer Engine modules"
        )


def to_megatron(weights: Mapping[str, Tensor], config: MistralConfig) -> dict[str, Tensor]:
    """Convert weights with Hugging Face names to Megatron-Core's names and layout.

    In Megatron-Core's qkv weight, the rows are grouped by key/value head. Each group contains the rows of the query
    heads that share the key/value head, then the rows of the key head, then the rows of the value head.
    """
    K, D = config.num_key_value_heads, head_dim(config)
    named = {
        "embedding.word_embeddings.weight": weights["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": weights["model.norm.weight"],
    }
    if not config.tie_word_embeddings:
        named["output_layer.weight"] = weights["lm_head.weight"]
    for index in range(config.num_hidden_layers):
        names = (*LAYER, *(NORMS if has_qk_norm(config) else ()))
        of = {name: weights[f"model.layers.{index}.{name}.weight"] for name in names}
        heads = [of[f"self_attn.{x}_proj"].view(K, -1, D, config.hidden_size) for x in "qkv"]
        layer = {
            "self_attention.linear_qkv.layer_norm_weight": of["input_layernorm"],
            "self_attention.linear_qkv.weight": torch.cat(heads, 1).flatten(0, 2),
            "self_attention.linear_proj.weight": of["self_attn.o_proj"],
            "mlp.linear_fc1.layer_norm_weight": of["post_attention_layernorm"],
            "mlp.linear_fc1.weight": torch.cat([of["mlp.gate_proj"], of["mlp.up_proj"]]),
            "mlp.linear_fc2.weight": of["mlp.down_proj"],
        }
        layer |= {NORMS[name]: weight for name, weight in of.items() if name in NORMS}
        named |= {f"decoder.layers.{index}.{name}": weight for name, weight in layer.items()}
    return named


class Model(nn.Module):
    """A wrapper that gives Megatron-Core's GPTModel the forward signature of the other benchmarked models."""

    def __init__(self, gpt: Any, config: MistralConfig):
        super().__init__()
        self.gpt, self.config = gpt, config

    def inputs(self, input_ids: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the arguments for GPTModel: token ids and positions, int64 [batch, sequence], and no mask."""
        return (
            input_ids,
            torch.arange(input_ids.shape[1], device=input_ids.device).expand(input_ids.shape),
            None,
        )

    def forward(self, input_ids: Tensor) -> CausalLMOutput:
        """Return the logits [batch, sequence, vocabulary]. The weights are quantized again in each call."""
        self.gpt.set_is_first_microbatch()
        self.gpt.eval()  # in training mode, Megatron-Core would record this call for its CUDA graphs
        logits = self.gpt(*self.inputs(input_ids))
        self.gpt.train()
        return CausalLMOutput(logits=logits)


def transformer_config(
    config: MistralConfig, arguments: TrainingArguments, switches: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments for Megatron-Core's TransformerConfig, given the model and training configuration."""
    precision = arguments.precision
    window = reached(window_size(config), arguments.max_seq_length)
    options: dict[str, Any] = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": head_dim(config),
        "qk_layernorm": has_qk_norm(config),
        "ffn_hidden_size": config.intermediate_size,
        "layernorm_epsilon": config.rms_norm_eps,
        "normalization": "RMSNorm",
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "window_size": None if window == (-1, 0) else window,
        "perform_initialization": False,
        "use_cpu_initialization": False,
        "params_dtype": torch.bfloat16,
        "bf16": True,
        "deterministic_mode": arguments.full_determinism,
        "apply_rope_fusion": True,
        "bias_activation_fusion": True,
        "bias_dropout_fusion": True,
        "gradient_accumulation_fusion": True,
        "cross_entropy_loss_fusion": True,
        "cross_entropy_fusion_impl": "te",
        **switches,
    }
    if precision.compute == "fp8":
        options |= {"fp8": precision.fp8_format, "fp8_recipe": RECIPES[precision.recipe]}
        if precision.recipe == "delayed":
            options["fp8_amax_history_len"] = precision.amax_history_len
            options["fp8_amax_compute_algo"] = precision.amax_compute_algo
    return options


def build(
    config: MistralConfig,
    arguments: TrainingArguments,
    switches: Mapping[str, Any],
    weights: Mapping[str, Tensor],
) -> tuple[Model, Any]:
    """Build the Megatron-Core model in training mode, and return the model and its TransformerConfig.

    weights: the initial weights, with Hugging Face names. Raises DifferentModel if the converted weights do not match
    Megatron-Core's parameters.
    """
    provide_apex_gemm()
    state: Any = core(".parallel_state")
    if not state.model_parallel_is_initialized():
        state.initialize_model_parallel()
    has_graphs = "cuda_graph_impl" in switches  # CUDA graphs need Transformer Engine's random numbers
    core(".tensor_parallel").model_parallel_cuda_manual_seed(
        arguments.seed, te_rng_tracker=has_graphs, force_reset_rng=True
    )
    options = transformer_config(config, arguments, switches)
    backends: Any = core(".transformer.enums").AttnBackend
    options["attention_backend"] = backends[arguments.model.attention_backend]
    specs: Any = core(".models.gpt.gpt_layer_specs")
    fuser = bool(switches.get("use_transformer_engine_op_fuser"))
    settings = core(".transformer").TransformerConfig(**options)
    # with gradients, FP8 parameters would keep their uninitialized values for the optimizer
    with torch.no_grad():
        gpt = (
            core(".models.gpt")
            .GPTModel(
                settings,
                specs.get_gpt_layer_with_transformer_engine_spec(
                    qk_layernorm=has_qk_norm(config), use_te_op_fuser=fuser
                ),
                vocab_size=config.vocab_size,
                max_sequence_length=arguments.max_seq_length,
                share_embeddings_and_output_weights=config.tie_word_embeddings,
                position_embedding_type="rope",
                rotary_base=rope_parameters(config)["rope_theta"],
            )
            .cuda()
        )
    parameters, given = dict(gpt.named_parameters()), to_megatron(weights, config)
    shapes = [{(name, tuple(t.shape)) for name, t in tensors.items()} for tensors in (parameters, given)]
    if differing := sorted(name for name, _ in shapes[0] ^ shapes[1]):
        raise DifferentModel(
            "the converted weights do not match the parameters of the Megatron-Core model: "
            f"{', '.join(differing[:4])}"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(given[name])
    return Model(gpt, config).train(), settings


def provide_apex_gemm() -> None:
    """Provide Transformer Engine's GEMM under the name of apex's GEMM, unless apex is installed.

    Without this GEMM, Megatron-Core's output layer refuses to accumulate weight gradients in float32.
    """

    def add_weight_gradient(x: Tensor, gradient: Tensor, total: Tensor) -> None:
        """Add gradient.T @ x to `total` in float32.

        x: [rows, inputs]. gradient: [rows, outputs]. total: [outputs, inputs].
        """
        general_gemm: Any = core(".extensions.transformer_engine").general_gemm
        general_gemm(x, gradient, out_dtype=total.dtype, layout="NT", out=total, accumulate=True, grad=True)

    try:
        importlib.import_module(APEX_GEMM)
    except ImportError:
        module: Any = ModuleType(APEX_GEMM)
        module.wgrad_gemm_accum_fp32 = add_weight_gradient
        sys.modules[APEX_GEMM] = module


@contextmanager
def delete_graphs() -> Iterator[None]:
    """Delete Megatron-Core's CUDA graphs after the `with` block, and leave the stream that it has selected for them."""
    stream = torch.cuda.current_stream()
    try:
        yield
    finally:
        torch.cuda.set_stream(stream)
        core(".transformer.cuda_graphs").delete_cuda_graphs()


@contextmanager
def free_attention(deterministic: bool) -> Iterator[None]:
    """Clear the environment variables that select an attention backend within the `with` block.

    Megatron-Core sets these variables and refuses conflicting values.

    deterministic: whether to forbid nondeterministic attention kernels, which Megatron-Core requires for deterministic
    runs.
    """
    te_backend.choose_attention_backend("auto")
    with mock.patch.dict(os.environ):
        for name in ATTENTION_BACKENDS["fused"]:
            os.environ.pop(name, None)
        if deterministic:
            os.environ[NONDETERMINISTIC] = "0"
        yield


class Training:
    """A training loop with Megatron-Core's schedule, float32 gradient buffers and distributed optimizer."""

    def __init__(self, model: Model, settings: Any, arguments: TrainingArguments):
        distributed, optimizer = core(".distributed"), core(".optimizer")
        buffers = distributed.DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            overlap_grad_reduce=False,
            fp8_param_gather=settings.fp8_param,
        )
        wrapped = core(".transformer.module").Float16Module(settings, model.gpt)
        self.model = distributed.DistributedDataParallel(settings, buffers, wrapped)
        self.optimizer = optimizer.get_megatron_optimizer(
            optimizer.OptimizerConfig(
                optimizer="adam",
                lr=arguments.learning_rate,
                weight_decay=arguments.weight_decay,
                adam_beta1=arguments.adam_beta1,
                adam_beta2=arguments.adam_beta2,
                adam_eps=arguments.adam_epsilon,
                clip_grad=arguments.max_grad_norm,
                bf16=True,
                params_dtype=torch.bfloat16,
                use_distributed_optimizer=True,
            ),
            [self.model],
        )
        settings.grad_scale_func = self.optimizer.scale_loss
        settings.finalize_model_grads_func = distributed.finalize_model_grads
        self.schedule = core(".pipeline_parallel").get_forward_backward_func()
        self.arguments, self.inputs = arguments, model.inputs

    def passes(self, input_ids: Tensor, labels: Tensor, count: int) -> list[Tensor]:
        """Run the forward and backward pass `count` times on the same micro-batch, and return the detached losses."""
        inputs = self.inputs(input_ids)

        def mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            loss = losses.float().mean()
            return loss, {
                "loss": loss.detach().clone()
            }  # clone, because the schedule divides the first value in place

        def forward_step(data: Iterator[Tensor], model: nn.Module) -> tuple[Tensor, Any]:
            return model(*inputs, labels=next(data)), mean

        found = self.schedule(
            forward_step_func=forward_step,
            data_iterator=itertools.repeat(labels),
            model=[self.model],
            num_microbatches=count,
            seq_length=input_ids.shape[1],
            micro_batch_size=len(input_ids),
            forward_only=False,
        )
        return [one["loss"] for one in found]

    def step(self, input_ids: Tensor, labels: Tensor) -> None:
        """Run a whole optimizer step. Raises DifferentModel if the optimizer skips the step."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.passes(input_ids, labels, self.arguments.gradient_accumulation_steps or 1)
        updated, *_ = self.optimizer.step()
        if not updated:
            raise DifferentModel(
                "Megatron-Core's optimizer skipped the step, because the gradients are not finite"
            )


def check_attention(timed: str, config: MistralConfig, precision: Precision, tokens: int) -> None:
    """Check that Transformer Engine's attention agrees with torch's SDPA.

    timed: the attention backend that the benchmark has timed. Raises StartupCheckError if the results differ, and
    DifferentModel if the check uses a different backend.
    """
    verify_attention(config, precision, "auto", tokens, document_mask=False)
    checked = te_backend.attention_backend_in_use(precision.te)
    if checked.split(",")[0] != timed.split(",")[0]:  # the part after the comma is cuDNN's kernel
        raise DifferentModel(f"attention backend {timed} was timed, but the correctness check used {checked}")


def measure_case(arguments: TrainingArguments, switches: Mapping[str, Any], conditions: Conditions) -> Result:
    """Measure the training steps of a case with Megatron-Core for one round, and return the values for the report.

    Raises Unavailable if Megatron-Core cannot run, and DifferentModel if the model, the GEMMs or the attention are not
    as configured.
    """
    require_megatron()
    free_memory()
    before, config = torch.cuda.memory_allocated() / GIB, conditions.config
    samples, compute = arguments.per_device_train_batch_size, arguments.precision.compute
    ids, labels = (t[:samples].contiguous() for t in conditions.batch[:2])
    reference, precision = conditions.reference, Precision(arguments.precision)
    with free_attention(arguments.full_determinism), delete_graphs():
        model, settings = build(config, arguments, switches, reference.weights)
        # build() has copied these weights to the model's parameters
        logits_error = check_same_model(model, reference.weights, compute, reference, ids)
        training = Training(model, settings, arguments)
        one_pass, step = partial(training.passes, ids, labels, 1), partial(training.step, ids, labels)
        start = time.perf_counter()
        gemms: list[None] = []
        with te_backend.intercept_gemms(precision.te, lambda: gemms.append(None)):
            loss = float(one_pass()[0])
        prepare_s = time.perf_counter() - start
        planned = FP8_GEMMS_A_LAYER * config.num_hidden_layers if compute == "fp8" else 0
        # to capture its CUDA graphs, Megatron-Core runs each layer several times more
        passes = 2 + settings.cuda_graph_warmup_steps if "cuda_graph_impl" in switches else 1
        if len(gemms) != planned * passes:
            raise DifferentModel(
                f"expected {planned * passes} FP8 GEMMs in {passes} forward and backward passes, but {len(gemms)} ran"
            )
        error = loss_error(loss, compute, reference, samples)
        attention = te_backend.attention_backend_in_use(precision.te)
        if attention == "unfused":
            raise DifferentModel(
                "Transformer Engine selected the unfused attention backend, which would make the comparison unfair. "
                "Install the versions in requirements-gpu.txt"
            )
        step()
        count = conditions.count_steps(timed_ms(step))
        launch_ms = enqueue_ms(one_pass)
        facts = {
            "ms": statistics.median(laps_ms([step] * count)),
            "loss": loss,
            "loss_error": error,
            "logits_error": logits_error,
            "prepare_s": prepare_s,
            "launch_ms": launch_ms,
            "fp8_modules": planned // 3,
            "attention": attention,
            "loss_kind": "fused (TE)",
            "startup_checks": [
                f"attention: {attention}; FP8 GEMMs per forward and backward pass: {planned}",
                f"{PACKAGE} {VERSION}",
            ],
        }
        # this check comes last, because it selects the attention backend again
        check_attention(attention, config, precision, arguments.max_seq_length)
    return facts | memory_facts(before)
