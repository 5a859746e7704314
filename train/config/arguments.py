"""The training configuration: one dataclass per section, with every fact about a key at its field.

A field has its help text with the unit, default, type, limits, an example where the value is an object, and what a
resume may change (`option` of model/keys.py). `--help`, error messages, the JSON schema and the tables of
docs/configuration.md are made of them. Names are those of transformers' TrainingArguments where it has the concept.
"""

from __future__ import annotations

import dataclasses
import difflib
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

SMALLEST_WINDOW = 16  # steps of spike_window: the median of fewer says little


class ConfigurationError(UserError, ValueError):
    """The configuration cannot be used.

    Args:
        message: the error, or the heading of `problems`.
        problems: one line per problem; each begins with the key it is about.

    Attributes:
        keys: the key of each problem.
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
    """Raise ConfigurationError with all problems of `source`, if there are any."""
    if problems:
        count = f"{len(problems)} problems" if len(problems) > 1 else "a problem"
        raise ConfigurationError(f"{source} has {count}:", problems=problems)


@dataclass(config=STRICT, kw_only=True)
class ModelArguments:
    """The "model" section: the model that is trained."""

    # free: a resume compares the content of config, and the checkpoint has the weights of init_from
    config: str = option(
        "a name in model/configs, the path of a MistralConfig JSON, or a model of the Hugging Face Hub (ORG/NAME)",
        resume="free",
        example="tiny",
    )
    variant: Literal[tuple(VARIANTS)] = option(  # type: ignore[valid-type]
        "te_linear, te_layer: Transformer Engine's modules; hf: transformers' model, the baseline; torchao: the same "
        "with torchao's FP8",
        "te_layer",
        resume="structural",
        why="weights and optimizer state are stored under the names of its modules; model.init_from takes an export",
    )
    compile: bool | None = option(
        "hf, torchao: compile each decoder layer with torch.compile; null: torchao on a GPU only", None
    )
    init_from: str | None = option(
        "Hugging Face folder, or ORG/NAME on the Hub, whose weights the run starts from; null: random",
        None,
        resume="free",
        min_length=1,
    )
    attention_backend: Literal[tuple(ATTENTION_BACKENDS)] = option(  # type: ignore[valid-type]
        "attention of te_linear and te_layer; fused: cuDNN; auto: flash if FlashAttention-4 is installed on a Hopper "
        "GPU and heads have 64, 128 or 256 dimensions, else Transformer Engine's choice",
        "auto",
    )


@dataclass(config=STRICT, kw_only=True)
class DataArguments:
    """The "data" section: the data it is trained on."""

    sources: dict[str, str] = option(
        "name -> folder written by prepare_data.py; a relative path is looked up here, then in the repository",
        min_length=1,
        example={"NAME": "data/pretrain"},
    )
    weights: dict[str, float] | list[MixturePhase] | None = option(
        'name -> share of the samples; null: in proportion to tokens; in phases: [{"until_tokens": N, "weights": '
        '{...}}, ..., {"weights": {...}}]',
        None,
        example={"NAME": 0.7, "OTHER": 0.3},
    )
    eval_sources: dict[str, str] | None = option(
        "name -> further folder whose eval split is evaluated separately, as eval_loss/NAME",
        None,
        resume="free",
        example={"NAME": "data/held_out"},
    )
    verify: bool = option(
        "check every hash and every token id of the shards before the first step", False, resume="free"
    )
    document_mask: bool = option(
        "te_*: attention stays within a document, positions restart at its first token, its last token has no label",
        False,
    )


@dataclass(config=STRICT, kw_only=True)
class TrainingArguments:
    """The whole configuration of a run."""

    model: ModelArguments = Field()
    data: DataArguments = Field()
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig)
    speed: SpeedConfig = Field(default_factory=SpeedConfig)

    max_steps: int = option("optimizer steps of the whole run", gt=0, resume="allowed", example=1000)
    max_seq_length: int = option("tokens of a sample", 2048, gt=0)
    per_device_train_batch_size: int = option("samples of a micro-batch on one rank", 8, gt=0)
    per_device_eval_batch_size: int | None = option(
        "samples of a batch on one rank in evaluation; null: as in training", None, gt=0, resume="free"
    )
    # free: it follows from train_batch_size_tokens, which is not free, and the number of ranks
    gradient_accumulation_steps: int | None = option(
        "micro-batches of a step; null: computed from train_batch_size_tokens, else 1",
        None,
        gt=0,
        resume="free",
    )
    train_batch_size_tokens: int | None = option(
        "tokens of a step over all ranks; null: computed from gradient_accumulation_steps", None, gt=0
    )

    optim: Literal["adamw", "muon"] = option(
        "muon: Muon for matrices of the layers, at the same learning rate and decay, AdamW for the rest (ZeRO 0, 1)",
        "adamw",
        resume="structural",
        why="the two optimizers keep different states; model.init_from takes an export",
    )
    # le: torch computes a step in float32, which overflows at rates of about 1e37
    learning_rate: float = option("peak of the schedule", 3e-4, gt=0, le=100)
    lr_scheduler_type: Literal["cosine", "linear", "constant", "warmup_stable_decay"] = option(
        "shape of the learning rate after the warmup", "cosine"
    )
    warmup_steps: int = option("steps of linear warmup", 0, ge=0)
    decay_steps: int | None = option("warmup_stable_decay: steps of the final decay", None, gt=0)
    min_lr_ratio: float = option(
        "learning rate at the end of the decay, as a fraction of learning_rate", 0.1, ge=0, le=1
    )
    weight_decay: float = option("decay of matrices; norms and biases have none", 0.1, ge=0)
    muon_momentum: float = option("decay of Muon's momentum per step", 0.95, ge=0, lt=1)
    adam_beta1: float = option("decay of AdamW's first moment per step", 0.9, ge=0, lt=1)
    adam_beta2: float = option("decay of AdamW's second moment per step", 0.95, ge=0, lt=1)
    adam_epsilon: float = option("AdamW's epsilon", 1e-8, gt=0)
    max_grad_norm: float = option("global norm to which gradients are clipped; 0: no clipping", 1.0, ge=0)
    # le: the largest seed of numpy's generator
    seed: int = option("seed of initial weights and of the order of samples", 42, ge=0, le=2**32 - 1)
    full_determinism: bool = option(
        "bit-equal numbers in every run and after a resume, with deterministic kernels on a GPU",
        True,
    )

    max_skipped_steps: int = option(
        "skipped steps in a row (loss or gradient not finite) after which the run stops",
        10,
        gt=0,
        resume="free",
    )
    spike_threshold: float = option(
        "robust standard deviations above the median from which a loss or gradient norm is a spike; 0: never",
        10.0,
        ge=0,
        resume="free",
    )
    on_spike: Literal["warn", "rollback"] = option(
        "rollback: return to the last checkpoint and continue without the samples that led to the spike",
        "warn",
        resume="free",
    )
    spike_window: int = option(
        "steps from which the median and spread are taken; fewer steps are not judged",
        128,
        ge=SMALLEST_WINDOW,
        le=10**6,  # each checkpoint holds so many values
        resume="free",
    )
    replica_check_steps: int = option(
        "steps between comparisons of the ranks' weights by checksum, each one pass over the weights; 0: none",
        100,
        ge=0,
        resume="free",
    )

    hang_timeout_s: float = option(
        "seconds without a finished step, evaluation batch or save after which the run stops and names the rank that "
        "hangs; 0: never. The first step and each part of the start and the end have at least half an hour",
        1800.0,
        ge=0,
        le=1e8,  # three years; system timers overflow soon after
        resume="free",
    )

    output_dir: str | None = option(
        "folder of the run; null: output/NAME of the configuration file NAME.json",
        None,
        resume="free",
        min_length=1,
    )
    dry_run: bool = option(
        "do everything up to the first step (data, model, startup checks, engine, the checkpoint to resume from), then "
        "exit with status 0 and leave output_dir unchanged",
        False,
        resume="free",
    )
    preflight: bool | None = option(
        "before the first step, check that all ranks are alike and see the same folders, measure GPUs and links, and "
        "compare reduced gradients; null: if ranks are on several nodes",
        None,
        resume="free",
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "what the console shows; train.log and logs/ have everything", "info", resume="free"
    )
    logging_steps: int = option("steps between log lines", 10, gt=0, resume="free")
    eval_steps: int = option("steps between evaluations; 0: only at the end", 0, ge=0, resume="free")
    max_eval_samples: int = option(
        "samples of an evaluation of each set over all ranks, evenly spaced", 256, gt=0, resume="free"
    )
    save_steps: int = option("steps between checkpoints; 0: not by steps", 0, ge=0, resume="free")
    save_minutes: float = option(
        "minutes (rank 0's clock) since the last save after which a checkpoint is saved; 0: not by time",
        30.0,
        ge=0,
        resume="free",
    )
    save_strategy: Literal["steps", "no"] = option(
        "steps: by save_steps, by save_minutes and at the end; no: neither checkpoints nor hf/, for measurements",
        "steps",
        resume="free",
    )
    save_total_limit: int = option("number of checkpoints to keep", 3, gt=0, resume="free")
    save_async: bool = option(
        "train on while a checkpoint is written from a copy in host memory; false: wait for the whole save",
        True,
        resume="free",
    )
    on_save_failure: Literal["stop", "continue"] = option(
        "stop: a failed save (a full disk) stops the run; continue: train on until the next save. A failed last save "
        "always counts",
        "stop",
        resume="free",
    )
    resume_from_checkpoint: str = option(
        "auto (the newest undamaged one), never, or the path of a checkpoint",
        "auto",
        resume="free",
        min_length=1,
    )
    allow_changes_on_resume: bool | list[str] = option(
        "keys that change what a step computes and may differ from the checkpoint; true: all that can change. Each "
        "change is logged and recorded in metrics.jsonl and later checkpoints",
        False,
        resume="free",
        example=["learning_rate"],
    )
    report_to: Literal["none", "wandb", "tensorboard"] | list[Literal["wandb", "tensorboard"]] = option(
        "trackers that get the metrics besides metrics.jsonl; a list for several", "none", resume="free"
    )
    run_name: str | None = option("the run's name in wandb; null: wandb's choice", None, resume="free")
    wandb_project: str = option("the run's project in wandb", "fp8-pretraining", resume="free")
    gradient_checkpointing: bool = option(
        "recompute activations in the backward pass: less memory, slower", False, resume="free"
    )
    deepspeed: Annotated[str, Field(min_length=1)] | dict[str, Any] | None = option(
        f"DeepSpeed configuration: path, name in train_args, or object; null: {DEFAULT_DEEPSPEED}",
        None,
        example={"zero_optimization": {"stage": 2}, "data_types": {"grad_accum_dtype": "fp32"}},
    )

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object that `load.build_arguments` makes equal arguments of."""
        return dataclasses.asdict(self)


def find_config(name: str, what: str) -> Path:
    """Return the file `name`: a path, or a bare name in train_args/.

    Args:
        what: the argument or key that names the file: "CONFIG" or "deepspeed".

    Raises:
        ConfigurationError: there is no such file.
    """
    candidates = [Path(name)]
    if Path(name).name == name:
        candidates += [CONFIG_FOLDER / name, CONFIG_FOLDER / f"{name.removesuffix('.json')}.json"]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    if Path(name).is_dir():
        raise ConfigurationError(f"{what}: {name} is a folder; give a JSON file", code="folder", key=name)
    kind = "ds" if what == "deepspeed" else "train"
    shipped = sorted(path.name for path in CONFIG_FOLDER.glob(f"{kind}_config_*.json"))
    here = [str(path) for path in Path(name).parent.glob("*.json")]
    near = difflib.get_close_matches(name, [*here, *shipped], n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigurationError(
        f"{what}: no file {' or '.join(dict.fromkeys(map(str, candidates)))}; {hint}train_args/, of which a bare name "
        f"is enough, has {', '.join(shipped)}",
        code="no_such_file",
        key=name,
    )


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        JsonError: as `read_json_file`.
        ConfigurationError: it holds something else than an object.
    """
    value = read_json_file(path)
    if not isinstance(value, dict):
        raise ConfigurationError(
            f"{path}: the file holds no JSON object; put the keys in {{...}}",
            code="not_an_object",
            key=str(path),
        )
    return value
