"""The training configuration, with one dataclass per section.

Each field declares the type, default, limits and help text of a configuration key. `--help`, error messages, the JSON
schema and the tables in docs/configuration.md are generated from the fields. Keys have the names that transformers'
TrainingArguments uses for the same concept.

The argument `resume` states whether a run that resumes from a checkpoint may have another value:

- "free": yes, because the key does not affect the result of a step.
- "allowed" (the default): only if the key is listed in allow_changes_on_resume.
- "structural": no, for the reason given in `why`.

`before` is the value of a key in checkpoints that were written before the key existed, if it is not the default.

train/checkpoint/resume.py compares the configuration with that of the checkpoint, and refuses the resume.
tests/train/test_interfaces.py lists the keys, so a change of a key is a visible decision.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from model.errors import UserError
from model.fp8.recipes import PrecisionConfig
from model.keys import STRICT, option
from model.variants import ATTENTION_BACKENDS, VARIANTS, Initialization, SpeedConfig
from train.data.order import MixturePhase
from train.files import REPOSITORY

CONFIG_FOLDER = REPOSITORY / "train_args"
DEFAULT_DEEPSPEED = "ds_config_zero1.json"

SMALLEST_WINDOW = 16  # steps; the median of fewer steps is not robust
# Muon's update of a parameter with at most this many elements is captured in a CUDA graph (train/engine/optimizer.py).
# The kernels of larger parameters take longer than their launches, so a graph would only keep memory.
MUON_GRAPH_ELEMENTS = 2**26


class ConfigurationError(UserError, ValueError):
    """An error raised for an invalid configuration.

    Args:
        message: The error message, or the heading above `problems`.
        problems: One line per problem. Each line starts with the key that causes the problem.

    Attributes:
        keys: The key at the start of each problem.
    """

    code = "configuration"

    def __init__(
        self,
        message: str = "",
        *,
        problems: Sequence[str] = (),
        code: str | None = None,
        key: str | None = None,
    ):
        self.keys = [problem.lstrip("-").split()[0].rstrip(":,") for problem in problems]
        key = self.keys[0] if self.keys and key is None else key
        super().__init__("\n  ".join([message, *problems] if message else problems), code=code, key=key)


def raise_problems(source: str, problems: Sequence[str]) -> None:
    """Raise a ConfigurationError that lists all problems found in `source`. Do nothing if there are no problems."""
    if problems:
        raise ConfigurationError(f"{source} is invalid:", problems=problems)


@dataclass(config=STRICT, kw_only=True)
class ModelArguments:
    """The "model" section of the training configuration."""

    # config and init_from are free: a resume compares the content of the model configuration, and loads the weights
    # from the checkpoint
    config: str = option(
        "Model: the name of a file in model/configs, the path of a Mistral, Llama or Qwen3 config.json, or a "
        "Hugging Face repository ORG/NAME.",
        resume="free",
        example="tiny",
    )
    variant: Literal[tuple(VARIANTS)] = option(  # type: ignore[valid-type]
        "Model implementation. te_layer (fastest) and te_linear (simplest) use Transformer Engine modules, hf uses the "
        "transformers library, and torchao is hf with FP8 layers from torchao.",
        "te_layer",
        resume="structural",
        why="a checkpoint stores weights under the module names of its variant. To change the variant, start a new "
        "run from an export (model.init_from)",
    )
    compile: bool | None = option(
        "Whether to compile the decoder layers and the loss with torch.compile (hf and torchao only). If null, they "
        "are compiled only for torchao on a GPU.",
        None,
    )
    init_from: str | None = option(
        "Initial weights: a Hugging Face model folder or repository ORG/NAME. If null, the weights are "
        "initialized randomly.",
        None,
        resume="free",
        min_length=1,
    )
    # free: it has no effect on a resume
    initialization: Initialization = option(
        'Standard deviations of random initial weights. "normal" uses initializer_range for all matrices, as '
        'the transformers library does. "scaled" uses 1 for the embedding and 1 / sqrt(input width) for the matrices '
        "of the decoder layers, divided by sqrt(2 * layers) for o_proj and down_proj. If the embedding is tied to "
        "lm_head, the embedding, o_proj and down_proj are also divided by sqrt(hidden size). FP8 gradients are more "
        'accurate with "scaled" than with "normal". With lr_scales, short runs of five models also reached a lower '
        "loss.",
        "scaled",
        resume="free",
    )
    attention_backend: Literal[tuple(ATTENTION_BACKENDS)] = option(  # type: ignore[valid-type]
        "Attention backend for te_layer and te_linear: flash (FlashAttention), fused (cuDNN) or unfused "
        '(slow). "auto" selects flash on Hopper GPUs if FlashAttention-4 is installed and the head '
        "dimension is 64, 128 or 256. Otherwise, Transformer Engine chooses the backend.",
        "auto",
    )


@dataclass(config=STRICT, kw_only=True)
class DataArguments:
    """The "data" section of the training configuration."""

    sources: dict[str, str] = option(
        "Training data: an object that maps source names of your choice to folders written by "
        "prepare_data.py. A relative path is resolved against the current folder, then against the "
        "repository.",
        min_length=1,
        example={"NAME": "data/pretrain"},
    )
    weights: dict[str, float] | list[MixturePhase] | None = option(
        "Mixture weights: an object that maps each source name to its share of the samples, or a list of "
        'phases: [{"until_tokens": N, "weights": {...}}, ..., {"weights": {...}}]. If null, the shares '
        "are proportional to the number of tokens in each source.",
        None,
        example={"NAME": 0.7, "OTHER": 0.3},
    )
    eval_sources: dict[str, str] | None = option(
        "Additional evaluation data: an object that maps names of your choice to data folders. The loss on "
        "each eval split is logged as eval_loss/NAME.",
        None,
        resume="free",
        example={"NAME": "data/held_out"},
    )
    verify: bool = option(
        "Verify the hashes and token ids of all data shards before the first step. If this takes more than half an "
        "hour, increase hang_timeout_s.",
        False,
        resume="free",
    )
    document_mask: bool = option(
        "Restrict attention to tokens of the same document, and restart position ids at the beginning of "
        "each document (te_linear and te_layer only). The last token of a document has no label.",
        False,
    )


def _lr_scale(help_text: str) -> Any:
    """Return a field of `LrScales`."""
    return option(
        help_text,
        1.0,
        gt=0,
        resume="structural",
        why="parameters with different factors are stored in different groups of optimizer states. To use other "
        "factors, start a new run",
    )


@dataclass(config=STRICT, kw_only=True)
class LrScales:
    """The "lr_scales" section of the training configuration."""

    embedding: float = _lr_scale(
        "Factor for the learning rate of the embedding. With model.initialization scaled, the best short runs "
        "of five models gave the embedding a learning rate of 0.1 to 0.45. In a run with 500M tokens, 0.045 was as "
        "good as 0.45. Must be 1 if the embedding is tied to lm_head."
    )
    lm_head: float = _lr_scale(
        "Factor for the learning rate of lm_head. Must be 1 if lm_head is tied to the embedding."
    )
    norms: float = _lr_scale(
        "Factor for the learning rate of the norm weights. In these runs, this learning rate was 0.01 to 0.03."
    )
    output_projections: float = _lr_scale("Factor for the learning rate of o_proj and down_proj.")


@dataclass(config=STRICT, kw_only=True)
class TrainingArguments:
    """The complete configuration of a training run."""

    model: ModelArguments = Field()
    data: DataArguments = Field()
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig)
    speed: SpeedConfig = Field(default_factory=SpeedConfig)
    lr_scales: LrScales = Field(default_factory=LrScales)

    max_steps: int = option("Number of optimizer steps in the run.", gt=0, resume="allowed", example=1000)
    max_seq_length: int = option("Length of each training sample, in tokens.", 2048, gt=0)
    per_device_train_batch_size: int = option("Number of samples per micro-batch on each rank.", 8, gt=0)
    per_device_eval_batch_size: int | None = option(
        "Number of samples per evaluation batch on each rank. If null, per_device_train_batch_size is used.",
        None,
        gt=0,
        resume="free",
    )
    # free: train_batch_size_tokens, which is not free, and the number of ranks determine this value
    gradient_accumulation_steps: int | None = option(
        "Number of micro-batches per optimizer step. If null, it is computed from train_batch_size_tokens. "
        "If both keys are null, it is 1.",
        None,
        gt=0,
        resume="free",
    )
    train_batch_size_tokens: int | None = option(
        "Number of tokens per optimizer step, summed over all ranks. If null, it is computed from "
        "gradient_accumulation_steps.",
        None,
        gt=0,
    )

    optim: Literal["adamw", "muon"] = option(
        'Optimizer. "muon" uses Muon for the weight matrices of the decoder layers and AdamW for all other '
        "parameters.",
        "adamw",
        resume="structural",
        why="AdamW and Muon store different states. To change the optimizer, start a new run from an export "
        "(model.init_from)",
    )
    # upper limit: an update is computed in float32, which overflows at learning rates of about 1e37
    learning_rate: float = option("Peak learning rate, reached at the end of the warmup.", 3e-4, gt=0, le=100)
    lr_scheduler_type: Literal["cosine", "linear", "constant", "warmup_stable_decay"] = option(
        'Learning rate schedule after the warmup. "cosine" and "linear" decay the learning rate until the last step. '
        '"constant" keeps the peak learning rate. "warmup_stable_decay" keeps the peak learning rate, then decays it '
        "linearly over the last decay_steps steps.",
        "cosine",
    )
    warmup_steps: int = option(
        "Number of warmup steps, over which the learning rate increases linearly to its peak.", 0, ge=0
    )
    decay_steps: int | None = option(
        "Number of final steps over which warmup_stable_decay decays the learning rate. Other schedules do not accept "
        "this key.",
        None,
        gt=0,
    )
    min_lr_ratio: float = option(
        "Learning rate at the end of the decay, as a fraction of learning_rate.", 0.1, ge=0, le=1
    )
    weight_decay: float = option(
        "Weight decay for weight matrices. It is not applied to norm weights and biases.", 0.1, ge=0
    )
    muon_momentum: float = option("Momentum coefficient of Muon.", 0.95, ge=0, lt=1)
    adam_beta1: float = option("Decay rate of AdamW's first moment (beta1).", 0.9, ge=0, lt=1)
    adam_beta2: float = option("Decay rate of AdamW's second moment (beta2).", 0.95, ge=0, lt=1)
    adam_epsilon: float = option(
        "Constant that AdamW adds to the denominator of its update (epsilon).",
        1e-8,
        gt=0,
    )
    max_grad_norm: float = option(
        "Maximum global gradient norm. Gradients with a larger norm are scaled down to this norm. If 0, gradients are "
        "not clipped.",
        1.0,
        ge=0,
    )
    # upper limit: the largest seed that numpy accepts
    seed: int = option(
        "Random seed for the initial weights and the order of the samples.", 42, ge=0, le=2**32 - 1
    )
    full_determinism: bool = option(
        "Use deterministic GPU kernels, so that repeated and resumed runs are bit-identical.",
        True,
    )

    max_skipped_steps: int = option(
        "Number of consecutive skipped steps after which the run stops. A step is skipped if its loss or a "
        "gradient is not finite.",
        10,
        gt=0,
        resume="free",
    )
    spike_threshold: float = option(
        "A loss or gradient norm is reported as a spike if it exceeds the median of recent steps by more than this "
        "number of standard deviations. If 0, spike detection is disabled.",
        10.0,
        ge=0,
        resume="free",
    )
    on_spike: Literal["warn", "rollback"] = option(
        'Action after a spike in the loss or gradient norm. "warn" only logs the spike. "rollback" also returns to the '
        "last checkpoint before the spike and skips the samples that led to the spike.",
        "warn",
        resume="free",
    )
    spike_window: int = option(
        "Number of previous steps from which spike detection computes the median and the standard deviation.",
        128,
        ge=SMALLEST_WINDOW,
        le=10**6,  # each checkpoint stores this many values
        resume="free",
    )
    replica_check_steps: int = option(
        "Number of steps between checks that all ranks have identical weights. If 0, the checks are disabled.",
        100,
        ge=0,
        resume="free",
    )

    hang_timeout_s: float = option(
        "Time limit in seconds for a training step, an evaluation batch or a save. If a rank exceeds the limit, the "
        "run stops and names the hanging rank. The limit for the first step and for each part of startup and "
        "shutdown is at least 1800 seconds. If 0, there is no limit.",
        1800.0,
        ge=0,
        le=1e8,  # three years; system timers overflow at slightly larger values
        resume="free",
    )

    profile_steps: list[Annotated[int, Field(gt=0)]] | None = option(
        "First and last step to profile on rank 0. A trace for Perfetto and a table of the ten longest kernels are "
        "written to the folder profile in output_dir. Profiled steps are slower.",
        None,
        min_length=2,
        max_length=2,
        example=[20, 22],
        resume="free",
    )

    output_dir: str | None = option(
        "Output folder of the run. If null, output/NAME is used for a configuration file NAME.json.",
        None,
        resume="free",
        min_length=1,
    )
    dry_run: bool = option(
        "Run all checks and the complete startup, then exit with status 0 before the first training step. "
        "output_dir is not changed.",
        False,
        resume="free",
    )
    preflight: bool | None = option(
        "Whether to run preflight checks before the first step. The checks compare the software and files of all "
        "ranks, measure the speed of GPUs and network links, and check the gradient reduction. If null, the checks "
        "run only if the ranks are on several nodes.",
        None,
        resume="free",
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "Minimum level of messages shown on the console. The log files contain messages of all levels.",
        "info",
        resume="free",
    )
    logging_steps: int = option("Number of steps between log lines.", 10, gt=0, resume="free")
    eval_steps: int = option(
        "Number of steps between evaluations. If 0, the model is evaluated only at the end of the run.",
        0,
        ge=0,
        resume="free",
    )
    max_eval_samples: int = option(
        "Maximum number of samples per evaluation set, summed over all ranks. The samples are evenly spaced "
        "in the evaluation set.",
        256,
        gt=0,
        resume="free",
    )
    save_steps: int = option(
        "Number of steps between checkpoints. If 0, no checkpoints are saved at step intervals.",
        0,
        ge=0,
        resume="free",
    )
    save_minutes: float = option(
        "Number of minutes between checkpoints, measured on rank 0. If 0, no checkpoints are saved at time "
        "intervals.",
        30.0,
        ge=0,
        resume="free",
    )
    save_strategy: Literal["steps", "no"] = option(
        'What to save. "steps" saves checkpoints at the intervals set by save_steps and save_minutes and '
        'at the end of the run, and exports the final model. "no" disables checkpoints and the export.',
        "steps",
        resume="free",
    )
    push_to_hub: bool = option(
        "Upload the exported model to the Hugging Face Hub at the end of the run. A new repository is private. The "
        "access token is read from the environment variable HF_TOKEN.",
        False,
        resume="free",
    )
    hub_model_id: str | None = option(
        "Hugging Face repository ORG/NAME for push_to_hub.",
        None,
        resume="free",
    )
    save_total_limit: int = option(
        "Number of recent checkpoints to keep. Older checkpoints are deleted. If 0, all checkpoints are kept.",
        3,
        ge=0,
        resume="free",
    )
    keep_every_steps: int = option(
        "Never delete the checkpoints of steps that are multiples of this number, which must be a multiple of "
        "save_steps. If 0, only save_total_limit applies.",
        0,
        ge=0,
        resume="free",
    )
    save_async: bool = option(
        "Copy each checkpoint to host memory and write it to disk in the background. If false, training "
        "waits until the checkpoint is written.",
        True,
        resume="free",
    )
    on_save_failure: Literal["stop", "continue"] = option(
        'Action if a save fails. "stop" ends the run. "continue" keeps training and tries again at the next save. If '
        "the last save of a run fails, the run always stops.",
        "stop",
        resume="free",
    )
    resume_from_checkpoint: str = option(
        'Checkpoint to resume from. "auto" resumes from the newest undamaged checkpoint in output_dir, or '
        'starts a new run if there is none. "never" always starts a new run. Any other value is the path '
        "of a checkpoint.",
        "auto",
        resume="free",
        min_length=1,
    )
    allow_changes_on_resume: bool | list[str] = option(
        "Keys whose values you want to change when the run resumes, although the keys affect the computation. If true, "
        "every change that a resume supports is allowed. Changes are recorded in metrics.jsonl.",
        False,
        resume="free",
        example=["learning_rate"],
    )
    report_to: Literal["none", "wandb", "tensorboard"] | list[Literal["wandb", "tensorboard"]] = option(
        "Experiment trackers to log to. metrics.jsonl always receives all metrics.",
        "none",
        resume="free",
    )
    run_name: str | None = option(
        "Name of the run in wandb. If null, wandb generates a name.",
        None,
        resume="free",
    )
    wandb_project: str = option("Name of the wandb project.", "fp8-pretraining", resume="free")
    gradient_checkpointing: bool | Literal["mlp"] = option(
        'Save GPU memory. "mlp" stores the input of SwiGLU in 8 bits for the backward pass and recomputes the output '
        "of SwiGLU, which takes little time. This setting requires model.variant te_layer and precision.recipe "
        "delayed. If true, all activations of each layer are recomputed.",
        False,
    )
    deepspeed: Annotated[str, Field(min_length=1)] | dict[str, Any] | None = option(
        "DeepSpeed configuration: the path of a JSON file, the name of a file in train_args, or a JSON "
        f"object. If null, {DEFAULT_DEEPSPEED} is used.",
        None,
        example={"zero_optimization": {"stage": 2}, "data_types": {"grad_accum_dtype": "fp32"}},
    )

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments as a JSON object that `load.build_arguments` accepts."""
        return dataclasses.asdict(self)
