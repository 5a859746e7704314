#!/usr/bin/env bash
# Build the documentation site in output/site. The build fails if a link is broken.
#
#   scripts/build_docs.sh [PYTHON]
#
# PYTHON is a Python interpreter with the packages in requirements-dev.txt. The default is .venv/bin/python.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"
PY="${1:-.venv/bin/python}"
# MkDocs reads its whole source folder. A copy of the pages excludes large folders such as .venv.
pages="$(mktemp -d)"
trap 'rm -rf "$pages"' EXIT
tar c *.md LICENSE mkdocs.yml docs examples tests/README.md test_fp8/results | tar x -C "$pages"
export NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true
"$PY" -m mkdocs build --strict -f "$pages/mkdocs.yml" -d "$ROOT/output/site"
