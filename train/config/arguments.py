"""The training configuration: one dataclass a section, read from strict JSON plus command-line overrides.

    defaults (here)  <  CONFIG.json  <  --key value  ->  checked  ->  resolve(world_size)

Names are those of transformers' TrainingArguments where it has the concept. The help of each field (unit,
meaning) is what `--help` prints.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any

from model.fp8.recipes import PrecisionConfig
from model.speed import SpeedConfig
from train.config import strict_json
from train.config.argument_checks import value_problems
from train.config.strict_json import all_fields, default_of, get, leaves, sections
from train.data.mixture import MixtureStage

REPOSITORY = Path(__file__).resolve().parent.parent.parent
CONFIG_FOLDER = REPOSITORY / "train_args"
DEFAULT_DEEPSPEED = "ds_config_zero1.json"

# What may differ between a run and its resumption: none of it changes what a step computes. All else must stay,
# precision.backend too: the reference rounds a little differently. gradient_accumulation_steps follows from
# train_batch_size_tokens, which must stay, and the number of ranks; the content of data folders and
# of model.config is compared, not their paths, and the weights of model.init_from are in the checkpoint, as is
# what calibration found.
FREE_ON_RESUME = frozenset(
    "gradient_accumulation_steps per_device_eval_batch_size max_eval_samples gradient_checkpointing "
    "output_dir logging_steps eval_steps save_steps save_strategy save_total_limit save_async "
    "on_save_failure resume_from_checkpoint report_to run_name wandb_project data.verify data.allow_changes_on_resume "
    "model.config model.init_from precision.calibration_passes speed.cuda_graphs "
    "max_skipped_steps spike_threshold spike_window on_spike replica_check_steps hang_timeout_s".split()
)
# Keys that checkpoints from before they existed lack, and what runs did then.
BEFORE_THERE_WERE = {
    "precision.auto": False,
    "data.document_mask": False,
    **{f"speed.{f.name}": False for f in dataclasses.fields(SpeedConfig)},
}
FP8_FORMAT = "precision.fp8_format"


class ConfigurationError(ValueError):
    """The configuration cannot be used; the message lists every problem with its key."""


def option(help: str, default: Any = MISSING, example: Any = None) -> Any:
    """A field with the text that --help prints for it; without a default it is required. `example` is a value for
    messages about a key that takes an object."""
    return field(default=default, metadata={"help": help, "example": example})


@dataclass(kw_only=True)
class ModelArguments:
    """The "model" section: what is trained."""

    config: str = option("a name in model/configs, or the path of a MistralConfig JSON")
    variant: str = option(
        "te_linear | te_layer | hf (transformers' own, the baseline) | torchao (the same with torchao's FP8)",
        "te_layer",
    )
    compile: bool | None = option(
        "hf, torchao: torch.compile for each decoder layer; null: for torchao on a GPU", None
    )
    init_from: str | None = option(
        "Hugging Face folder whose weights the run starts from; null: random", None
    )
    attention_backend: str = option("auto | fused (cuDNN) | flash | unfused", "auto")


@dataclass(kw_only=True)
class DataArguments:
    """The "data" section: what is trained on."""

    sources: dict[str, str] = option(
        "name -> folder written by prepare_data.py; relative: here, else the repository",
        example={"NAME": "data/pretrain"},
    )
    weights: dict[str, float] | list[MixtureStage] | None = option(
        'name -> share of the samples; null: by tokens; by stage: [{"until_tokens": N, "weights": {...}}, ..., '
        '{"weights": {...}}]',
        None,
        example={"NAME": 0.7, "OTHER": 0.3},
    )
    verify: bool = option("recompute every hash and look at every token id of the shards at the start", False)
    allow_changes_on_resume: bool = option(
        "a resume may change tokenizer, data, data.* and max_seq_length; each change is logged", False
    )
    document_mask: bool = option(
        "te_*: attention stays within documents, positions begin anew with each, its last token predicts nothing",
        False,
    )


@dataclass(kw_only=True)
class TrainingArguments:
    """Everything a run is configured by."""

    model: ModelArguments
    data: DataArguments
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    speed: SpeedConfig = field(default_factory=SpeedConfig)

    max_steps: int = option("optimizer steps of the whole run")
    max_seq_length: int = option("tokens of a sample", 2048)
    per_device_train_batch_size: int = option("samples of a micro-batch on one rank", 8)
    per_device_eval_batch_size: int | None = option("the same in evaluation; null: as in training", None)
    gradient_accumulation_steps: int | None = option(
        "micro-batches of a step; null: from train_batch_size_tokens, else 1", None
    )
    train_batch_size_tokens: int | None = option(
        "tokens of a step over all ranks; null: what gradient_accumulation_steps (or 1) gives", None
    )

    learning_rate: float = option("peak of the schedule", 3e-4)
    lr_scheduler_type: str = option("cosine | linear | constant | warmup_stable_decay", "cosine")
    warmup_steps: int = option("steps of linear warmup", 0)
    decay_steps: int | None = option("warmup_stable_decay: the last steps, in which the rate decays", None)
    min_lr_ratio: float = option("what decay ends at, as a fraction of learning_rate (0 to 1)", 0.1)
    weight_decay: float = option("AdamW's decay of matrices; norms and biases have none", 0.1)
    adam_beta1: float = option("decay of AdamW's first moment a step", 0.9)
    adam_beta2: float = option("decay of AdamW's second moment a step", 0.95)
    adam_epsilon: float = option("AdamW's epsilon", 1e-8)
    max_grad_norm: float = option("gradients are clipped to this global norm; 0: no clipping", 1.0)
    seed: int = option("seed of initial weights and of the order of samples", 42)
    full_determinism: bool = option(
        "same numbers to the last bit in each run and after a resume, by deterministic kernels on the GPU too",
        True,
    )

    max_skipped_steps: int = option(
        "steps in a row that may be skipped because a loss or gradient is not finite; then the run stops", 10
    )
    spike_threshold: float = option(
        "spreads (robust standard deviations) above the median at which a loss or gradient norm is a spike; 0: never",
        10.0,
    )
    on_spike: str = option(
        "warn | rollback: back to the last checkpoint, and on from there without the samples that led to the spike",
        "warn",
    )
    spike_window: int = option("steps whose median and spread a spike is judged by, 16 or more", 128)
    replica_check_steps: int = option(
        "steps between comparisons of the ranks' weights by checksum, one pass over the weights each; 0: none",
        100,
    )

    hang_timeout_s: float = option(
        "seconds without a finished step, evaluation batch or save after which the run ends and says which rank hangs; "
        "0: never",
        1800.0,
    )

    output_dir: str | None = option("folder of the run; null: output/<name of the config file>", None)
    logging_steps: int = option("steps between log lines", 10)
    eval_steps: int = option("steps between evaluations; 0: only at the end", 0)
    max_eval_samples: int = option("samples of an evaluation, over all ranks", 256)
    save_steps: int = option("steps between checkpoints; 0: only at the end", 0)
    save_strategy: str = option(
        "steps (every save_steps and at the end) | no (neither checkpoints nor hf/: a run that only measures)",
        "steps",
    )
    save_total_limit: int = option("checkpoints that are kept", 3)
    save_async: bool = option(
        "training waits only for copies in host memory, as much as a rank writes, and goes on while they are written; "
        "false: it waits for the whole save",
        True,
    )
    on_save_failure: str = option(
        "stop | continue: whether a save that failed (a full disk) ends the run, or it trains on until the next save; "
        "the last save of a run always counts",
        "stop",
    )
    resume_from_checkpoint: str = option("auto (the newest good one) | never | path of a checkpoint", "auto")
    report_to: str = option("none | wandb", "none")
    run_name: str | None = option("the run's name in wandb; null: wandb's choice", None)
    wandb_project: str = option("the run's project in wandb", "fp8-pretraining")
    gradient_checkpointing: bool = option("recompute activations in the backward: less memory, slower", False)
    deepspeed: str | dict[str, Any] | None = option(
        f"DeepSpeed configuration: path, name in train_args, or object; null: {DEFAULT_DEEPSPEED}",
        None,
        example={"zero_optimization": {"stage": 2}},
    )

    @classmethod
    def from_dict(cls, raw: dict[str, Any], source: str = "configuration") -> TrainingArguments:
        """Checked arguments from a JSON object (not modified).

        Raises ConfigurationError: one message with every unknown key, wrong type, and value that is not
        allowed.
        """
        problems: list[str] = []
        bad: set[str] = set()
        arguments = strict_json.build(cls, copy.deepcopy(raw), problems, bad)
        problems += value_problems(arguments, bad)
        if problems:
            plural = f"{len(problems)} problems" if len(problems) > 1 else "a problem"
            raise ConfigurationError("\n  ".join([f"{source} has {plural}:", *problems]))
        return arguments

    def to_dict(self) -> dict[str, Any]:
        """The JSON object that `from_dict` makes equal arguments of."""
        return dataclasses.asdict(self)

    def resolve(self, world_size: int) -> TrainingArguments:
        """A copy in which all that follows from the rest is filled in, for `world_size` ranks.

        Sets gradient_accumulation_steps, train_batch_size_tokens, per_device_eval_batch_size, and `deepspeed`
        to the object that its file holds. Resolving twice changes nothing.

        Raises ConfigurationError: a batch that does not divide, or whose two statements disagree.
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
                f"train_batch_size_tokens: {given} is not divisible by {sizes}; the nearest that are: {valid}"
            )
        if given is not None and steps is not None and given != micro_tokens * steps:
            raise ConfigurationError(
                f"train_batch_size_tokens {given} contradicts gradient_accumulation_steps {steps}: {sizes}, "
                f"x {steps} = {micro_tokens * steps}; remove one of the two keys"
            )
        out.gradient_accumulation_steps = steps or (given // micro_tokens if given else 1)
        out.train_batch_size_tokens = micro_tokens * out.gradient_accumulation_steps
        out.per_device_eval_batch_size = self.per_device_eval_batch_size or self.per_device_train_batch_size
        out.deepspeed = load_deepspeed(self.deepspeed)
        return out

    def table(self) -> str:
        """The configuration for the log, a line a key; `*` marks what is not the default."""
        defaults = {key: default_of(f) for key, f in all_fields(type(self))}
        values = {key: get(self, key) for key in defaults}
        width = max(map(len, defaults))
        return "\n".join(
            f"{'*' if value != defaults[key] else ' '} {key:<{width}}  {json.dumps(value, default=dataclasses.asdict)}"
            for key, value in values.items()
        )


def load_deepspeed(value: str | dict[str, Any] | None) -> dict[str, Any]:
    """The DeepSpeed configuration as written. Raises ConfigurationError: no such file, not JSON."""
    if isinstance(value, dict):
        return copy.deepcopy(value)
    return _read(find_config(value or DEFAULT_DEEPSPEED, "deepspeed"))


def find_config(name: str, what: str) -> Path:
    """`name` as a path, else a bare name in train_args/. Raises ConfigurationError: in neither."""
    candidates = [Path(name)]
    if Path(name).name == name:
        candidates += [CONFIG_FOLDER / name, CONFIG_FOLDER / f"{name}.json"]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    there = ", ".join(sorted(path.name for path in CONFIG_FOLDER.glob("*.json")))
    raise ConfigurationError(
        f"{what}: no file {' or '.join(str(candidate) for candidate in candidates)}; train_args/ has {there}"
    )


def load_arguments(argv: list[str]) -> TrainingArguments:
    """Arguments from a command line: `CONFIG [--key value | --key=value | --section.key value]...`.

    `--help` prints the help and exits. DeepSpeed's `--local_rank` is accepted and ignored.

    Raises ConfigurationError: every problem in one message.
    """
    if "--help" in argv or "-h" in argv:
        print(help_text())
        raise SystemExit(0)
    config, overrides = _parse_command_line(argv)
    path = find_config(config, "CONFIG")
    raw = _read(path)
    for key, text in overrides:
        try:
            strict_json.set_override(raw, TrainingArguments, key, text)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
    if raw.get("output_dir") in (None, ""):
        raw["output_dir"] = str(Path("output") / path.stem)
    arguments = TrainingArguments.from_dict(raw, f"{path} with the command line" if overrides else str(path))
    for name, folder in arguments.data.sources.items():
        if not Path(folder).exists() and (REPOSITORY / folder).exists():
            arguments.data.sources[name] = str(REPOSITORY / folder)
    return arguments


def _parse_command_line(argv: list[str]) -> tuple[str, list[tuple[str, str]]]:
    configs, overrides, words = [], [], list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            configs.append(word)
            continue
        key, equals, text = word[2:].partition("=")
        if not equals:
            if not words or words[0].startswith("--"):
                raise ConfigurationError(
                    _unknown(key) or f"{word} needs a value: {word} VALUE or {word}=VALUE"
                )
            text = words.pop(0)
        if not _is_local_rank(key):
            overrides.append((key, text))
    if len(configs) != 1:
        given = ", ".join(configs) or "none"
        unknown = [line for key, _ in overrides if (line := _unknown(key))]  # one may have swallowed CONFIG
        raise ConfigurationError(
            "\n  ".join([f"one CONFIG is expected, {len(configs)} are given ({given}); see --help", *unknown])
        )
    return configs[0], overrides


def _is_local_rank(key: str) -> bool:
    return key.replace("-", "_") == "local_rank"


def _unknown(key: str) -> str:
    """The problem of a `--key` that does not exist; "" for one that does."""
    if _is_local_rank(key) or strict_json.knows(TrainingArguments, key):
        return ""
    near = strict_json.nearest(key, (known for known, _ in all_fields(TrainingArguments)))
    return f"--{key}: unknown key{near}; --help lists all keys"


def help_text() -> str:
    """What --help prints: usage, and every key with type, default and meaning."""
    lines = [
        "usage: train.py CONFIG [--key value]...",
        "",
        "CONFIG is a JSON file; a bare name that is not here is looked up in train_args/.",
        "Every key of the file can be given as --key value too, --section.key value in a section;",
        "values are JSON, or plain strings. Start with deepspeed, torchrun or python (one process).",
        "",
    ]
    types: dict[str, Any] = {}
    for prefix, cls in (("", TrainingArguments), *((f"{s}.", c) for s, c in sections(TrainingArguments))):
        types |= {prefix + name: kind for name, kind in strict_json.key_types(cls).items()}
    for key, f in all_fields(TrainingArguments):
        default = "required" if default_of(f) is MISSING else f"default {json.dumps(default_of(f))}"
        lines += [
            f"  --{key}  ({strict_json.type_name(types[key])}; {default})",
            f"        {f.metadata['help']}",
        ]
    return "\n".join(lines)


def resume_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What keeps a run from being resumed: "key: old -> new" for each key that changes its numbers.

    Both are `to_dict()` of resolved arguments. `max_steps` may change where the schedule does not depend on
    it.
    """
    free = set(FREE_ON_RESUME)
    if old.get("lr_scheduler_type") == new.get("lr_scheduler_type") == "constant":
        free.add("max_steps")

    def relevant(values: dict[str, Any]) -> dict[str, Any]:
        values = copy.deepcopy(values)
        data = values.get("data", {})
        data["sources"] = sorted(data.get("sources", {}))
        return {key: value for key, value in leaves(values) if key not in free}

    before, after = relevant(old), relevant(new)
    before = {key: BEFORE_THERE_WERE[key] for key in BEFORE_THERE_WERE.keys() & after.keys()} | before
    if before.get(FP8_FORMAT, "") is None:  # before there was a default: what the recipe's was
        before[FP8_FORMAT] = "e4m3" if before["precision.recipe"] == "block" else "hybrid"
    return [
        f"{key}: {json.dumps(before.get(key))} -> {json.dumps(after.get(key))}"
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key)
    ]


def _read(path: Path) -> dict[str, Any]:
    try:
        return strict_json.read_json(path)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
