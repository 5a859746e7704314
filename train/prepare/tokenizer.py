"""Training of a tokenizer: text -> a sentencepiece model, and the tokenizer.json that gives its ids in transformers."""

import argparse
import hashlib
import heapq
import io
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import sentencepiece

from model.keys import why_not_written
from train.data.encoder import TOKENIZER_FILES
from train.files import naming
from train.prepare.corpus import list_sources, read_share, text_key_option
from train.prepare.output import take_lock
from train.prepare.readers import EMPTY, MISSING_KEY, Damaged, Dropped, Items, Place, Text
from train.prepare.tally import Pace

UNK, BOS, EOS = "<unk>", "<s>", "</s>"
MODEL_NAME = "tokenizer.model"
PROGRESS_S = 5.0
NAMED = 5  # documents that cannot be read, in one message
# Twice the default of sentencepiece, which skips what is longer; documents are cut at line ends to fit.
MAX_SENTENCE_BYTES = 8192
# sentencepiece writes the number into the model, so it must not follow the machine.
NUM_THREADS = 16
# sentencepiece skips sentences with these: its own markers for boundaries and unknown characters.
RESERVED = re.compile("[\x00\t\u2585]")
HARD_STRINGS = (
    "", " ", "  ", "\n", "\t", "a  b   c    d", " leading", "   leading", "trailing ", "trailing   ",
    "line\nline\n\n\nline\r\nline", "\tindent\n\t\tindent\n    \tmixed", "def f(x):\n        return x  # two  spaces\n",
    "1234567890 3.14159 2**31", "éèüß ñ ø ł", "日本語の文章。中文 한국어", "שלום مرحبا हिन्दी",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈 end",
    "rare \U00010348 \U0001f9ff \ue000 \x07 \x7f", "e\u0301 combining",
    "\ufeffbom \u200b zero \u00a0 nbsp \u3000 wide",
    "</s>", "<s>", "<unk>", "a</s>b <s> c<unk>d", "</s></s>", "<0x0A> <0x41>", "under_score ▁ ▁▁x", "x" * 300,
)  # fmt: skip


def sample_texts(
    items: Iterable[Text | Dropped | Damaged],
    max_bytes: int,
    max_dropped: int = 0,
    max_damaged_files: int = 0,
) -> list[str]:
    """The texts, or a sample of at most `max_bytes` of them, or of one: those with the smallest hashes, in their order.

    The sample is spread over the whole corpus, the same in every run, and needs no more memory than it fills.

    Raises:
        ValueError: more documents than `max_dropped` cannot be read, of which the first are named, or more than
            `max_damaged_files` files, or there is no text.
    """
    unread = _Unread(max_dropped)
    damaged: set[str] = set()
    kept: list[tuple[int, int, int, str]] = []  # a heap with the largest hash first
    kept_bytes = 0
    for number, item in enumerate(items):
        if isinstance(item, Dropped):
            unread.add(item)
            continue
        if isinstance(item, Damaged):
            damaged.add(item.path)
            _tell(f"damaged file: {item}")
            continue
        size = len(item.text.encode())
        key = int.from_bytes(hashlib.blake2b(item.text.encode(), digest_size=8).digest(), "little")
        heapq.heappush(kept, (-key, -number, size, item.text))
        kept_bytes += size
        while kept_bytes > max_bytes and len(kept) > 1:
            kept_bytes -= heapq.heappop(kept)[2]
    unread.end()
    if len(damaged) > max_damaged_files:
        raise ValueError(
            f"damaged files: {len(damaged)} (--max_damaged_files is {max_damaged_files}); repair them, leave "
            f"them out of --input, or accept the loss with --max_damaged_files {len(damaged)}"
        )
    if not kept:
        raise ValueError("the inputs hold no text; a tokenizer needs some")
    return [text for _, _, _, text in sorted(kept, key=lambda entry: -entry[1])]


class _Unread:
    """Documents that cannot be read. More than are allowed end the reading: at once where the key of the text is
    missing, else once a few can be named together, or at the end."""

    def __init__(self, allowed: int) -> None:
        self.allowed, self.count, self.first = allowed, 0, list[Dropped]()

    def add(self, item: Dropped) -> None:
        if item.reason == EMPTY:
            return
        self.count += item.count
        if len(self.first) < NAMED:
            self.first.append(item)
        if self.count > self.allowed and (item.reason == MISSING_KEY or len(self.first) == NAMED):
            self._refuse(" so far")

    def end(self) -> None:
        if self.count > self.allowed:
            self._refuse("")
        if self.count:
            _tell(
                f"{self.count} documents cannot be read and are left out (--max_dropped), such as {self.first[0]}"
            )

    def _refuse(self, so_far: str) -> None:
        remedy = "mend them, or leave them out of --input"
        if keys := [item.text_keys for item in self.first if item.text_keys]:
            remedy += f", or name the key of the text with {text_key_option(keys[0])}"
        named = "".join(f"\n  {item}" for item in self.first)
        raise ValueError(
            f"{self.count} documents{so_far} cannot be read, and --max_dropped allows {self.allowed}:{named}\n{remedy}"
        )


def training_sentences(texts: Iterable[str]) -> Iterator[str]:
    """Cut texts into pieces that sentencepiece takes: line ends kept, no reserved characters, bounded length."""
    limit = MAX_SENTENCE_BYTES // 4  # characters; one is at most four bytes
    for text in texts:
        for part in RESERVED.split(text):
            piece: list[str] = []
            length = 0
            for line in part.splitlines(keepends=True):
                for start in range(0, len(line), limit):
                    cut = line[start : start + limit]
                    if length + len(cut) > limit:
                        yield "".join(piece)
                        piece, length = [], 0
                    piece.append(cut)
                    length += len(cut)
            if piece:
                yield "".join(piece)


def train_model(texts: Iterable[str], vocab_size: int, character_coverage: float) -> bytes:
    """Train and return the bytes of a sentencepiece model.

    Raises:
        ValueError: the text does not yield `vocab_size` pieces, or has more characters than fit in it.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=training_sentences(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=character_coverage,
            split_digits=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            add_dummy_prefix=True,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            unk_surface=f" {UNK} ",
            max_sentence_length=MAX_SENTENCE_BYTES,
            num_threads=NUM_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(_training_problem(str(error), vocab_size)) from error
    return model.getvalue()


def _training_problem(message: str, vocab_size: int) -> str:
    if found := re.search(r"value <= (\d+)", message):
        return (f"--vocab_size {vocab_size} is too large for this corpus: at most {found[1]} is possible with it; "
                "lower it, give more text or raise --max_bytes")  # fmt: skip
    if found := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return (f"--vocab_size {vocab_size} is too small: bytes, special ids and the corpus' characters alone need "
                f"{found[1]}; raise it, or lower --character_coverage")  # fmt: skip
    return f"sentencepiece could not train on this text: {message}"


def write_fast_tokenizer(model: sentencepiece.SentencePieceProcessor, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, which give the ids of `model` in transformers.

    The merges are all splits of a piece into two pieces, ordered as sentencepiece orders them: by the rank of what
    they make. Only normal pieces take part: sentencepiece never builds a special or byte piece out of its letters,
    and transformers' own converter, which would, turns a literal "</s>" in text into the end of the document.
    """
    import tokenizers
    from tokenizers import decoders, models, normalizers, processors

    count = model.vocab_size()
    vocab = {model.id_to_piece(index): index for index in range(count)}
    normal = {
        piece: index
        for piece, index in vocab.items()
        if not (model.is_unknown(index) or model.is_control(index) or model.is_byte(index))
    }
    merges = [
        (piece[:cut], piece[cut:])
        for piece in sorted(normal, key=lambda piece: (-model.get_score(normal[piece]), normal[piece]))
        for cut in range(1, len(piece))
        if piece[:cut] in normal and piece[cut:] in normal
    ]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=UNK, fuse_unk=True, byte_fallback=True)
    )
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(token, special=True, normalized=False) for token in (UNK, BOS, EOS)]
    )
    # Not the Metaspace pre-tokenizer of LlamaTokenizer: it adds no space before text that begins with one.
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B:1", special_tokens=[(BOS, vocab[BOS])]
    )
    # not by its own save, which raises plain Exception where the disk is full
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    config = {
        # Not LlamaTokenizer, which in transformers 5 replaces the normalizer of tokenizer.json by Metaspace.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": UNK,
        "bos_token": BOS,
        "eos_token": EOS,
        "add_bos_token": True,
        "add_eos_token": False,
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**9,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def check_identity(folder: Path, texts: Iterable[str]) -> int:
    """Compare the ids of AutoTokenizer and sentencepiece, and the way back to text; returns the texts compared.

    Raises:
        RuntimeError: they differ; names the text and the first differing position.
    """
    from transformers import AutoTokenizer

    fast = AutoTokenizer.from_pretrained(folder)
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / MODEL_NAME))
    compared = 0
    for text in texts:
        expected = [model.bos_id(), *model.encode(text)]
        found = fast(text)["input_ids"]
        if found != expected:
            at = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), "the end")
            raise RuntimeError(f"transformers and sentencepiece differ from token {at} on of {text[:80]!r}: "
                               f"{found[:20]} and {expected[:20]}")  # fmt: skip
        if "▁" not in text and fast.decode(found[1:]) != text:
            raise RuntimeError(f"text does not survive encoding and decoding: {text[:80]!r}")
        compared += 1
    return compared


def add_fast_tokenizer(folder: Path) -> bool:
    """Beside the tokenizer.model in `folder`, which has no tokenizer.json, write what gives its ids in transformers:
    what transformers itself makes of a tokenizer.model alone has no space before a text. Of a tokenizer_config.json
    that is there what does not concern ids stays. False: ids would differ all the same, and nothing is written.
    """
    path = folder / "tokenizer_config.json"
    before = path.read_bytes() if path.exists() else None
    try:
        write_fast_tokenizer(
            sentencepiece.SentencePieceProcessor(model_file=str(folder / MODEL_NAME)), folder
        )
        if before is not None:
            path.write_text(json.dumps(json.loads(before) | json.loads(path.read_bytes()), indent=2) + "\n")
        check_identity(folder, HARD_STRINGS)
    except Exception:  # tokenizers raises plain Exception
        (folder / "tokenizer.json").unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        if before is not None:
            path.write_bytes(before)
        return False
    return True


class _Reading:
    """The documents of the inputs, counted; how far it is goes to stderr every few seconds."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.documents = self.text_bytes = 0
        self.place = Place()
        sources = list_sources(args.input, args.split_on, _tell)
        self._items = read_share(sources, args.text_key, 0, 1, args.split_on, self.place)

    def __iter__(self) -> Items:
        pace, told = Pace(), time.monotonic()
        for item in self._items:
            if isinstance(item, Text):
                self.documents += 1
                self.text_bytes += len(item.text.encode())
            if time.monotonic() - told >= PROGRESS_S:
                told = time.monotonic()
                share = pace.words(self.place.bytes / max(self.place.total, 1))
                _tell(f"reading: {share}: {self.documents:,} documents, {self.text_bytes / 1e6:,.1f} MB")
            yield item


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _exchange(work: Path, output: Path) -> None:
    """Put the files in `work` in the place of the tokenizer that `output` has. tokenizer.model goes first and comes
    last: with it the others are its own. It takes milliseconds, in which Ctrl-C is not heard."""
    heard = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for name in TOKENIZER_FILES:
            (output / name).unlink(missing_ok=True)
        for path in sorted(work.iterdir(), key=lambda path: path.name == MODEL_NAME):
            path.replace(output / path.name)
    finally:
        signal.signal(signal.SIGINT, heard)


def train_tokenizer(args: argparse.Namespace) -> None:
    """Train a tokenizer, check it and write its folder; the fields are train_tokenizer.py's.

    Raises:
        ValueError: bad inputs, an impossible vocabulary size, or an output folder that holds a tokenizer, or is
            written to by another process.
        RuntimeError: the check of the ids failed; nothing was written.
    """
    output = Path(args.output)
    work = output / ".unfinished"  # of a run that was killed, if it is there

    def check() -> None:
        if why := why_not_written(output):
            raise ValueError(f"--output {output} {why}")
        # of one whose exchange was interrupted the model is gone, and what is left is nobody's
        is_left = work.exists() and not (output / MODEL_NAME).exists()
        has_tokenizer = any((output / name).exists() for name in TOKENIZER_FILES)
        if has_tokenizer and not (args.overwrite or is_left):
            raise ValueError(f"{output} already holds a tokenizer; choose another --output, or --overwrite it (data "
                             "prepared with the old one will not fit the new one)")  # fmt: skip

    check()
    start = time.monotonic()
    reading = _Reading(args)
    texts = sample_texts(reading, args.max_bytes, args.max_dropped, args.max_damaged_files)
    size = sum(len(text.encode()) for text in texts)
    of = ""
    if len(texts) < reading.documents:
        whole = "; documents stay whole" if size > args.max_bytes else ""
        of = f", a sample of {reading.text_bytes / 1e6:,.1f} MB (--max_bytes{whole})"
    print(f"training on {len(texts):,} documents, {size / 1e6:,.1f} MB{of}", flush=True)
    exchanging = False
    with naming(output), take_lock(output / "train_tokenizer.lock") as lock:
        try:
            check()  # reading takes minutes, in which another run may have written one
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            data = train_model(texts, args.vocab_size, args.character_coverage)
            (work / MODEL_NAME).write_bytes(data)
            some = [text[:10_000] for text in texts[:: max(1, len(texts) // 200)]]
            write_fast_tokenizer(sentencepiece.SentencePieceProcessor(model_proto=data), work)
            compared = check_identity(work, [*HARD_STRINGS, *some])
            exchanging = True
            _exchange(work, output)
            exchanging = False
        finally:
            # of an exchange that failed in the middle it stays, as after a kill, and so says that the rest is nobody's
            if not exchanging:
                shutil.rmtree(work, ignore_errors=True)
            os.unlink(lock.name)
    print(f"{output}: {args.vocab_size:,} pieces in {time.monotonic() - start:.1f} s; transformers gives the ids of "
          f"sentencepiece on {compared} texts", flush=True)  # fmt: skip
