#!/usr/bin/env python3
"""What run_training.sh must know of a configuration before it starts it, one `key=value` a line.

    python scripts/run_info.py CONFIG [--key value]...

- output_dir: the run's folder
- precision, recipe: how the demo should generate from it
- missing_corpus: the data folder of the embedded corpus, if it is configured and not there yet; empty otherwise
- saves: empty with save_strategy no, which leaves no model to generate from
- state: "new", "resume", "finished" (all steps done and exported, and configured as now)
- resumes_from: of a run to resume, the checkpoint it goes on from; of a finished one, the last
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)
from train.checkpoint.files import CheckpointError, committed, identity, name_of, read_state
from train.config.arguments import ConfigurationError, TrainingArguments, load_arguments, resume_differences
from train.run_folder import RunFolder

# The name by which train_args/ and prepare_data.py know the Python standard library's own text.
EMBEDDED_CORPUS = "python-stdlib"


def run_state(arguments: TrainingArguments) -> tuple[str, str]:
    """(state, checkpoint) of the run that `arguments` describe, as the module's docstring explains."""
    if arguments.resume_from_checkpoint == "never":
        return "new", ""
    if arguments.resume_from_checkpoint != "auto":
        return "resume", arguments.resume_from_checkpoint
    folder = RunFolder(Path(str(arguments.output_dir)))
    found = committed(folder.checkpoints)
    if not found:
        return "new", ""
    done = found[-1].name >= name_of(arguments.max_steps) and folder.is_exported(identity(found[-1]))
    if done and is_configured_as(found[-1], arguments):
        return "finished", found[-1].name
    return "resume", found[-1].name  # train.py says what is different


def is_configured_as(checkpoint: Path, arguments: TrainingArguments) -> bool:
    """Whether `arguments` are of the run that wrote the checkpoint, and name the same data folders and model."""
    try:
        saved = read_state(checkpoint)
        now = arguments.resolve(saved.world_size).to_dict()
    except (CheckpointError, ConfigurationError):
        return False
    before = saved.train_config
    same = before["data"]["sources"] == now["data"]["sources"] and before["model"] == now["model"]
    return same and not resume_differences(before, now)


def missing_corpus(arguments: TrainingArguments) -> str:
    """Folder of the embedded corpus, if it is a source and has no manifest, the last file that is written."""
    for folder in arguments.data.sources.values():
        if Path(folder).name == EMBEDDED_CORPUS and not (Path(folder) / "manifest.json").is_file():
            return folder
    return ""


def main() -> int:
    try:
        arguments = load_arguments(sys.argv[1:])
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return 1
    state, checkpoint = run_state(arguments)
    precision = arguments.precision
    for key, value in {
        "output_dir": arguments.output_dir,
        "precision": "fp32"
        if precision.compute == "fp32"
        else "fp8"
        if precision.compute == "fp8"
        else "bf16",
        # Delayed scaling needs histories of amaxes that an exported model does not have.
        "recipe": "block" if precision.recipe == "block" else "current",
        "missing_corpus": missing_corpus(arguments),
        "saves": "" if arguments.save_strategy == "no" else "yes",
        "state": state,
        "resumes_from": checkpoint,
    }.items():
        print(f"{key}={value}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
