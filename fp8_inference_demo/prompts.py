"""Complete all prompts in a file (--prompts FILE.jsonl --output FILE.jsonl).

Each input line is a JSON object with the key "prompt". Other keys are copied to the output. Each output line is the
input object plus the key "choices": a list with one {"text", "finish_reason", "tokens"} per sample. The output has the
same order as the input. The whole input is checked before the model is loaded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fp8_inference_demo.completions import Request
from fp8_inference_demo.errors import InferenceError
from fp8_inference_demo.session import Session
from fp8_inference_demo.text import read_text

OUTPUT_KEYS = "choices"


def parse_prompt(line: str, name: str) -> dict[str, Any]:
    """Parse one line of a prompt file. Raises InferenceError if the line is not a JSON object with a "prompt"."""
    try:
        record = json.loads(line)
        # refuse NaN, infinity and lone surrogates, which cannot be written to the output
        json.dumps(record, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        message = f'{name} is not valid JSON: {error}. Expected {{"prompt": "..."}}.'
        raise InferenceError(message, code="not_json", key=name) from error
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        message = f'{name} has no key "prompt" with a string. Expected {{"prompt": "..."}}.'
        raise InferenceError(message, code="no_prompt", key=name)
    if OUTPUT_KEYS in record:
        message = f"{name} has the key {OUTPUT_KEYS!r}, which is reserved for the output. Rename the key."
        raise InferenceError(message, code="reserved_field", key=name)
    return record


def complete_file(session: Session, prompts: Path, path: Path) -> None:
    """Complete the prompts in the file `prompts` and write the result to the new file `path`.

    If a batch fails, the file keeps the lines of all earlier batches.

    Raises:
        InferenceError: a prompt is invalid, or `path` exists. Raised before the model is loaded.
        EngineError: the model computed logits that are not finite.
        torch.OutOfMemoryError: the device has too little memory.
    """
    if path.exists():
        message = f"--output {path} already exists. Remove the file, or pass another path."
        raise InferenceError(message, code="exists", key="--output")
    rows: list[tuple[dict[str, Any], Request]] = []
    lines = enumerate(read_text(prompts, f"--prompts {prompts}").split("\n"), 1)
    for index, (number, line) in enumerate((number, line) for number, line in lines if line.strip()):
        name = f"--prompts {prompts}: line {number}"
        record = parse_prompt(line, name)
        ids = session.encode(record["prompt"], name)
        session.check_length(ids, name)
        rows += [(record, request) for request in session.requests(index, ids)]
    if not rows:
        message = f'--prompts {prompts} has no prompts. Expected lines like {{"prompt": "..."}}.'
        raise InferenceError(message, code="no_prompts", key="--prompts")
    session.load(max(len(request.ids) for _, request in rows), len(rows))
    path.parent.mkdir(parents=True, exist_ok=True)
    size, samples = session.engine.batch_size, session.arguments.num_samples
    with (
        open(path, "w", encoding="utf-8") as file,
        tqdm(total=len(rows) // samples, unit="prompt") as progress,
    ):
        for first in range(0, len(rows), size):
            batch = rows[first : first + size]
            completions, _ = session.complete([request for _, request in batch])
            for (record, _), completion in zip(batch, completions, strict=True):
                choices = record.setdefault(OUTPUT_KEYS, [])
                choices.append(
                    {
                        "text": completion.text,
                        "finish_reason": completion.finish_reason,
                        "tokens": completion.tokens,
                    }
                )
                if len(choices) == samples:  # a batch can end between two samples of one prompt
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")
                    progress.update()
            file.flush()
    print(session.timing.line(), file=sys.stderr)
    session.log_operations()
