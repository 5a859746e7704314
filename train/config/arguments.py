"""The training configuration: one dataclass per section.

Each field holds all facts about its key: type, default, limits, help text with the unit, an example if the value is an
object, and whether a resume may change it. `--help`, error messages, the JSON schema and the tables in
docs/configuration.md are generated from the fields. Keys are named as in transformers' TrainingArguments where it has
the same concept.

Whether a resume may change a key (`resume=`): "free": yes, it has no effect on the result of a step; "allowed" (the
default): if allow_changes_on_resume names it; "structural": no, for the reason in `why=`. differences.py compares the
configuration with that of the checkpoint, train/checkpoint/resume.py refuses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from model.config import read_json_file
from model.errors import UserError
from model.fp8.recipes import PrecisionConfig
from model.keys import STRICT, option
from model.variants import ATTENTION_BACKENDS, VARIANTS, SpeedConfig
from train.data.order import MixturePhase
from train.files import REPOSITORY

CONFIG_FOLDER = REPOSITORY / "train_args"
DEFAULT_DEEPSPEED = "ds_config_zero1.json"

SMALLEST_WINDOW = 16  # steps; the median of fewer is not robust


class ConfigurationError(UserError, ValueError):
    """An invalid configuration.

    Args:
        message: The error, or the heading of `problems`.
        problems: One line per problem. Each starts with the key that it is about.

    Attributes:
        keys: The key of each problem.
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
    """Raise ConfigurationError with all problems of `source`, or return if there are none."""
    if problems:
        raise ConfigurationError(f"{source} cannot be used:", problems=problems)


@dataclass(config=STRICT, kw_only=True)
class ModelArguments:
    """The "model" section of the configuration."""

    # config and init_from are free: a resume compares the content of config, and the checkpoint holds the weights
    config: str = option(
        "Name in model/configs, path of a MistralConfig JSON file, or ORG/NAME on the Hugging Face Hub.",
        resume="free",
        example="tiny",
    )
    variant: Literal[tuple(VARIANTS)] = option(  # type: ignore[valid-type]
        "Model implementation. te_linear and te_layer use Transformer Engine modules; hf is the transformers "
        "model, a baseline; torchao is hf with torchao's FP8.",
        "te_layer",
        resume="structural",
        why="weights and optimizer state are stored under its module names; start a new run from an export "
        "(model.init_from)",
    )
    compile: bool | None = option(
        "hf and torchao: compile each decoder layer with torch.compile. null: only for torchao on a GPU.",
        None,
    )
    init_from: str | None = option(
        "Hugging Face folder, or ORG/NAME on the Hub, with the initial weights. null: random weights.",
        None,
        resume="free",
        min_length=1,
    )
    attention_backend: Literal[tuple(ATTENTION_BACKENDS)] = option(  # type: ignore[valid-type]
        "te_*: attention backend. fused is cuDNN. auto selects flash if FlashAttention-4 is installed on a "
        "Hopper GPU and the head dimension is 64, 128 or 256; otherwise Transformer Engine chooses.",
        "auto",
    )


@dataclass(config=STRICT, kw_only=True)
class DataArguments:
    """The "data" section of the configuration."""

    sources: dict[str, str] = option(
        "Maps source names to folders written by prepare_data.py. Relative paths are looked up in the current "
        "folder, then in the repository.",
        min_length=1,
        example={"NAME": "data/pretrain"},
    )
    weights: dict[str, float] | list[MixturePhase] | None = option(
        'Maps source names to shares of the samples, or a list of phases: [{"until_tokens": N, "weights": '
        '{...}}, ..., {"weights": {...}}]. null: in proportion to tokens.',
        None,
        example={"NAME": 0.7, "OTHER": 0.3},
    )
    eval_sources: dict[str, str] | None = option(
        "Maps names to folders whose eval split is also evaluated, as eval_loss/NAME.",
        None,
        resume="free",
        example={"NAME": "data/held_out"},
    )
    verify: bool = option(
        "Verify the hashes and token ids of all shards before the first step.", False, resume="free"
    )
    document_mask: bool = option(
        "te_*: restrict attention to the document. Positions restart at its first token, and its last token "
        "has no label.",
        False,
    )


@dataclass(config=STRICT, kw_only=True)
class TrainingArguments:
    """The whole configuration of a run."""

    model: ModelArguments = Field()
    data: DataArguments = Field()
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig)
    speed: SpeedConfig = Field(default_factory=SpeedConfig)

    max_steps: int = option("Total optimizer steps.", gt=0, resume="allowed", example=1000)
    max_seq_length: int = option("Sample length in tokens.", 2048, gt=0)
    per_device_train_batch_size: int = option("Micro-batch size per rank, in samples.", 8, gt=0)
    per_device_eval_batch_size: int | None = option(
        "Evaluation batch size per rank, in samples. null: as for training.", None, gt=0, resume="free"
    )
    # free: it is determined by train_batch_size_tokens, which is not free, and the number of ranks
    gradient_accumulation_steps: int | None = option(
        "Micro-batches per step. null: computed from train_batch_size_tokens, otherwise 1.",
        None,
        gt=0,
        resume="free",
    )
    train_batch_size_tokens: int | None = option(
        "Tokens per step over all ranks. null: computed from gradient_accumulation_steps.", None, gt=0
    )

    optim: Literal["adamw", "muon"] = option(
        "muon: Muon for the matrices of the layers and AdamW for the rest, with the same learning rate and "
        "weight decay. Needs ZeRO 0 or 1.",
        "adamw",
        resume="structural",
        why="the two optimizers have different states; start a new run from an export (model.init_from)",
    )
    # le: a step is computed in float32, which overflows at learning rates of about 1e37
    learning_rate: float = option("Peak learning rate.", 3e-4, gt=0, le=100)
    lr_scheduler_type: Literal["cosine", "linear", "constant", "warmup_stable_decay"] = option(
        "Learning rate schedule after the warmup.", "cosine"
    )
    warmup_steps: int = option("Linear warmup steps.", 0, ge=0)
    decay_steps: int | None = option("warmup_stable_decay: steps of the final decay.", None, gt=0)
    min_lr_ratio: float = option("Final learning rate, as a fraction of learning_rate.", 0.1, ge=0, le=1)
    weight_decay: float = option("Weight decay of matrices. Norms and biases have none.", 0.1, ge=0)
    muon_momentum: float = option("Momentum coefficient of Muon.", 0.95, ge=0, lt=1)
    adam_beta1: float = option("Decay of AdamW's first moment.", 0.9, ge=0, lt=1)
    adam_beta2: float = option("Decay of AdamW's second moment.", 0.95, ge=0, lt=1)
    adam_epsilon: float = option("Epsilon of AdamW.", 1e-8, gt=0)
    max_grad_norm: float = option("Clip the global gradient norm to this value. 0: no clipping.", 1.0, ge=0)
    # le: numpy's largest seed
    seed: int = option("Random seed of the initial weights and the sample order.", 42, ge=0, le=2**32 - 1)
    full_determinism: bool = option(
        "Produce the same bits in every run and after a resume, with deterministic GPU kernels.",
        True,
    )

    max_skipped_steps: int = option(
        "Stop after this many skipped steps in a row. A step is skipped if its loss or a gradient is not "
        "finite.",
        10,
        gt=0,
        resume="free",
    )
    spike_threshold: float = option(
        "A loss or gradient norm this many robust standard deviations above the median is a spike. 0: no "
        "detection.",
        10.0,
        ge=0,
        resume="free",
    )
    on_spike: Literal["warn", "rollback"] = option(
        "rollback: return to the last checkpoint and continue without the samples that led to the spike.",
        "warn",
        resume="free",
    )
    spike_window: int = option(
        "Previous steps from which spike detection computes median and spread.",
        128,
        ge=SMALLEST_WINDOW,
        le=10**6,  # each checkpoint stores this many values
        resume="free",
    )
    replica_check_steps: int = option(
        "Steps between comparisons of the ranks' weights. 0: none.",
        100,
        ge=0,
        resume="free",
    )

    hang_timeout_s: float = option(
        "Stop the run and name the rank that hangs if no step, evaluation batch or save finishes in this "
        "many seconds. The first step and each part of startup and shutdown have at least half an hour. 0: no "
        "timeout.",
        1800.0,
        ge=0,
        le=1e8,  # three years; system timers overflow at slightly larger values
        resume="free",
    )

    output_dir: str | None = option(
        "Folder of the run. null: output/NAME for a configuration file NAME.json.",
        None,
        resume="free",
        min_length=1,
    )
    dry_run: bool = option(
        "Do everything up to the first step, then exit with status 0. output_dir stays unchanged.",
        False,
        resume="free",
    )
    preflight: bool | None = option(
        "Before the first step, check software and folders of all ranks, measure GPUs and links, and compare "
        "reduced gradients. null: only if the ranks are on several nodes.",
        None,
        resume="free",
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "Minimum level on the console. train.log and logs/ have all messages.", "info", resume="free"
    )
    logging_steps: int = option("Steps between log lines.", 10, gt=0, resume="free")
    eval_steps: int = option("Steps between evaluations. 0: only at the end.", 0, ge=0, resume="free")
    max_eval_samples: int = option(
        "Samples of each evaluation set to evaluate, evenly spaced, over all ranks.",
        256,
        gt=0,
        resume="free",
    )
    save_steps: int = option("Steps between checkpoints. 0: not by steps.", 0, ge=0, resume="free")
    save_minutes: float = option(
        "Minutes between checkpoints, by the clock of rank 0. 0: not by time.",
        30.0,
        ge=0,
        resume="free",
    )
    save_strategy: Literal["steps", "no"] = option(
        "steps: save by save_steps, by save_minutes and at the end. no: write neither checkpoints nor hf/, "
        "for measurements.",
        "steps",
        resume="free",
    )
    save_total_limit: int = option("Checkpoints to keep.", 3, gt=0, resume="free")
    save_async: bool = option(
        "Train while a checkpoint is written from a copy in host memory. false: wait for the save.",
        True,
        resume="free",
    )
    on_save_failure: Literal["stop", "continue"] = option(
        "What to do if a save fails, such as on a full disk. continue: train until the next save. A failure "
        "of the last save always stops the run.",
        "stop",
        resume="free",
    )
    resume_from_checkpoint: str = option(
        "auto (the newest undamaged checkpoint), never, or the path of a checkpoint.",
        "auto",
        resume="free",
        min_length=1,
    )
    allow_changes_on_resume: bool | list[str] = option(
        "Keys that affect the computation and may differ from the checkpoint. true: all that can change. "
        "Changes are recorded in metrics.jsonl and in later checkpoints.",
        False,
        resume="free",
        example=["learning_rate"],
    )
    report_to: Literal["none", "wandb", "tensorboard"] | list[Literal["wandb", "tensorboard"]] = option(
        "Experiment trackers that receive the metrics in addition to metrics.jsonl.",
        "none",
        resume="free",
    )
    run_name: str | None = option("Name of the run in wandb. null: wandb chooses.", None, resume="free")
    wandb_project: str = option("wandb project.", "fp8-pretraining", resume="free")
    gradient_checkpointing: bool = option(
        "Recompute activations in the backward pass, which saves memory and is slower.",
        False,
        resume="free",
    )
    deepspeed: Annotated[str, Field(min_length=1)] | dict[str, Any] | None = option(
        f"DeepSpeed configuration: a path, a name in train_args, or an object. null: {DEFAULT_DEEPSPEED}.",
        None,
        example={"zero_optimization": {"stage": 2}, "data_types": {"grad_accum_dtype": "fp32"}},
    )

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object from which `load.build_arguments` builds equal arguments."""
        return dataclasses.asdict(self)


def find_config(name: str, what: str) -> Path:
    """Return the path of a configuration file.

    Args:
        name: A path, or a bare name in train_args/ with or without ".json".
        what: The argument or key that names the file: "CONFIG" or "deepspeed".

    Raises:
        ConfigurationError: The file does not exist.
    """
    candidates = [Path(name)]
    if Path(name).name == name:
        candidates += [CONFIG_FOLDER / name, CONFIG_FOLDER / f"{name.removesuffix('.json')}.json"]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    pattern = "ds_config_*.json" if what == "deepspeed" else "train_config_*.json"
    shipped = sorted(path.name for path in CONFIG_FOLDER.glob(pattern))
    raise ConfigurationError(
        f"{what}: no file {' or '.join(dict.fromkeys(map(str, candidates)))}; train_args/ has {', '.join(shipped)}, "
        "which you can name without the folder",
        code="no_such_file",
        key=name,
    )


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that contains an object.

    Raises:
        JsonError: See `read_json_file`.
        ConfigurationError: The file does not contain a JSON object.
    """
    value = read_json_file(path)
    if not isinstance(value, dict):
        raise ConfigurationError(
            f"{path}: the file does not contain a JSON object; put the keys in {{...}}",
            code="not_an_object",
            key=str(path),
        )
    return value
