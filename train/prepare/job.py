"""A preparation as a whole: what it is made of, what it may go on from, its stages, and its manifest at the end."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from datatrove.pipeline.base import PipelineStep

from train.data.format import SCHEMA, DataError, Manifest, token_dtype
from train.files import sha256_file, write_durably
from train.prepare.blocks import ReadDocuments, WriteShards, encoder_of, read_results
from train.prepare.corpus import MISSING_KEY, Source, text_key_option
from train.prepare.counts import unigram_loss
from train.prepare.output import OutputFolder
from train.prepare.steps import StepOptions, filters, passes, removal, report
from train.prepare.tally import Stage, Tally

JOB_NAME = "job.json"
LAST_STAGE = "tokenize"


@dataclass(frozen=True)
class Job:
    """What is prepared from what, and how. The same job gives the same bytes, however its tasks are run.

    `inputs` as they were given; `sources`, the files behind them. max_bytes: of text, over all tasks.
    """

    inputs: tuple[str, ...]
    sources: tuple[Source, ...]
    tokenizer: Path
    output: Path
    text_key: str
    eval_fraction: float
    max_bytes: int | None
    shard_tokens: int
    shuffle_seed: int | None
    tasks: int
    steps: StepOptions

    @property
    def work(self) -> Path:
        return OutputFolder(self.output, overwrite=False).work

    @property
    def results(self) -> Path:
        return self.work / "results"

    @property
    def stage_folder(self) -> Path:
        return self.work / "stages"

    @property
    def scratch(self) -> Path:
        return self.work / "scratch"

    def identity(self) -> dict[str, Any]:
        """Everything that the output depends on, as JSON values."""
        values = asdict(self) | {
            "tokenizer": sha256_file(self.tokenizer / encoder_of(str(self.tokenizer)).files[0])
        }
        del values["output"]
        return json.loads(json.dumps(values))

    def stages(self) -> list[Stage]:
        """The stages in their order; the last one writes the shards."""
        scratch = self.scratch
        stages = passes(self.steps, scratch, self.tasks, lambda: [self._read(Tally())])
        tally = Tally()
        write = WriteShards(
            self.output,
            self.results,
            self.tokenizer,
            self.eval_fraction,
            self.shard_tokens,
            self.shuffle_seed,
            tally,
        )
        pipeline = [
            self._read(tally),
            *filters(self.steps, scratch, tally),
            *removal(self.steps, scratch, tally),
            write,
        ]
        return [*stages, Stage(LAST_STAGE, pipeline, self.tasks)]

    def _read(self, tally: Tally) -> ReadDocuments:
        return ReadDocuments(list(self.sources), self.text_key, self.max_bytes, tally)


def begin(job: Job) -> None:
    """Note the job in the work folder, or find that it is the one which was begun there.

    Raises:
        DataError: another one was begun there, with what differs.
    """
    path = job.work / JOB_NAME
    now = job.identity()
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        if changed := list(_differences(before, now)):
            raise DataError(
                f"{job.output} holds an unfinished preparation of another kind:\n  "
                + "\n  ".join(changed)
                + "\n"
                "Give the former inputs and options to go on with it, or --overwrite to begin anew"
            )
        return
    job.work.mkdir(parents=True, exist_ok=True)
    write_durably(path, json.dumps(now, indent=1) + "\n")


def _differences(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        if old == new:
            continue
        if key == "sources":
            ours, theirs = ({source["path"]: source for source in files} for files in (new or [], old or []))
            changed = [path for path in {**theirs, **ours} if ours.get(path) != theirs.get(path)]
            yield f"{len(changed)} input files are new, gone or changed, the first is {changed[0] if changed else '-'}"
        else:
            yield f"{key}: {json.dumps(old)} -> {json.dumps(new)}"


def finish(job: Job, output: OutputFolder, max_dropped: int) -> Manifest:
    """Commit what all tasks left: the tokenizer's files, then the manifest. What was dropped and removed is told on
    stderr first.

    Raises:
        DataError: more documents were dropped than allowed, or all, or none is in the train split.
    """
    encoder = encoder_of(str(job.tokenizer))
    result = read_results(job.results, job.tasks, encoder.vocab_size)
    documents = result.tally.documents()
    if result.tally.dropped or result.tally.by_step:
        print(result.tally.table(), file=sys.stderr, flush=True)
    if (dropped := result.tally.dropped.total()) > max_dropped or (dropped and not result.tally.read):
        raise DataError(_too_many_dropped(result.tally, max_dropped))
    if not any(shard.split == "train" for shard in result.shards):
        raise DataError(
            "no document for the train split: give more text, a larger --max_bytes or a smaller --eval_fraction, "
            "with --overwrite"
        )
    manifest = Manifest(
        schema=SCHEMA,
        dtype=token_dtype(encoder.vocab_size).name,
        vocab_size=encoder.vocab_size,
        bos_id=encoder.bos_id,
        eos_id=encoder.eos_id,
        tokenizer_sha256=sha256_file(encoder.folder / encoder.files[0]),
        tokenizer_files=encoder.files,
        inputs=list(job.inputs),
        text_key=job.text_key,
        eval_fraction=job.eval_fraction,
        documents=documents,
        text_bytes=result.tally.text_bytes,
        unigram_loss=unigram_loss(result.counts["train"], result.counts["eval"]),
        shards=result.shards,
        steps=asdict(job.steps) | report(job.steps, job.scratch),
    )
    output.copy_tokenizer(encoder.folder, encoder.files)
    output.commit(manifest)
    return manifest


def _too_many_dropped(tally: Tally, max_dropped: int) -> str:
    """What happened, and the ways on from it that there are."""
    dropped = tally.dropped.total()
    ways = []
    if tally.read:
        what = f"{dropped} documents were dropped, --max_dropped allows {max_dropped}"
        ways.append(
            f"run the command again with --max_dropped {dropped} to accept that, which reads nothing again"
        )
    else:
        what = f"{dropped} documents were dropped and none is left"
    if MISSING_KEY in tally.dropped:
        ways.append(f"name the key of the text with {text_key_option(tally.text_keys)}, and --overwrite")
    ways.append("mend the inputs (the table names them) and prepare them with --overwrite")
    return f"{what}, so nothing was committed: {'; or '.join(ways)}"


class Finish(PipelineStep):
    """`finish` as a stage of its own, for jobs that end when nobody waits for them."""

    type, name = "MANIFEST", "finish"

    def __init__(self, job: Job, max_dropped: int) -> None:
        super().__init__()
        self.job, self.max_dropped = job, max_dropped

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:  # type: ignore[override]
        with OutputFolder(self.job.output, overwrite=False, resumable=True) as output:
            finish(self.job, output, self.max_dropped)
