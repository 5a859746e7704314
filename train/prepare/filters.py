"""Build datatrove's language and quality filters, check that they can run offline, and count what they remove."""

import argparse
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.io import cached_asset_path_or_download
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
    LanguageFilter,
)
from datatrove.pipeline.filters.base_filter import BaseFilter, get_filter_result
from datatrove.utils.lid import FT176LID
from datatrove.utils.word_tokenizers import load_word_tokenizer

from model import install_command
from train.data.format import DataError
from train.files import sha256_file
from train.prepare.corpus import list_sources
from train.prepare.ngrams import EvaluationFilter
from train.prepare.steps import StepOptions
from train.prepare.tally import Tally

ENGLISH = ("en", "eng")
LABEL = "__label__"
QUALITY_FILTERS = {
    "gopher_quality": GopherQualityFilter,
    "gopher_repetition": GopherRepetitionFilter,
    "c4": C4QualityFilter,
    "fineweb": FineWebQualityFilter,
}


def find_step_options(args: argparse.Namespace) -> StepOptions:
    """Build the step options from the command line, and find or download the files that the steps need.

    Raises:
        DataError: a file is missing, a package is not installed, or the language model is not available.
    """
    model = language_model(args.languages, args.language_model) if args.languages else None
    if args.quality:
        check_splitter(args.quality_language)
    evaluation = [source.path for file in args.decontaminate for source in list_sources([file])]
    return StepOptions(
        languages=tuple(args.languages),
        language_model=model,
        quality=tuple(args.quality),
        quality_language=args.quality_language,
        dedup=args.dedup,
        decontaminate=tuple(args.decontaminate),
        decontaminate_key=args.decontaminate_key,
        decontaminate_ngram=args.decontaminate_ngram,
        sha256=tuple((file, sha256_file(file)) for file in filter(None, [model, *evaluation])),
    )


def make_filters(options: StepOptions, index: Path, tally: Tally) -> list[PipelineStep]:
    """Return the blocks that judge each document on its own, and count in `tally`.

    Args:
        index: the folder with the index of the evaluation texts.
    """
    found: dict[str, Any] = {}
    if options.language_model:
        languages = list(options.languages)
        # keeps a document if any of them scores above the threshold, even if it is not the highest
        found["language"] = LanguageFilter(languages, options.language_threshold)
        found["language"].model = FileLanguages(languages, options.language_model)
    for name in options.quality:
        found[f"quality {name}"] = quality_filter(name, options.quality_language)
    if options.decontaminate:
        found["evaluation text"] = EvaluationFilter(index, options.decontaminate_ngram)
    return [Counted(block, step, tally) for step, block in found.items()]


class Counted(BaseFilter):
    """Wrapper of a datatrove filter that counts the removed documents by step and reason."""

    def __init__(self, block: BaseFilter, step: str, tally: Tally) -> None:
        self.name = block.name
        super().__init__()
        self.block, self.step, self.tally = block, step, tally

    def filter(self, doc: Document) -> tuple[bool, str | None]:
        kept, reason = get_filter_result(self.block.filter(doc))
        if not kept:
            self.tally.by_step[f"{self.step}: {reason}" if reason else self.step] += 1
        return kept, reason


# ---------------------------------------------------------------- language


class FileLanguages(FT176LID):
    """Language scores of a fastText model file, which each task loads."""

    def __init__(self, languages: list[str], file: str) -> None:
        super().__init__(languages)
        self.file = file
        self._model: Any = None

    @property
    def model(self) -> Any:
        if self._model is None:
            from fasttext.FastText import _FastText

            self._model = _FastText(self.file)
        return self._model


def language_model(languages: list[str], given: str | None) -> str:
    """Return the absolute path of a fastText model that supports `languages`; download it if no file is given.

    Raises:
        DataError: a package is missing, the download failed, the file is missing or invalid, or a language is unknown.
    """
    url = FT176LID.MODEL_URL
    try:
        LanguageFilter(languages)
        file = given or cached_asset_path_or_download(url, namespace="lid", subfolder="ft176", progress=False)
    except ImportError as error:
        packages = ("fasttext-numpy2-wheel", "fasteners", *(() if given else ("aiohttp", "requests")))
        install = install_command(*packages, requirements="requirements-prep.txt")
        message = f"--languages needs packages that are not installed ({error}). Install them with {install}"
        raise DataError(message, code="package_missing", key="--languages") from error
    except Exception as error:  # fsspec raises many types
        raise DataError(
            f"--languages: cannot download {url} ({error}). Download it on a machine with internet access and pass it "
            "as --language_model FILE",
            code="download_failed",
            key="--language_model",
        ) from error
    try:
        model = FileLanguages([], str(file)).model
    except ValueError as error:
        raise DataError(
            f"--language_model {file} is missing or not a fastText model: {error}; you can download {url}",
            code="not_a_language_model",
            key="--language_model",
        ) from error
    known = {label.removeprefix(LABEL) for label in model.get_labels() if label.startswith(LABEL)}
    if unknown := [language for language in languages if language not in known]:
        some = ", ".join(sorted(known)[:200])
        raise DataError(
            f"--languages {' '.join(unknown)}: {file} does not support them; it supports {some or 'no language'}",
            code="unknown_language",
            key="--languages",
        )
    return str(Path(file).absolute())


# ---------------------------------------------------------------- quality


def quality_filter(name: str, language: str) -> BaseFilter:
    if name == "gopher_quality" and language not in ENGLISH:
        return GopherQualityFilter(language=language, min_stop_words=None)
    return QUALITY_FILTERS[name](language=language)


def check_splitter(language: str) -> None:
    """Check that texts in `language` can be split into words and sentences.

    Without this check, a missing package would fail in the tasks, where datatrove loads it on first use.

    Raises:
        DataError: a package or its data are missing, or the language is unknown.
    """
    try:
        splitter = load_word_tokenizer(language)
        splitter.word_tokenize("One sentence.")
        splitter.span_tokenize("One sentence.")
    except (ImportError, ValueError, LookupError, OSError) as error:
        raise DataError(
            f"--quality_language {language} cannot be used: {str(error).rstrip('.')}. For en, de, fr and most other "
            f"European languages, install spacy with {install_command('spacy', requirements='requirements-prep.txt')}; "
            "datatrove's tokenizer_assignment.csv lists what each language needs",
            code="no_word_splitter",
            key="--quality_language",
        ) from error
