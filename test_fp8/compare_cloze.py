#!/usr/bin/env python3
"""Compare how well models predict words in held-out text that need a wide context.

    python test_fp8/compare_cloze.py data/code data/documents --model bf16=output/bf16 --model fp8=output/fp8
        [--baseline bf16] [--items 2000] [--output FILE.json]

DATA are folders written by prepare_data.py. Their eval splits are used. A model is a run folder, a checkpoint or a
Hugging Face folder. As in train/evaluate.py, a checkpoint is evaluated in its training precision.

An item is a passage of a document that ends with a target word, as in LAMBADA (Paperno et al. 2016, arXiv:1606.06031).
The word also occurs earlier in the passage, but not in the last 100 characters before the target. A passage can have
several such words. The longest one is the target, because long words can rarely be guessed from the words just before
them. An item counts as correct if each token of the target is the model's most likely token, given the true tokens
before it.

Documents are cut into passages of --max_seq_length tokens. Each passage gives at most one item. A fixed seed selects
the passages, so all models are compared on the same items. A word consists of at least four letters, digits and
underscores, and does not start with a digit. The target includes the space before the word, if there is one. A word is
skipped if one of its edges is inside a token.

"accuracy" is the share of correct items, and "difference" is the accuracy minus that of the --baseline, in percentage
points. Both have a 95 % confidence interval. The interval of the difference is based on the difference for each item.
It does not contain the noise between two training runs with the same configuration.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from test_fp8.common import report
from test_fp8.common.options import DeviceDefault, option, positive


def named_folder(text: str) -> tuple[str, Path]:
    """Argparse type for NAME=FOLDER."""
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise argparse.ArgumentTypeError(f"{text} is not of the form NAME=FOLDER")
    return name, Path(folder)


OPTIONS = [
    option("data", None, "Folders with prepared data.", nargs="+", metavar="DATA"),
    option(
        "--model",
        None,
        "Name of a model in the report, and its folder. Repeat this option for each model.",
        type=named_folder,
        action="append",
        required=True,
        metavar="NAME=FOLDER",
    ),
    option(
        "--baseline", None, "Name of the model that all others are compared with. Default: the first model."
    ),
    option("--items", 2000, "Maximum number of items for each data folder.", type=positive),
    option("--max_seq_length", 512, "Maximum length of a passage in tokens.", type=positive),
    option("--batch_size", DeviceDefault(32, 4), "Number of passages per batch.", type=positive),
]
COLUMNS: report.Columns = {
    "row": ("row", "<"),
    "source": ("source", "<"),
    "items": ("items", ",d"),
    "accuracy %": ("accuracy_percent", ".2f"),
    "95 %": ("accuracy_margin", "6.2f"),
    "difference": ("difference_points", "+.2f"),
    " 95 %": ("difference_margin", "6.2f"),
}

BENCHMARK = report.Benchmark(__file__, __doc__, OPTIONS, COLUMNS, "test_fp8.model.cloze")

if __name__ == "__main__":
    sys.exit(BENCHMARK.main(sys.argv[1:]))
