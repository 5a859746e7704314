"""The training configuration: one dataclass a section, read from strict JSON plus command-line overrides.

    defaults (here)  <  CONFIG.json  <  --key value  ->  checked  ->  resolve(world_size)

Names are those of transformers' TrainingArguments where it has the concept. The help of each field (unit,
meaning) is what `--help` prints.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from model.config import JsonError
from model.fp8.recipes import PrecisionConfig
from model.hub import HubError, local_folder
from model.keys import STRICT, option
from model.variants import ATTENTION_BACKENDS, VARIANTS, SpeedConfig
from train.config import command_line, msamp
from train.config.across_keys import problems_across_keys
from train.config.schedule import order_problems
from train.config.schema import ConfigurationError, parse, read_json
from train.data.mixture import MixtureStage
from train.files import REPOSITORY, data_folder

CONFIG_FOLDER = REPOSITORY / "train_args"
DEFAULT_DEEPSPEED = "ds_config_zero1.json"

SMALLEST_WINDOW = 16  # steps of spike_window: the median of fewer says little


@dataclass(config=STRICT, kw_only=True)
class ModelArguments:
    """The "model" section: what is trained."""

    # the content of config is compared on a resume, and the weights of init_from are in the checkpoint
    config: str = option(
        "a name in model/configs, the path of a MistralConfig JSON, or a model of the Hugging Face Hub (ORG/NAME)",
        resume="content",
        example="tiny",
    )
    variant: Literal[tuple(VARIANTS)] = option(  # type: ignore[valid-type]
        "te_linear and te_layer are of Transformer Engine's modules; hf: transformers' own, the baseline; torchao: the "
        "same with torchao's FP8",
        "te_layer",
        resume="never",
        why="weights and optimizer state are stored under the names of its modules; model.init_from takes an export",
    )
    compile: bool | None = option(
        "hf, torchao: torch.compile for each decoder layer; null: for torchao on a GPU", None
    )
    init_from: str | None = option(
        "Hugging Face folder, or ORG/NAME on the Hub, whose weights the run starts from; null: random",
        None,
        resume="free",
        min_length=1,
    )
    attention_backend: Literal[tuple(ATTENTION_BACKENDS)] = option(  # type: ignore[valid-type]
        "whose attention te_linear and te_layer run; fused is cuDNN's; auto: flash where FlashAttention-4 is installed "
        "on a Hopper GPU and heads have 64, 128 or 256 dimensions, else Transformer Engine's choice",
        "auto",
    )


@dataclass(config=STRICT, kw_only=True)
class DataArguments:
    """The "data" section: what is trained on."""

    sources: dict[str, str] = option(
        "name -> folder written by prepare_data.py; relative: here, else the repository",
        min_length=1,
        example={"NAME": "data/pretrain"},
    )
    weights: dict[str, float] | list[MixtureStage] | None = option(
        'name -> share of the samples; null: by tokens; by stage: [{"until_tokens": N, "weights": {...}}, ..., '
        '{"weights": {...}}]',
        None,
        example={"NAME": 0.7, "OTHER": 0.3},
    )
    # what is evaluated changes no step
    eval_sources: dict[str, str] | None = option(
        "name -> further folder whose eval split is evaluated too, by itself, as eval_loss/NAME",
        None,
        resume="free",
        example={"NAME": "data/held_out"},
    )
    verify: bool = option(
        "recompute every hash and look at every token id of the shards at the start", False, resume="free"
    )
    document_mask: bool = option(
        "te_*: attention stays within documents, positions begin anew with each, its last token predicts nothing",
        False,
    )


@dataclass(config=STRICT, kw_only=True)
class TrainingArguments:
    """Everything a run is configured by."""

    model: ModelArguments = Field()
    data: DataArguments = Field()
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig)
    speed: SpeedConfig = Field(default_factory=SpeedConfig)

    max_steps: int = option("optimizer steps of the whole run", gt=0, resume="constant", example=1000)
    max_seq_length: int = option("tokens of a sample", 2048, gt=0)
    per_device_train_batch_size: int = option("samples of a micro-batch on one rank", 8, gt=0)
    per_device_eval_batch_size: int | None = option(
        "the same in evaluation; null: as in training", None, gt=0, resume="free"
    )
    # free, as it follows from train_batch_size_tokens, which is not, and the number of ranks
    gradient_accumulation_steps: int | None = option(
        "micro-batches of a step; null: from train_batch_size_tokens, else 1", None, gt=0, resume="free"
    )
    train_batch_size_tokens: int | None = option(
        "tokens of a step over all ranks; null: what gradient_accumulation_steps (or 1) gives", None, gt=0
    )

    optim: Literal["adamw", "muon"] = option(
        "muon: of the matrices of the layers, at AdamW's learning rate and decay; all else is AdamW's; ZeRO 1 or 0",
        "adamw",
        resume="never",
        why="what the optimizer keeps of its steps is of another kind; model.init_from takes an export",
    )
    # AdamW moves a weight by up to the rate in a step; some 1e37 is more than torch's float32 steps take
    learning_rate: float = option("peak of the schedule", 3e-4, gt=0, le=100)
    lr_scheduler_type: Literal["cosine", "linear", "constant", "warmup_stable_decay"] = option(
        "how the learning rate goes on after the warmup", "cosine"
    )
    warmup_steps: int = option("steps of linear warmup", 0, ge=0)
    decay_steps: int | None = option(
        "warmup_stable_decay: the last steps, in which the rate decays", None, gt=0
    )
    min_lr_ratio: float = option("what decay ends at, as a fraction of learning_rate", 0.1, ge=0, le=1)
    weight_decay: float = option("the optimizer's decay of matrices; norms and biases have none", 0.1, ge=0)
    muon_momentum: float = option("decay of Muon's momentum a step", 0.95, ge=0, lt=1)
    adam_beta1: float = option("decay of AdamW's first moment a step", 0.9, ge=0, lt=1)
    adam_beta2: float = option("decay of AdamW's second moment a step", 0.95, ge=0, lt=1)
    adam_epsilon: float = option("AdamW's epsilon", 1e-8, gt=0)
    max_grad_norm: float = option("gradients are clipped to this global norm; 0: no clipping", 1.0, ge=0)
    # up to what numpy's generator takes
    seed: int = option("seed of initial weights and of the order of samples", 42, ge=0, le=2**32 - 1)
    full_determinism: bool = option(
        "same numbers to the last bit in each run and after a resume, by deterministic kernels on the GPU too",
        True,
    )

    max_skipped_steps: int = option(
        "steps in a row that may be skipped because a loss or gradient is not finite; then the run stops",
        10,
        gt=0,
        resume="free",
    )
    spike_threshold: float = option(
        "spreads (robust standard deviations) above the median at which a loss or gradient norm is a spike; 0: never",
        10.0,
        ge=0,
        resume="free",
    )
    on_spike: Literal["warn", "rollback"] = option(
        "rollback: back to the last checkpoint, and on from there without the samples that led to the spike",
        "warn",
        resume="free",
    )
    spike_window: int = option(
        "steps whose median and spread a spike is judged by; none is judged before there are so many",
        128,
        ge=SMALLEST_WINDOW,
        le=10**6,  # values that each checkpoint holds
        resume="free",
    )
    replica_check_steps: int = option(
        "steps between comparisons of the ranks' weights by checksum, one pass over the weights each; 0: none",
        100,
        ge=0,
        resume="free",
    )

    hang_timeout_s: float = option(
        "seconds without a finished step, evaluation batch or save after which the run ends and says which rank hangs; "
        "0: never. The first step and each part of the start and the end have half an hour at least",
        1800.0,
        ge=0,
        le=1e8,  # three years; timers of the system end soon after
        resume="free",
    )

    output_dir: str | None = option(
        "folder of the run; null: output/<name of the config file>", None, resume="free", min_length=1
    )
    dry_run: bool = option(
        "everything up to the first step: data, model, proof, engine, a checkpoint to go on from; then it ends, with "
        "status 0, and output_dir is as it was",
        False,
        resume="free",
    )
    preflight: bool | None = option(
        "before the first step all ranks check together whether they are alike and see the same folders, how fast GPUs "
        "and links are, and whether a step's gradients are reduced right; null: where ranks are on several nodes",
        None,
        resume="free",
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "what the console shows; train.log and logs/ have everything", "info", resume="free"
    )
    logging_steps: int = option("steps between log lines", 10, gt=0, resume="free")
    eval_steps: int = option("steps between evaluations; 0: only at the end", 0, ge=0, resume="free")
    max_eval_samples: int = option(
        "samples of an evaluation of each set, at even distances, over all ranks", 256, gt=0, resume="free"
    )
    save_steps: int = option("steps between checkpoints; 0: not by steps", 0, ge=0, resume="free")
    save_minutes: float = option(
        "minutes without a save, by rank 0's clock, after which a checkpoint is saved; 0: not by time",
        30.0,
        ge=0,
        resume="free",
    )
    save_strategy: Literal["steps", "no"] = option(
        "steps: by save_steps, save_minutes and at the end; no: neither checkpoints nor hf/, a run that only measures",
        "steps",
        resume="free",
    )
    save_total_limit: int = option("checkpoints that are kept", 3, gt=0, resume="free")
    save_async: bool = option(
        "training waits only for copies in host memory, as much as a rank writes, and goes on while they are written; "
        "false: it waits for the whole save",
        True,
        resume="free",
    )
    on_save_failure: Literal["stop", "continue"] = option(
        "whether a save that failed (a full disk) ends the run, or it trains on until the next save; "
        "the last save of a run always counts",
        "stop",
        resume="free",
    )
    resume_from_checkpoint: str = option(
        "auto (the newest good one) | never | path of a checkpoint", "auto", resume="free", min_length=1
    )
    allow_changes_on_resume: bool | list[str] = option(
        "keys that a resume may have otherwise than the checkpoint although they change what a step computes; true: "
        "all that can be. Each change is logged, and noted in metrics.jsonl and in later checkpoints",
        False,
        resume="free",
        example=["learning_rate"],
    )
    report_to: Literal["none", "wandb", "tensorboard"] | list[Literal["wandb", "tensorboard"]] = option(
        "where metrics go besides metrics.jsonl, as a list where it is to several", "none", resume="free"
    )
    run_name: str | None = option("the run's name in wandb; null: wandb's choice", None, resume="free")
    wandb_project: str = option("the run's project in wandb", "fp8-pretraining", resume="free")
    gradient_checkpointing: bool = option(
        "recompute activations in the backward: less memory, slower", False, resume="free"
    )
    deepspeed: Annotated[str, Field(min_length=1)] | dict[str, Any] | None = option(
        f"DeepSpeed configuration: path, name in train_args, or object; null: {DEFAULT_DEEPSPEED}",
        None,
        example={"zero_optimization": {"stage": 2}, "data_types": {"grad_accum_dtype": "fp32"}},
    )

    @classmethod
    def from_dict(cls, raw: dict[str, Any], source: str = "configuration") -> TrainingArguments:
        """Checked arguments from a JSON object. Raises ConfigurationError: every problem in one message."""
        raw = {key: value for key, value in raw.items() if key != "$schema"}  # for editors
        text = json.dumps(raw, ensure_ascii=False)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigurationError(
                f"{source}: {text[error.start :][:40]!a} is not Unicode text", code="not_unicode"
            ) from error
        arguments, problems, bad = parse(cls, raw)
        problems += problems_across_keys(arguments, bad)
        if problems:
            plural = f"{len(problems)} problems" if len(problems) > 1 else "a problem"
            raise ConfigurationError(f"{source} has {plural}:", problems=problems)
        return arguments

    def to_dict(self) -> dict[str, Any]:
        """The JSON object that `from_dict` makes equal arguments of."""
        return dataclasses.asdict(self)

    def resolve(self, world_size: int) -> TrainingArguments:
        """A copy in which all that follows from the rest is filled in, for `world_size` ranks.

        Sets gradient_accumulation_steps, train_batch_size_tokens, per_device_eval_batch_size, `deepspeed` to the
        object that its file holds, and what a section "msamp" there asks for. Resolving twice changes nothing.

        Raises ConfigurationError: a batch that does not divide, or whose two statements disagree; as msamp.apply.
        """
        out = copy.deepcopy(self)
        micro_tokens = self.per_device_train_batch_size * self.max_seq_length * world_size
        sizes = (
            f"per_device_train_batch_size {self.per_device_train_batch_size} x max_seq_length "
            f"{self.max_seq_length} x {world_size} ranks = {micro_tokens} tokens"
        )
        given, steps = self.train_batch_size_tokens, self.gradient_accumulation_steps
        if given is not None and given % micro_tokens:
            below = given // micro_tokens * micro_tokens
            valid = " or ".join(str(size) for size in (below, below + micro_tokens) if size)
            raise ConfigurationError(
                f"train_batch_size_tokens: {given} is not divisible by {sizes}; the nearest that are: {valid}",
                code="batch_not_divisible",
                key="train_batch_size_tokens",
            )
        if given is not None and steps is not None and given != micro_tokens * steps:
            raise ConfigurationError(
                f"train_batch_size_tokens {given} contradicts gradient_accumulation_steps {steps}: {sizes}, "
                f"x {steps} = {micro_tokens * steps}; remove one of the two keys",
                code="batch_contradiction",
                key="train_batch_size_tokens",
            )
        out.gradient_accumulation_steps = steps or (given // micro_tokens if given else 1)
        out.train_batch_size_tokens = micro_tokens * out.gradient_accumulation_steps
        out.per_device_eval_batch_size = self.per_device_eval_batch_size or self.per_device_train_batch_size
        out.deepspeed = load_deepspeed(self.deepspeed)
        problems = msamp.apply(out.deepspeed, out.precision)
        if problems or (msamp.asked(out.deepspeed) and (problems := problems_across_keys(out, set()))):
            raise ConfigurationError("the DeepSpeed configuration has a problem:", problems=problems)
        if problems := order_problems(out):
            raise ConfigurationError(problems=problems)
        return out


def load_deepspeed(value: str | dict[str, Any] | None) -> dict[str, Any]:
    """The DeepSpeed configuration as written. Raises ConfigurationError: no such file, not JSON."""
    if isinstance(value, dict):
        return copy.deepcopy(value)
    path = find_config(DEFAULT_DEEPSPEED if value is None else value, "deepspeed")
    try:
        return read_json(path)
    except JsonError as error:
        raise ConfigurationError(str(error), code=error.code, key=error.key) from error


def find_config(name: str, what: str) -> Path:
    """`name` as a path, else a bare name in train_args/. Raises ConfigurationError: in neither."""
    candidates = [Path(name)]
    if Path(name).name == name:
        candidates += [CONFIG_FOLDER / name, CONFIG_FOLDER / f"{name.removesuffix('.json')}.json"]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    if Path(name).is_dir():
        raise ConfigurationError(f"{what}: {name} is a folder; give a JSON file", code="folder", key=name)
    kind = "ds" if what == "deepspeed" else "train"
    there = sorted(path.name for path in CONFIG_FOLDER.glob(f"{kind}_config_*.json"))
    here = [str(path) for path in Path(name).parent.glob("*.json")]
    near = difflib.get_close_matches(name, [*here, *there], n=1)
    raise ConfigurationError(
        f"{what}: no file {' or '.join(dict.fromkeys(map(str, candidates)))}; "
        f"{f'did you mean {near[0]}? ' if near else ''}"
        f"train_args/, of which a bare name is enough, has {', '.join(there)}",
        code="no_such_file",
        key=name,
    )


def load_arguments(argv: list[str]) -> TrainingArguments:
    """Arguments from a command line: `CONFIG [--key value | --key=value | --section.key value]...`.

    `--help` prints the help and exits. DeepSpeed's `--local_rank` is accepted and ignored.

    Raises ConfigurationError: every problem in one message.
    """
    if "--help" in argv or "-h" in argv:
        print(command_line.help_text(TrainingArguments))
        raise SystemExit(0)
    if argv == ["--schema"]:
        print(command_line.schema_text(TrainingArguments))
        raise SystemExit(0)
    try:
        config, overrides = command_line.split(argv, TrainingArguments)
        path = find_config(config, "CONFIG")
        raw = read_json(path)
        for key, text in overrides:
            command_line.override(raw, TrainingArguments, key, text)
    except JsonError as error:
        raise ConfigurationError(str(error), code=error.code, key=error.key) from error
    if raw.get("output_dir") is None:
        raw["output_dir"] = str(Path("output") / path.stem)
    arguments = TrainingArguments.from_dict(raw, f"{path} with the command line" if overrides else str(path))
    model = arguments.model
    try:
        model.config = local_folder(model.config, weights=False)
        model.init_from = model.init_from and local_folder(model.init_from)
    except HubError as error:
        raise ConfigurationError(str(error), code=error.code, key=error.key) from error
    for folders in (arguments.data.sources, arguments.data.eval_sources or {}):
        for name, folder in folders.items():
            folders[name] = data_folder(folder)
    return arguments
