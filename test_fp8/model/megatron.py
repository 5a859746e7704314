"""The rows megatron_core_* of `bench_model.py`: the same model as Megatron-Core's GPTModel of Transformer Engine's
modules, trained by its own schedule and distributed optimizer, with every fusion of its that the model can have.

Its licence is Apache 2.0; it is used where it is installed, and nothing of it is here.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MistralConfig
from transformers.modeling_outputs import CausalLMOutput

from model.config import head_dim, num_parameters, rope_theta, weight_shapes, window_size
from model.documents import reached
from model.fp8 import te_backend
from model.fp8.precision import Precision
from model.proof import ATTENTION_TOLERANCE, attention_errors
from model.variants import ATTENTION_BACKENDS
from test_fp8.common.rows import NotHere
from test_fp8.common.same_model import DifferentModel, check_computed, loss_error
from test_fp8.common.timing import Laps, enqueue_ms, synchronize, times_in
from test_fp8.model.visit import GIB, MAX_STEPS, Proof, Visit, Visitor, asking_te_for, free_memory
from train.config.arguments import TrainingArguments

PACKAGE, VERSION = "megatron-core", "0.19.2"
NONDETERMINISTIC = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"  # of Transformer Engine's attention; "0": not allowed
# What Megatron asks of apex: a GEMM that adds to float32 gradients. Transformer Engine has one, too.
APEX_GEMM = "fused_weight_gradient_mlp_cuda"
RECIPES = {"delayed": "delayed", "current": "tensorwise"}  # ours -> Megatron's
FP8_GEMMS_A_LAYER = 12  # qkv, proj, fc1, fc2: the output's, the input's gradient and the weight's gradient


def require() -> None:
    """Raises NotHere: Megatron-Core of the version that this is written for is not installed."""
    try:
        found = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise NotHere(
            f"{PACKAGE} is not installed: pip install --no-deps {PACKAGE}=={VERSION}, with Python 3.12"
        ) from None
    if found != VERSION:
        raise NotHere(f"{PACKAGE} {found} is installed; this row is written for {VERSION}")


# ---------------------------------------------------------------- weights

# Where the norms before attention and MLP are: in Transformer Engine's modules, and in Megatron's own.
NORMS = {
    "te": ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"),
    "local": ("input_layernorm.weight", "pre_mlp_layernorm.weight"),
}


def to_megatron(
    weights: Mapping[str, Tensor], config: MistralConfig, modules: str = "te"
) -> dict[str, Tensor]:
    """Megatron's parameters by name from Hugging Face's. Rows of the qkv weight are by groups: the queries of a key,
    the key, the value."""
    K, D = config.num_key_value_heads, head_dim(config)
    named = {
        "embedding.word_embeddings.weight": weights["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": weights["model.norm.weight"],
    }
    if not config.tie_word_embeddings:
        named["output_layer.weight"] = weights["lm_head.weight"]
    before_attention, before_mlp = NORMS[modules]
    for index in range(config.num_hidden_layers):
        of = {name: weights[f"model.layers.{index}.{name}.weight"] for name in LAYER}
        heads = [of[f"self_attn.{x}_proj"].view(K, -1, D, config.hidden_size) for x in "qkv"]
        layer = {
            before_attention: of["input_layernorm"],
            "self_attention.linear_qkv.weight": torch.cat(heads, 1).flatten(0, 2),
            "self_attention.linear_proj.weight": of["self_attn.o_proj"],
            before_mlp: of["post_attention_layernorm"],
            "mlp.linear_fc1.weight": torch.cat([of["mlp.gate_proj"], of["mlp.up_proj"]]),
            "mlp.linear_fc2.weight": of["mlp.down_proj"],
        }
        named |= {f"decoder.layers.{index}.{name}": weight for name, weight in layer.items()}
    return named


LAYER = (
    *("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)


def from_megatron(
    named: Mapping[str, Tensor], config: MistralConfig, modules: str = "te"
) -> dict[str, Tensor]:
    """The way back. Raises DifferentModel: a parameter that the model has no place for."""
    weights = {
        "model.embed_tokens.weight": named["embedding.word_embeddings.weight"],
        "model.norm.weight": named["decoder.final_layernorm.weight"],
    }
    if not config.tie_word_embeddings:
        weights["lm_head.weight"] = named["output_layer.weight"]
    K, D = config.num_key_value_heads, head_dim(config)
    sizes = [config.num_attention_heads // K, 1, 1]
    before_attention, before_mlp = NORMS[modules]
    for index in range(config.num_hidden_layers):
        of = lambda name, index=index: named[f"decoder.layers.{index}.{name}"]  # noqa: E731
        grouped = of("self_attention.linear_qkv.weight").view(K, sum(sizes), D, -1)
        gate, up = of("mlp.linear_fc1.weight").chunk(2)
        q, k, v = (part.flatten(0, 2) for part in grouped.split(sizes, dim=1))
        values = (
            *(of(before_attention), q, k, v, of("self_attention.linear_proj.weight")),
            *(of(before_mlp), gate, up, of("mlp.linear_fc2.weight")),
        )
        weights |= {f"model.layers.{index}.{name}.weight": w for name, w in zip(LAYER, values, strict=True)}
    if unknown := named.keys() - to_megatron(weights, config, modules).keys():
        raise DifferentModel(f"Megatron's model has parameters of its own: {', '.join(sorted(unknown)[:3])}")
    return {name: weights[name].detach().contiguous() for name in weight_shapes(config)}


# ---------------------------------------------------------------- model


class Model(nn.Module):
    """GPTModel with the forward signature of the other models, without positions and masks to give."""

    def __init__(self, gpt: Any, config: MistralConfig, mask: bool):
        super().__init__()
        self.gpt, self.config, self.mask = gpt, config, mask

    def inputs(self, input_ids: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """What GPTModel takes: ids and positions int64 [B, T], and for its own attention what is not to be seen."""
        B, T = input_ids.shape
        hidden = torch.ones(T, T, dtype=torch.bool, device=input_ids.device).triu(1)[None, None]
        positions = torch.arange(T, device=input_ids.device).expand(B, T)
        return input_ids, positions, hidden if self.mask else None

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> CausalLMOutput:
        """loss: float32 scalar, nats a token; else logits [B, T, V]. Weights are quantized anew."""
        self.gpt.set_is_first_microbatch()
        out = self.gpt(*self.inputs(input_ids), labels=labels)
        return CausalLMOutput(logits=out) if labels is None else CausalLMOutput(loss=out.float().mean())


def transformer_config(
    config: MistralConfig, arguments: TrainingArguments, switches: Mapping[str, bool], modules: str = "te"
) -> dict[str, Any]:
    """The arguments of Megatron's TransformerConfig, as plain values but for types of torch."""
    te, precision = modules == "te", arguments.precision
    window = reached(window_size(config), arguments.max_seq_length)
    options: dict[str, Any] = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": head_dim(config),
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
        "use_cpu_initialization": not te,
        "params_dtype": torch.bfloat16,
        "bf16": te,
        "deterministic_mode": arguments.full_determinism,
        # its fusions
        "apply_rope_fusion": te,
        "bias_activation_fusion": te,
        "bias_dropout_fusion": te,
        "gradient_accumulation_fusion": te,
        "cross_entropy_loss_fusion": te,
        **({"cross_entropy_fusion_impl": "te"} if te else {}),
        **switches,
    }
    if precision.compute == "fp8":
        options |= {"fp8": precision.fp8_format, "fp8_recipe": RECIPES[precision.recipe]}
        if precision.recipe == "delayed":
            options |= {
                "fp8_amax_history_len": precision.amax_history_len,
                "fp8_amax_compute_algo": precision.amax_compute_algo,
            }
    return options


def build(
    config: MistralConfig,
    arguments: TrainingArguments,
    switches: Mapping[str, bool],
    weights: Mapping[str, Tensor],
    modules: str = "te",
) -> tuple[Model, Any]:
    """(the model with `weights`, which have Hugging Face's names, in training mode; its TransformerConfig). modules: of
    Transformer Engine, or "local", Megatron's own in float32 on the CPU, with which tests show that it is our model.

    Raises DifferentModel: Megatron has other parameters than were converted.
    """
    provide_apex_gemm()
    core = partial(importlib.import_module, package="megatron.core")
    state: Any = core(".parallel_state")
    if not state.model_parallel_is_initialized():
        state.initialize_model_parallel()
    specs: Any = core(".models.gpt.gpt_layer_specs")
    options = transformer_config(config, arguments, switches, modules)
    backends: Any = core(".transformer.enums").AttnBackend
    if modules == "te":
        core(".tensor_parallel").model_parallel_cuda_manual_seed(arguments.seed)
        options["attention_backend"] = backends[arguments.model.attention_backend]
        fuser = bool(switches.get("use_transformer_engine_op_fuser"))
        spec = specs.get_gpt_layer_with_transformer_engine_spec(use_te_op_fuser=fuser)
    else:
        options |= {"params_dtype": torch.float32, "attention_backend": backends.local}
        spec = specs.get_gpt_layer_local_spec(normalization="RMSNorm")
    settings = core(".transformer").TransformerConfig(**options)
    gpt = core(".models.gpt").GPTModel(
        settings,
        spec,
        vocab_size=config.vocab_size,
        max_sequence_length=arguments.max_seq_length,
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=rope_theta(config),
    )
    if modules == "te":
        gpt.cuda()
    load(gpt, weights, config, modules)
    return Model(gpt, config, mask=modules == "local").train(), settings


@torch.no_grad()
def load(gpt: nn.Module, weights: Mapping[str, Tensor], config: MistralConfig, modules: str) -> None:
    """Raises DifferentModel: names or shapes are not those that `gpt` has."""
    parameters, given = dict(gpt.named_parameters()), to_megatron(weights, config, modules)
    shapes = [{name: tuple(t.shape) for name, t in tensors.items()} for tensors in (parameters, given)]
    if shapes[0] != shapes[1]:
        differing = sorted(name for name, _ in shapes[0].items() ^ shapes[1].items())
        raise DifferentModel(f"Megatron's parameters are not those converted: {', '.join(differing[:4])}")
    for name, parameter in parameters.items():
        parameter.copy_(given[name])


def provide_apex_gemm() -> None:
    """Where apex is not installed, Transformer Engine's GEMM under the name of apex's, before Megatron looks for it:
    without it its output layer refuses to add weight gradients in float32."""
    try:
        importlib.import_module(APEX_GEMM)
    except ImportError:
        module: Any = ModuleType(APEX_GEMM)
        module.wgrad_gemm_accum_fp32 = _add_weight_gradient
        sys.modules[APEX_GEMM] = module


def _add_weight_gradient(x: Tensor, gradient: Tensor, total: Tensor) -> None:
    """total [O, I] += gradient [rows, O] transposed x [rows, I], in float32."""
    extensions: Any = importlib.import_module("megatron.core.extensions.transformer_engine")
    extensions.general_gemm(
        x, gradient, out_dtype=total.dtype, layout="NT", out=total, accumulate=True, grad=True
    )


# ---------------------------------------------------------------- a visit


@contextmanager
def free_attention(deterministic: bool) -> Iterator[None]:
    """A block in which nothing says which attention Transformer Engine has to take: Megatron says it itself, and
    refuses an environment that says something else; nor, where it is to be `deterministic`, one that allows others."""
    te_backend.choose_attention_backend("auto")
    variables = [*ATTENTION_BACKENDS["fused"], *([NONDETERMINISTIC] if deterministic else [])]
    before = {name: os.environ.pop(name, None) for name in variables}
    if deterministic:
        os.environ[NONDETERMINISTIC] = "0"
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


class Training:
    """Steps of Megatron-Core: its schedule, its gradient buffers in float32, its distributed optimizer."""

    def __init__(self, model: Model, settings: Any, arguments: TrainingArguments):
        core = partial(importlib.import_module, package="megatron.core")
        distributed, optimizer = core(".distributed"), core(".optimizer")
        buffers = distributed.DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False
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
        """Forward and backward of `count` micro-batches, each this one; their losses, detached."""
        inputs = self.inputs(input_ids)

        def forward_step(data: Iterator[Tensor], model: nn.Module) -> tuple[Tensor, Any]:
            return model(*inputs, labels=next(data)), _mean

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

    def zero(self) -> None:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self, input_ids: Tensor, labels: Tensor) -> None:
        """A whole step. Raises DifferentModel: the optimizer left it out."""
        self.zero()
        self.passes(input_ids, labels, self.arguments.gradient_accumulation_steps or 1)
        updated, *_ = self.optimizer.step()
        if not updated:
            raise DifferentModel("Megatron's optimizer skipped the step: gradients are not finite")


def _mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Of the losses of all tokens, in the form that Megatron's schedule takes."""
    loss = losses.float().mean()
    return loss, {"loss": loss.detach().clone()}  # the schedule divides the first one in place


def prove_attention(timed: str, config: MistralConfig, precision: Precision, tokens: int) -> None:
    """Raises DifferentModel: Transformer Engine's attention is none, or takes another one than was `timed`."""
    errors = attention_errors(config, precision, tokens)
    checked = te_backend.attention_backend_in_use(precision.te)
    if checked.split(",")[0] != timed.split(",")[0]:  # behind it is what cuDNN calls its part
        raise DifferentModel(f"attention {timed} was timed, and {checked} ran where it was to be checked")
    if not all(error <= ATTENTION_TOLERANCE[precision.config.compute] for error in errors):  # NaN is not
        text = " and ".join(f"{error:.1e}" for error in errors)
        raise DifferentModel(f"attention {timed} differs from SDPA by {text} relative, forward and backward")


def visit(
    arguments: TrainingArguments, switches: Mapping[str, bool], visitor: Visitor, config: MistralConfig
) -> Visit:
    """A visit to a row of Megatron-Core. Raises NotHere: it is not installed, or there is no GPU; DifferentModel:
    another model, other GEMMs or another attention than the row says."""
    require()
    if not torch.cuda.is_available():
        raise NotHere("Megatron-Core with Transformer Engine's modules needs a GPU")
    start = time.perf_counter()
    free_memory()
    before = torch.cuda.memory_allocated() / GIB
    samples, compute = arguments.per_device_train_batch_size, arguments.precision.compute
    ids, labels = (t[:samples].contiguous() for t in (visitor.batch.input_ids, visitor.batch.labels))
    reference, precision = visitor.reference, Precision(arguments.precision)
    asked_for, deterministic = arguments.model.attention_backend, arguments.full_determinism
    with free_attention(deterministic), asking_te_for(asked_for):
        model, settings = build(config, arguments, switches, reference.weights)
        weights = from_megatron(dict(model.gpt.named_parameters()), config)
        if (count := sum(p.numel() for p in model.parameters())) != num_parameters(config):
            raise DifferentModel(f"{count:,} parameters, {num_parameters(config):,} are expected")
        logits_error = check_computed(weights, model, compute, reference, ids)
        del weights
        training = Training(model, settings, arguments)
        prepare = time.perf_counter()
        gemms: list[None] = []
        with te_backend.noted_gemms(precision.te, lambda: gemms.append(None)):
            loss = float(training.passes(ids, labels, 1)[0])
        prepare_s, ran = time.perf_counter() - prepare, len(gemms)
        planned = FP8_GEMMS_A_LAYER * config.num_hidden_layers if compute == "fp8" else 0
        if ran != planned:
            raise DifferentModel(f"{ran} FP8 GEMMs ran in a pass, {planned} are expected")
        error = loss_error(loss, compute, reference, samples)
        attention = te_backend.attention_backend_in_use(precision.te)
        if attention == "unfused":
            raise DifferentModel("Transformer Engine chose its unfused attention")
        training.step(ids, labels)
        synchronize()
        again = time.perf_counter()
        training.step(ids, labels)
        synchronize()
        step_ms = (time.perf_counter() - again) * 1e3
        launch_ms = enqueue_ms(lambda: training.passes(ids, labels, 1))
        laps = Laps()
        laps.mark()
        for _ in range(times_in(visitor.seconds, step_ms, visitor.steps, max(visitor.steps, MAX_STEPS))):
            training.step(ids, labels)
            laps.mark("step")
        found = Visit(laps.ms(), launch_ms, prepare_s, None, loss, error, [])
        visitor.look(found, (arguments.to_dict(), switches), lambda: training.passes(ids, labels, 1))
        # last, for it decides anew which attention to take
        prove_attention(attention, config, precision, arguments.max_seq_length)
    lines = [f"attention: {attention}; FP8 GEMMs of a pass: {ran}", f"{PACKAGE} {VERSION}"]
    found.proof = Proof(logits_error, planned // 3, attention, lines)
    found.attention, found.loss_kind, found.before_gib = attention, "fused (TE)", before
    found.seconds = time.perf_counter() - start
    return found
