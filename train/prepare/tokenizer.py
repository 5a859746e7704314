"""Train and check tokenizers.

A trained tokenizer is a sentencepiece model and a tokenizer.json that gives the same ids in transformers.
"""

import argparse
import hashlib
import heapq
import io
import json
import logging
import os
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import sentencepiece
from tqdm import tqdm

from model.keys import folder_problem
from train.data.encoder import (
    HARD_STRINGS,
    SPACE,
    TOKENIZER_FILES,
    TextEncoder,
    chat_template_problem,
    compare_ids,
    copy_tokenizer_files,
    has_chat_template,
    load_exported,
)
from train.data.format import DataError
from train.prepare.corpus import Source, list_sources, read_share
from train.prepare.readers import MISSING_KEY, Damaged, Dropped, Text
from train.prepare.tally import Tally

logger = logging.getLogger(__name__)
MODEL_NAME = "tokenizer.model"
PROGRESS_S = 5.0
# Twice sentencepiece's default. sentencepiece skips longer sentences, so documents are cut at line ends.
MAX_SENTENCE_BYTES = 8192
# A fixed number of threads, because sentencepiece writes it into the model file.
NUM_THREADS = 16
# Size of the text sample on which a tokenizer is checked. Encoding the sample takes less than a second.
SAMPLE_TEXTS, SAMPLE_LENGTH, SAMPLE_PLACES = 200, 2_000, 40
# sentencepiece uses these characters as markers and skips sentences that contain them.
RESERVED = re.compile("[\x00\t\u2585]")


def sample_texts(
    items: Iterable[Text | Dropped | Damaged],
    max_bytes: int,
    max_dropped: int = 0,
    max_damaged_files: int = 0,
) -> list[str]:
    """Return a sample of the texts, with a total size of at most `max_bytes` but at least one text.

    The sample contains the texts with the smallest hashes, in their original order. This spreads the sample over the
    whole corpus and makes it reproducible. Only the sample is kept in memory.

    Raises:
        DataError: if more than `max_dropped` documents or `max_damaged_files` files cannot be read, or there is no
            text.
    """
    tally = Tally()
    kept: list[tuple[int, int, int, str]] = []  # a heap whose first entry has the largest hash
    kept_bytes = 0
    for number, item in enumerate(items):
        if isinstance(item, Text):
            tally.read += 1
            data = item.text.encode()
            key = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
            heapq.heappush(kept, (-key, -number, len(data), item.text))
            kept_bytes += len(data)
            while kept_bytes > max_bytes and len(kept) > 1:
                kept_bytes -= heapq.heappop(kept)[2]
        elif isinstance(item, Damaged):
            tally.damage(item)
        else:
            tally.drop(item)
    tally.check(max_dropped, max_damaged_files)
    limited = " (limited by --max_bytes)" * (len(kept) < tally.read)
    print(f"training the tokenizer on {len(kept):,} of {tally.read:,} documents{limited}", flush=True)
    return [text for _, _, _, text in sorted(kept, key=lambda entry: -entry[1])]


def training_sentences(texts: Iterable[str]) -> Iterator[str]:
    """Split texts into sentences that sentencepiece does not skip.

    The sentences have at most MAX_SENTENCE_BYTES bytes, keep their line ends and contain no reserved characters.
    """
    limit = MAX_SENTENCE_BYTES // 4  # in characters; a character has at most four bytes
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


def train_model(texts: Collection[str], vocab_size: int, character_coverage: float, **required: Any) -> bytes:
    """Train a sentencepiece BPE model and return the content of its model file.

    Args:
        character_coverage: fraction of all characters in the texts that get a piece of their own.
        required: additional sentencepiece trainer options. Only the recursive call passes them.

    Raises:
        DataError: if the texts yield fewer than `vocab_size` pieces, or contain too many different characters for
            `vocab_size`.
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
            unk_surface=" <unk> ",
            max_sentence_length=MAX_SENTENCE_BYTES,
            num_threads=NUM_THREADS,
            minloglevel=2,
            **required,
        )
    except RuntimeError as error:
        reason = str(error).rpartition("] ")[2]
        raise DataError(
            f"--vocab_size {vocab_size} cannot be used with this corpus: {reason} Change --vocab_size or "
            "--character_coverage, or add text (if --max_bytes limits the text, increase it)",
            code="training_failed",
            key="--vocab_size",
        ) from error
    data = model.getvalue()
    # sentencepiece adds a space before each text. In text without spaces, such as DNA, the space is too rare for
    # character_coverage and gets no piece. Every text would then begin with three byte pieces instead of the space.
    trained = sentencepiece.SentencePieceProcessor(model_proto=data)
    if not required and trained.piece_to_id(SPACE) == trained.unk_id():
        return train_model(texts, vocab_size, character_coverage, required_chars=SPACE)
    return data


def write_fast_tokenizer(model: sentencepiece.SentencePieceProcessor, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, so that the transformers library gives the same ids as `model`.

    As in sentencepiece, any two adjacent pieces that form another piece can merge, and pieces with a higher score are
    formed first. Only normal pieces are formed: sentencepiece never builds a special piece or a byte piece from its
    letters. The converter in the transformers library does, so it would encode a literal "</s>" in text as EOS.
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
    unk, bos, eos = (model.id_to_piece(i) for i in (model.unk_id(), model.bos_id(), model.eos_id()))
    special = [piece for piece, i in vocab.items() if piece == unk or model.is_control(i)]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=unk, fuse_unk=True, byte_fallback=True)
    )
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(token, special=True, normalized=False) for token in special]
    )
    has_prefix = model.encode("a", out_type=str)[0].startswith(
        SPACE
    )  # whether `model` adds a space before each text
    # LlamaTokenizer's Metaspace pre-tokenizer cannot be used: it adds no space before text that begins with a space.
    prepend = [normalizers.Prepend(SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, vocab[bos])]
    )
    # tokenizer.save would raise a plain Exception instead of OSError if the disk is full
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    config = {
        # In transformers 5, LlamaTokenizer would replace the normalizer in tokenizer.json with Metaspace.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": unk,
        "bos_token": bos,
        "eos_token": eos,
        "add_bos_token": True,
        "add_eos_token": False,
        "split_special_tokens": True,  # encode a literal "</s>" as text, not as EOS
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**9,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def copy_tokenizer(encoder: TextEncoder, folder: Path) -> None:
    """Copy the tokenizer files to `folder`, and write a tokenizer.json if there is only a tokenizer.model.

    Without a tokenizer.json, the transformers library would convert tokenizer.model, and the converted tokenizer would
    not add a space before each text. Entries in tokenizer_config.json that do not affect ids are kept. If
    tokenizer.json is written, special tokens in text are encoded as text, unless the tokenizer has a chat template.
    """
    folder.mkdir(exist_ok=True)
    copy_tokenizer_files(encoder, folder)
    if "tokenizer.json" in encoder.files:
        return
    path = folder / "tokenizer_config.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    write_fast_tokenizer(sentencepiece.SentencePieceProcessor(model_file=str(folder / MODEL_NAME)), folder)
    config = before | json.loads(path.read_text(encoding="utf-8"))
    config["split_special_tokens"] = not has_chat_template(folder)
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def check_tokenizer(encoder: TextEncoder, texts: Sequence[str]) -> dict[str, Any]:
    """Check that `encoder` and the transformers library give the same ids, and warn if decoding changes a text.

    The check covers `texts`, HARD_STRINGS, and the special and user-defined pieces. The transformers library loads the
    tokenizer from the same files as in an exported model.

    Returns:
        A report on `texts` for the manifest: the numbers of texts, changed texts, tokens and unknown tokens, and the
        first change. A text is changed if its ids are decoded to a different text.

    Raises:
        DataError: if the ids differ, or a text is encoded to a special id.
    """
    import transformers

    # transformers reads these entries of an exported model, too
    config = {"model_type": "mistral", "transformers_version": transformers.__version__}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_tokenizer(encoder, folder)
        (folder / "config.json").write_text(json.dumps(config))
        compare_ids(encoder, load_exported(folder, encoder, encoder.vocab_size), [*texts, *HARD_STRINGS])
        if problem := chat_template_problem(folder):
            logger.warning(problem.removeprefix("warning: "))
    ids = encoder.encode_batch(list(texts))
    changed = [
        (text, decoded)
        for text, own in zip(texts, ids, strict=True)
        if (decoded := encoder.decode(own)) not in (text, f" {text}")
    ]
    report: dict[str, Any] = {"texts": len(texts), "texts_changed": len(changed)}
    remedy = "To keep all text except the character U+2581, train a tokenizer with train/train_tokenizer.py"
    for text, decoded in changed[:1]:
        at = len(os.path.commonprefix([text, decoded]))
        part = slice(max(at - 20, 0), at + 20)
        report["first_change"] = [text[part], decoded[part]]
        logger.warning(
            f"the tokenizer loses text in {len(changed)} of {len(texts)} sampled texts: for example, {text[part]!r} "
            f"is decoded as {decoded[part]!r}. {remedy}"
        )
    report["tokens"] = sum(map(len, ids))
    unk_id = encoder.markers().unk_id
    report["unknown_tokens"] = unknown = sum(own.count(unk_id) for own in ids)
    if unknown:
        logger.warning(
            f"the tokenizer loses text: {unknown} of {report['tokens']} tokens in the sampled texts are the unknown "
            f"token. {remedy}"
        )
    return report


def sample_sources(
    sources: Sequence[Source], text_key: str, split_on: str | None, max_dropped: int = 0
) -> list[str]:
    """Return a sample of short texts from positions spread over all input files.

    The sample has at most SAMPLE_TEXTS texts of at most SAMPLE_LENGTH characters each, from SAMPLE_PLACES positions.

    Raises:
        DataError: if the sample contains no text, and more than `max_dropped` documents have no key `text_key`.
    """
    texts, tally = list[str](), Tally()
    chosen = [i * len(sources) // SAMPLE_PLACES for i in range(SAMPLE_PLACES)]
    # Last place first: a file that cannot be split is read only at its first place, which then yields all its texts.
    for place in reversed(range(SAMPLE_PLACES)):
        most = len(texts) + (SAMPLE_TEXTS - len(texts)) // (place + 1)
        first, parts = chosen.index(chosen[place]), chosen.count(chosen[place])
        items = read_share([sources[chosen[place]]], text_key, place - first, parts, split_on)
        for item in islice(items, most - len(texts)):
            if isinstance(item, Text):
                step = max(SAMPLE_LENGTH, len(item.text) // 8)
                cut = [item.text[i : i + SAMPLE_LENGTH] for i in range(0, len(item.text), step)]
                texts += cut[: most - len(texts)]
            elif isinstance(item, Dropped):
                tally.drop(item)
    if not texts and tally.dropped[MISSING_KEY] > max_dropped:
        tally.check(max_dropped, 0)
    return texts


def train_tokenizer(args: argparse.Namespace) -> None:
    """Train a tokenizer, check it and write it to the output folder.

    Args:
        args: the parsed command line of train_tokenizer.py.

    Raises:
        DataError: if the inputs are invalid, the corpus does not fit the vocabulary size, the output folder already
            contains a tokenizer, or the transformers library gives different ids. In these cases, no tokenizer is
            written.
    """
    output = Path(args.output)
    if problem := folder_problem(output):
        raise DataError(f"--output {output} {problem}", code="cannot_write", key=str(output))
    if any((output / name).exists() for name in TOKENIZER_FILES) and not args.overwrite:
        raise DataError(
            f"{output} already contains a tokenizer; choose another --output, or pass --overwrite to replace it. "
            "After a replacement, prepare all data of the old tokenizer again",
            code="already_there",
            key=str(output),
        )
    sources = list_sources(args.input, args.split_on)
    sample_sources(sources, args.text_key, args.split_on, args.max_dropped)  # fail now if --text_key is wrong
    items = read_share(sources, args.text_key, 0, 1, args.split_on)
    documents = tqdm(items, desc="reading", unit=" documents", mininterval=PROGRESS_S)
    texts = sample_texts(documents, args.max_bytes, args.max_dropped, args.max_damaged_files)
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output, prefix=".unfinished-") as name:
        work = Path(name)
        data = train_model(texts, args.vocab_size, args.character_coverage)
        (work / MODEL_NAME).write_bytes(data)
        write_fast_tokenizer(sentencepiece.SentencePieceProcessor(model_proto=data), work)
        some = [text[:10_000] for text in texts[:: max(1, len(texts) // SAMPLE_TEXTS)]]
        report = check_tokenizer(TextEncoder(work), some)
        for old in TOKENIZER_FILES:
            (output / old).unlink(missing_ok=True)
        # Move the model last: after an interruption, the folder then contains no model rather than mixed files.
        for path in sorted(work.iterdir(), key=lambda path: path.name == MODEL_NAME):
            path.replace(output / path.name)
    print(
        f"wrote a tokenizer with a vocabulary of {args.vocab_size:,} tokens to {output}; the transformers library and "
        f"sentencepiece give the same ids for {report['texts']} sampled texts",
        flush=True,
    )
