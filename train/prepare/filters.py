"""Build the document filters of a data preparation, check that they can run offline, and count removed documents."""

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
    """Build the options of the optional preparation steps, and find or download the files that the steps need.

    Args:
        args: the parsed command line of prepare_data.py.

    Raises:
        DataError: if a file is missing, a package is not installed, or the language model cannot be downloaded.
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
    """Return the enabled filters, in the order in which they run.

    Args:
        index: the folder that contains the n-gram index of the evaluation texts.
        tally: the counts to which the filters add their removed documents.
    """
    found: dict[str, Any] = {}
    if options.language_model:
        languages = list(options.languages)
        # LanguageFilter keeps a document if any of these languages scores above the threshold.
        found["language"] = LanguageFilter(languages, options.language_threshold)
        found["language"].model = FileLanguages(languages, options.language_model)
    for name in options.quality:
        found[f"quality {name}"] = quality_filter(name, options.quality_language)
    if options.decontaminate:
        found["evaluation text"] = EvaluationFilter(index, options.decontaminate_ngram)
    return [Counted(block, step, tally) for step, block in found.items()]


class Counted(BaseFilter):
    """Wrapper around a datatrove filter that counts the removed documents by step and reason."""

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
    """Language detector that uses a local fastText model file. Each task loads the model on first use."""

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
    """Return the absolute path of a fastText model that supports `languages`.

    Args:
        given: path of the model file, or None to download lid.176 to datatrove's cache.

    Raises:
        DataError: if a package is not installed, the download failed, the file is missing or invalid, or the model does
            not support a language.
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
            f"--languages: cannot download {url} ({error}). Download this file on a host with internet access, and "
            "pass its path as --language_model",
            code="download_failed",
            key="--language_model",
        ) from error
    try:
        model = FileLanguages([], str(file)).model
    except ValueError as error:
        raise DataError(
            f"--language_model {file} does not exist or is not a fastText model: {error}. Pass another file, such as "
            f"the one at {url}",
            code="not_a_language_model",
            key="--language_model",
        ) from error
    known = {label.removeprefix(LABEL) for label in model.get_labels() if label.startswith(LABEL)}
    if unknown := [language for language in languages if language not in known]:
        some = ", ".join(sorted(known)[:200])
        raise DataError(
            f"--languages {' '.join(unknown)}: {file} does not support these languages. Choose from {some or 'none'}",
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
    """Check that datatrove can split texts in `language` into words and sentences.

    datatrove loads the package for a language on first use. Without this check, a missing package would make every task
    fail.

    Raises:
        DataError: if a package or its data are missing, or the language is unknown.
    """
    try:
        splitter = load_word_tokenizer(language)
        splitter.word_tokenize("One sentence.")
        splitter.span_tokenize("One sentence.")
    except (ImportError, ValueError, LookupError, OSError) as error:
        raise DataError(
            f"--quality_language {language} cannot be used: {str(error).rstrip('.')}. For en, de, fr and most other "
            f"European languages, install spacy with {install_command('spacy', requirements='requirements-prep.txt')}. "
            "For other languages, datatrove's tokenizer_assignment.csv lists the required word tokenizer",
            code="no_word_splitter",
            key="--quality_language",
        ) from error
