"""Select words in held-out text and score models on them for compare_cloze.py."""

from __future__ import annotations

import argparse
import re
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from model.checks.gemm_counts import count_gemms
from model.checks.startup import StartupCheckError
from model.fp8.precision import Precision
from model.fp8.recipes import fp8_multiple
from test_fp8.common.cases import CaseError
from test_fp8.common.report import Outcome, Result
from test_fp8.common.timing import free_memory
from test_fp8.model.cases import SEED
from train.data.encoder import TextEncoder
from train.data.stream import NO_LABEL
from train.evaluation.evaluation import plan_evaluation
from train.evaluation.models import EvaluationError
from train.evaluation.texts import Documents, Row, Rows, make_batches

WORD = re.compile(r" ?\b[^\W\d]\w{3,}")  # with the space before it
MIN_DISTANCE = 100  # between the end of the word before and its next occurrence, in characters


def find_target(ids: np.ndarray, encoder: TextEncoder) -> tuple[int, int] | None:
    """Find the longest word of a passage that occurs earlier, but not shortly before.

    Token edges are compared with word edges in the decoded text of the first tokens of the passage. So a word next to a
    character that consists of several tokens is skipped.

    Returns:
        The positions of the word's first token and of the token after the word, or None if there is no such word.
    """

    def decode(count: int) -> str:
        return encoder.decode([i for i in ids[:count].tolist() if i not in (encoder.bos_id, encoder.eos_id)])

    text, ends, words = decode(len(ids)), dict[str, int](), list[re.Match[str]]()
    for match in WORD.finditer(text):
        word = match[0].strip()
        if match.start() - ends.get(word, match.start()) >= MIN_DISTANCE:
            words.append(match)
        ends[word] = match.end()
    for match in sorted(words, key=lambda match: (len(match[0]), match.start()), reverse=True):
        edges = [
            bisect_left(range(len(ids)), at, key=lambda count: len(decode(count))) for at in match.span()
        ]
        is_complete = edges[1] < len(ids)  # the passage may end inside the word
        if is_complete and [decode(edge) for edge in edges] == [text[:at] for at in match.span()]:
            return edges[0], edges[1]
    return None


def choose_items(documents: Documents, items: int) -> list[Row]:
    """Return up to `items` passages for each source, in which only the target has labels.

    Raises EvaluationError if no passage of a source has a target.
    """
    rows = list[Row]()
    for index, source in enumerate(documents.sources):
        passages = [
            passage
            for ids in documents.documents[index]
            for passage in np.split(ids, range(documents.length, len(ids), documents.length))
        ]
        found = list[Row]()
        for i in np.random.default_rng(SEED).permutation(len(passages)):
            if len(found) < items and (target := find_target(passages[i], source.encoder)):
                found.append(Row(passages[i][: target[1]], index, 0, target[0] - 1))
        if not found:
            raise EvaluationError(
                f"DATA {source.name}: no word occurs again after {MIN_DISTANCE} characters in a passage of "
                f"{documents.length} tokens; pass data with longer documents or a larger --max_seq_length",
                code="no_items",
                key=source.name,
            )
        rows += found
    return rows


@torch.no_grad()
def score(model: nn.Module, precision: Precision, batches: Sequence[Rows]) -> tuple[np.ndarray, list[str]]:
    """Return which items a model predicts correctly, in the order of the batches, and log lines about FP8 GEMMs.

    Raises StartupCheckError if a module did not run in the configured precision.
    """
    correct = []
    with count_gemms(model, precision) as gemms:
        for rows in batches:
            ids, labels, _ = rows.batch.to(precision.device)
            is_right = (model(ids).logits.argmax(-1) == labels) | (labels == NO_LABEL)
            correct.append(is_right.all(1).cpu().numpy())
    if problem := gemms.problem(len(batches), backward=False):
        raise StartupCheckError(problem)
    return np.concatenate(correct), gemms.lines() if precision.fp8 else []


def mean_and_margin(values: np.ndarray) -> tuple[float, float]:
    """Return the mean and half the width of its 95 % confidence interval, in percent."""
    return 100 * float(values.mean()), 100 * 1.96 * float(values.std()) / len(values) ** 0.5


def make_result(name: str, source: str, correct: np.ndarray, base: np.ndarray) -> Result:
    """Return the report entry of a model for the items of a source."""
    accuracy, difference = mean_and_margin(correct), mean_and_margin(correct * 1.0 - base)
    return {
        "row": name,
        "source": source,
        "items": len(correct),
        "accuracy_percent": accuracy[0],
        "accuracy_margin": accuracy[1],
        "difference_points": difference[0],
        "difference_margin": difference[1],
    }


def measure(options: argparse.Namespace) -> Outcome:
    models = dict(options.model)
    baseline = options.baseline or options.model[0][0]
    if len(models) < len(options.model) or baseline not in models:
        names = ", ".join(name for name, _ in options.model)
        raise CaseError(f"--model {names}: the names must be different, and --baseline must be one of them")
    plans = {}
    for name, folder in models.items():
        shape = {"max_seq_length": options.max_seq_length, "batch_size": options.batch_size}
        plans[name] = plan_evaluation(
            argparse.Namespace(model=folder, precision=None, by="document", stride=None, **shape)
        )
        plans[name].check_data(options.data, None)
    documents = Documents(options.max_seq_length, options.batch_size, None)
    for folder in options.data:
        documents.add_prepared(Path(folder).name, folder)
    multiple = max(fp8_multiple(plan.precision.recipe) for plan in plans.values())
    rows = choose_items(documents, options.items)
    batches = list(make_batches(iter(rows), options.batch_size, options.max_seq_length, multiple))
    correct, more = {}, {}
    for name, plan in plans.items():
        model, precision = plan.build()
        correct[name], lines = score(model, precision, batches)
        print("\n".join([f"{name}: {correct[name].mean():.1%} of {len(rows)} items", *lines]), flush=True)
        more[name] = {
            "step": plan.state and plan.state.step,
            "variant": plan.variant,
            "precision": plan.precision.compute,
            "fp8": lines[:1],
        }
        del model, precision
        free_memory()
    places = np.concatenate([batch.sources for batch in batches])
    parts = [(source.name, places == index) for index, source in enumerate(documents.sources)]
    results = [
        make_result(name, source, correct[name][part], correct[baseline][part])
        for source, part in [*parts, ("all", places >= 0)]
        for name in models
    ]
    return Outcome(results, {"models": more, "baseline": baseline})
