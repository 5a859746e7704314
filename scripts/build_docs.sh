#!/usr/bin/env bash
# Build the documentation site in output/site. A broken link is an error.
#
#   scripts/build_docs.sh [PYTHON]      a Python with requirements-dev.txt; default: .venv's
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"
PY="${1:-.venv/bin/python}"
# MkDocs walks its whole source folder: a copy of the pages avoids walking .venv and data.
pages="$(mktemp -d)"
trap 'rm -rf "$pages"' EXIT
tar c README.md LICENSE mkdocs.yml docs tests/README.md test_fp8/results | tar x -C "$pages"
export NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true
"$PY" -m mkdocs build --strict -f "$pages/mkdocs.yml" -d "$ROOT/output/site"
