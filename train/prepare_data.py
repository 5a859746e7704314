"""Text -> token shards with a manifest: `python train/prepare_data.py --input PATH... --tokenizer DIR --output DIR`.

A document becomes BOS + its tokens + EOS; text never yields special ids, so a literal "</s>" in it stays text. A
document goes to the eval split by a hash of its text: equal texts stay on one side. The same inputs give the same
bytes, whatever the number of workers. Documents that cannot be read are counted by reason, and more of them than
--max_dropped end the run with status 1 and no manifest.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from train.corpus import ALLOWED, list_files, read_documents
from train.data_format import SCHEMA, SPLITS, DataError, Manifest, token_dtype
from train.files import sha256_file
from train.prepare_counts import Counts, Progress, text_batches, unigram_loss
from train.shard_writer import OutputFolder, ShardWriter

TOKENIZER_FILES = (
    "tokenizer.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)


class TextEncoder:
    """The tokenizer of a folder: by sentencepiece where it has a tokenizer.model, else by its tokenizer.json.

    Attributes: `vocab_size`, `bos_id`, `eos_id`, and `files`, the tokenizer's files with the defining one first;
    `encode` text -> ids, without BOS and EOS, and `decode` ids (without these) -> text.

    Raises:
        DataError: no tokenizer in the folder, an unreadable one, or one without BOS and EOS.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.encode: Callable[[str], list[int]]
        self.decode: Callable[[list[int]], str]
        self.files = [name for name in TOKENIZER_FILES if (self.folder / name).is_file()]
        if not self.files or self.files[0] not in ("tokenizer.model", "tokenizer.json"):
            raise DataError(
                f"--tokenizer {folder}: no tokenizer.model or tokenizer.json there; give a folder that has one, or "
                "train one with train/train_tokenizer.py"
            )
        path = self.folder / self.files[0]
        load = self._load_sentencepiece if path.name == "tokenizer.model" else self._load_tokenizers
        try:
            load(path)
        except DataError:
            raise
        except Exception as error:  # tokenizers raises plain Exception for a broken file
            raise DataError(f"{path} cannot be read: {error}") from error

    def _load_sentencepiece(self, path: Path) -> None:
        import sentencepiece

        model = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
        self.vocab_size, self.bos_id, self.eos_id = model.vocab_size(), model.bos_id(), model.eos_id()
        if min(self.bos_id, self.eos_id) < 0:
            raise DataError(f"{path} has no BOS or no EOS; documents need both")
        self.encode, self.decode = model.encode, model.decode

    def _load_tokenizers(self, path: Path) -> None:
        import tokenizers

        tokenizer = tokenizers.Tokenizer.from_file(str(path))
        tokenizer.encode_special_tokens = True  # a literal "</s>" in text is text
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.bos_id = self._special_id(tokenizer, "bos_token")
        self.eos_id = self._special_id(tokenizer, "eos_token")

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False).ids

        def decode(ids: list[int]) -> str:
            return tokenizer.decode(ids, skip_special_tokens=False)

        self.encode, self.decode = encode, decode

    def _special_id(self, tokenizer: Any, key: str) -> int:
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            if name in self.files:
                token = json.loads((self.folder / name).read_text(encoding="utf-8")).get(key)
                token = token["content"] if isinstance(token, dict) else token
                if token is not None and (token_id := tokenizer.token_to_id(token)) is not None:
                    return token_id
        raise DataError(f"{self.folder} names no {key} in tokenizer_config.json; documents need BOS and EOS")


@dataclass(frozen=True)
class _Batch:
    """Encoded documents: `tokens` [sum of lengths], `lengths` [documents] in tokens, `is_eval` [documents]."""

    tokens: np.ndarray
    lengths: np.ndarray
    is_eval: np.ndarray


def encode_batch(encoder: TextEncoder, texts: list[str], eval_fraction: float) -> _Batch:
    """Encode documents and choose their splits."""
    encoded = [[encoder.bos_id, *encoder.encode(text), encoder.eos_id] for text in texts]
    hashes = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts]
    return _Batch(
        tokens=np.concatenate([np.array(ids, dtype=token_dtype(encoder.vocab_size)) for ids in encoded]),
        lengths=np.array([len(ids) for ids in encoded]),
        is_eval=np.array([int.from_bytes(value, "little") < eval_fraction * 2**64 for value in hashes]),
    )


_worker_encoder: TextEncoder


def _start_worker(folder: str) -> None:
    global _worker_encoder
    _worker_encoder = TextEncoder(folder)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def exit_with_parent() -> None:  # a killed parent would leave its workers waiting for ever
        parent.join()
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()


def _encode_in_worker(texts: list[str], eval_fraction: float) -> _Batch:
    return encode_batch(_worker_encoder, texts, eval_fraction)


def encode_all(
    batches: Iterable[list[str]], encoder: TextEncoder, eval_fraction: float, workers: int
) -> Iterator[_Batch]:
    """Encode batches in their order, in this process (workers=1) or in a pool.

    Raises:
        RuntimeError: a worker process died.
    """
    if workers == 1:
        for batch in batches:
            yield encode_batch(encoder, batch, eval_fraction)
        return
    spawn = multiprocessing.get_context(
        "spawn"
    )  # fork is unsafe beside the threads of the tokenizer libraries
    pool = ProcessPoolExecutor(workers, spawn, _start_worker, (str(encoder.folder),))
    pending: deque[Future[_Batch]] = deque()
    try:
        for batch in batches:
            pending.append(pool.submit(_encode_in_worker, batch, eval_fraction))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise RuntimeError("a worker process died (killed, or out of memory); nothing was committed. Run the same "
                           "command again, with fewer --workers if memory was short") from error  # fmt: skip
    finally:
        pool.shutdown(cancel_futures=True)


def prepare(args: argparse.Namespace) -> Manifest:
    """Prepare `args.input` into `args.output`; see the command's --help for the fields.

    Raises:
        ValueError: bad inputs, tokenizer, output folder (DataError), or more documents dropped than allowed.
        RuntimeError: a worker died.
    """
    encoder = TextEncoder(args.tokenizer)
    list_files(args.input)  # wrong inputs are an error before an output is touched
    dtype = token_dtype(encoder.vocab_size)
    counts, progress, tokens = Counts(), Progress(), 0
    token_counts = {split: np.zeros(encoder.vocab_size, dtype=np.int64) for split in SPLITS}
    with OutputFolder(args.output, args.overwrite) as output:
        writers = {split: ShardWriter(output.folder, split, dtype, args.shard_tokens) for split in SPLITS}
        batches = text_batches(read_documents(args.input, args.text_key), counts, args.max_bytes)
        for batch in encode_all(batches, encoder, args.eval_fraction, args.workers):
            write_batch(batch, writers, token_counts)
            tokens += len(batch.tokens)
            progress.update(counts, tokens)
        for writer in writers.values():
            writer.close()
        print(progress.line(counts, tokens), file=sys.stderr, flush=True)
        if counts.dropped:
            print(counts.table(), file=sys.stderr, flush=True)
        if counts.dropped.total() > args.max_dropped:
            raise DataError(
                f"{counts.dropped.total()} documents were dropped, --max_dropped allows {args.max_dropped}: nothing "
                "was committed. Mend the inputs (the table names them), or allow as many"
            )
        if not writers["train"].shards:
            raise DataError("no document for the train split: give more text, a larger --max_bytes or a smaller "
                            "--eval_fraction")  # fmt: skip
        manifest = Manifest(
            schema=SCHEMA,
            dtype=dtype.name,
            vocab_size=encoder.vocab_size,
            bos_id=encoder.bos_id,
            eos_id=encoder.eos_id,
            tokenizer_sha256=sha256_file(encoder.folder / encoder.files[0]),
            tokenizer_files=encoder.files,
            inputs=list(args.input),
            text_key=args.text_key,
            eval_fraction=args.eval_fraction,
            documents={
                "in": counts.documents + counts.dropped.total(),
                "out": counts.documents,
                "dropped": dict(sorted(counts.dropped.items())),
            },
            text_bytes=counts.text_bytes,
            unigram_loss=unigram_loss(token_counts["train"], token_counts["eval"]),
            shards=[shard for split in SPLITS for shard in writers[split].shards],
        )
        output.copy_tokenizer(encoder.folder, encoder.files)
        output.commit(manifest)
    return manifest


def write_batch(batch: _Batch, writers: dict[str, ShardWriter], token_counts: dict[str, np.ndarray]) -> None:
    """Append a batch's documents to the shards of their splits and count its tokens."""
    ends = np.cumsum(batch.lengths)
    for end, length, is_eval in zip(
        ends.tolist(), batch.lengths.tolist(), batch.is_eval.tolist(), strict=True
    ):
        writers["eval" if is_eval else "train"].write(batch.tokens[end - length : end])
    in_eval = np.repeat(batch.is_eval, batch.lengths)
    for split, chosen in (("train", ~in_eval), ("eval", in_eval)):
        token_counts[split] += np.bincount(batch.tokens[chosen], minlength=len(token_counts[split]))


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; numbers outside their range are errors."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", nargs="+", required=True, help=f"files and folders of {ALLOWED}")
    parser.add_argument("--tokenizer", required=True, help="a folder with tokenizer.model or tokenizer.json")
    parser.add_argument("--output", required=True, help="the folder to write")
    parser.add_argument("--text_key", default="text", help="key or column of the text (default: text)")
    parser.add_argument(
        "--eval_fraction", type=float, default=0.01, help="held-out share of documents (0.01)"
    )
    parser.add_argument("--max_dropped", type=int, default=0, help="unreadable documents to tolerate (0)")
    parser.add_argument("--max_bytes", type=int, help="stop before the text exceeds this many bytes")
    parser.add_argument(
        "--shard_tokens", type=int, default=1 << 28, help="tokens a shard holds at most (2^28)"
    )
    parser.add_argument(
        "--workers", type=int, default=min(os.cpu_count() or 1, 16), help="processes (one a core, at most 16)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the prepared data in --output")
    args = parser.parse_args(argv)
    for name, low, high in (("eval_fraction", 0, 0.5), ("max_dropped", 0, None), ("max_bytes", 1, None),
                            ("shard_tokens", 1, None), ("workers", 1, None)):  # fmt: skip
        value = getattr(args, name)
        if value is not None and not (low <= value and (high is None or value <= high)):
            parser.error(f"--{name} {value}: allowed is {low} to {'any' if high is None else high}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 when the data was committed, else 1 with the reason on stderr."""
    args = parse_arguments(argv)
    try:
        manifest = prepare(args)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for split in SPLITS:
        shards = manifest.split_shards(split)
        documents = sum(shard.documents for shard in shards)
        print(
            f"{split}: {documents:,} documents, {manifest.split_tokens(split):,} tokens, {len(shards)} shards"
        )
    if manifest.unigram_loss is None:
        print("the eval split is empty: evaluation needs a larger --eval_fraction or more documents")
    else:
        print(f"unigram loss of the eval split: {manifest.unigram_loss:.4f} nats per token")
    return 0


if __name__ == "__main__":
    sys.exit(main())
