"""What train/export.py writes, in the hands of others: transformers loads it, its server answers the OpenAI client,
lm_eval evaluates it. With their packages, in an environment made for it over this one."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from model.config import load_config
from model.hf_folder import read_hf_folder
from model.te_reference.quantize import Quantized
from test_fp8.check_exports import BENCHMARK as EXPORTS
from tests.conftest import random_ids
from tests.test_fp8.running import install_stand_in, report_of
from tests.train.runs import ROOT, run
from train.export import export

pytestmark = [pytest.mark.downstream, pytest.mark.interpreter]

NO_REGISTRY = re.compile(
    r"from versions: none|ConnectionError|ConnectTimeout|name resolution|Max retries|unreachable", re.I
)
# Nobody's chat, but one that shows whether it was used.
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
PROMPT = "def main("


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with python and the commands of an environment that has requirements-serving.txt over this one."""
    environment = tmp_path_factory.mktemp("tools")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "below.pth").write_text(sysconfig.get_path("purelib"))
    python = environment / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--retries", "1"]
    done = subprocess.run(
        [*command, "-r", str(ROOT / "requirements-serving.txt")], capture_output=True, text=True
    )
    if done.returncode and NO_REGISTRY.search(done.stderr):
        pytest.skip(f"needs a package registry: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return python.parent


@pytest.fixture(scope="module")
def folders(
    data: Path,
    small_model: Path,
    only_process_group: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Path]:
    """Of a model trained with delayed scaling hf and rows, of one with block scaling blocks: exported folders."""
    root = tmp_path_factory.mktemp("downstream")
    tokenizer = shutil.copytree(data / "tokenizer", root / "tokenizer")
    (tokenizer / "chat_template.jinja").write_text(TEMPLATE)
    out = {name: root / name for name in ("hf", "rows", "blocks")}
    for recipe, heads in ("delayed", 2), ("block", 4):
        config = root / f"{recipe}.json"
        config.write_text(json.dumps(json.loads(small_model.read_text()) | {"num_key_value_heads": heads}))
        settings = {
            "model": {"config": str(config)},
            "data": {"sources": {"text": str(data)}},
            "precision": {"recipe": recipe},
            "output_dir": str(root / recipe),
            "max_steps": 60,
            "max_seq_length": 64,
            "per_device_train_batch_size": 4,
            "learning_rate": 5e-3,
            "warmup_steps": 2,
            "report_to": "tensorboard",
        }
        with pytest.MonkeyPatch.context() as patch:
            for key, value in only_process_group.items():
                patch.setenv(key, value)
            run(settings)
        checkpoint = root / recipe / "checkpoints/step-00000060"
        if recipe == "delayed":
            export(checkpoint, out["hf"], tokenizer)
        export(checkpoint, out["rows" if recipe == "delayed" else "blocks"], tokenizer, "hf-fp8")
    return out


def offline(**more: str) -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1", **more}


def in_tools(tools: Path, script: str, *arguments: object) -> str:
    """What a script in that environment prints."""
    command = [str(tools / "python"), "-c", textwrap.dedent(script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=offline())
    assert done.returncode == 0, done.stderr
    return done.stdout


LOAD = """
    import sys, torch
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig
    from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer
    rows, blocks, ids, out = sys.argv[1:]
    dequantized = CompressedTensorsConfig(dequantize=True)
    loads = {
        "rows, dequantized": (rows, dict(dtype=torch.float32, quantization_config=dequantized)),
        "rows": (rows, dict(dtype=torch.float32)),
        "rows, bf16": (rows, dict(dtype=torch.bfloat16)),
        "blocks": (blocks, dict(dtype=torch.bfloat16)),
    }
    logits = {}
    for name, (folder, options) in loads.items():
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
        with torch.no_grad():
            logits[name] = model(input_ids=torch.load(ids)).logits.float()
    # what runs on a GPU, with torch's FP8 product for CPUs: only that there is a GPU is made up
    looks = CompressedTensorsHfQuantizer.validate_environment
    CompressedTensorsHfQuantizer.validate_environment = lambda self, *a, **k: (
        looks(self, *a, **k), setattr(self, "use_fp8_kernel", True)
    )
    kernels = CompressedTensorsConfig(use_optimized_inference=True)
    model = AutoModelForCausalLM.from_pretrained(rows, dtype=torch.bfloat16, quantization_config=kernels)
    with torch.no_grad():
        logits["rows, FP8 products"] = model(input_ids=torch.load(ids)).logits.float()
    held = {n: p for n, p in model.named_parameters() if p.dtype == torch.float8_e4m3fn or "scale" in n}
    torch.save((logits, held), out)
"""


def whole(folder: Path, out: Path, dtype: torch.dtype) -> Path:
    """A folder like `folder`, its FP8 weights multiplied out to `dtype`."""
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text())
    del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config))
    weights = read_hf_folder(folder, load_config(str(folder)), dtype)
    assert sum(isinstance(weight, Quantized) for weight in weights.values()) == 14
    plain = {n: w.dequantize(dtype) if isinstance(w, Quantized) else w for n, w in weights.items()}
    save_file(plain, out / "model.safetensors", {"format": "pt"})
    return out


def test_transformers_loads_exports(tools: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    """With the codes and scales that read_hf_folder gives; activations quantized where transformers does so."""
    ids = random_ids(load_config(str(folders["hf"])), 2, 48)
    torch.save(ids, tmp_path / "ids.pt")
    in_tools(tools, LOAD, folders["rows"], folders["blocks"], tmp_path / "ids.pt", tmp_path / "logits.pt")
    theirs, held = torch.load(tmp_path / "logits.pt", weights_only=False)

    def logits(folder: Path, dtype: torch.dtype) -> torch.Tensor:
        with torch.no_grad():
            return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)(input_ids=ids).logits.float()

    def error(given: torch.Tensor, reference: torch.Tensor) -> float:
        value = float((given - reference).norm() / reference.norm())
        print(f"relative error {value:.1e}")
        return value

    rows = logits(whole(folders["rows"], tmp_path / "rows", torch.float32), torch.float32)
    assert error(logits(folders["hf"], torch.float32), rows) > 1e-3, "FP8 weights differ from bf16's"
    assert error(theirs["rows, dequantized"], rows) < 1e-6
    assert 1e-4 < error(theirs["rows"], rows) < 2e-2, "FP8 activations"
    assert error(theirs["rows, bf16"], rows) < 2e-2, "and transformers rounds scales to bf16"
    assert error(theirs["rows, FP8 products"], rows) < 2e-2, "activations and logits in bf16"
    weights = read_hf_folder(folders["rows"], load_config(str(folders["rows"])), torch.float32)
    read = {n: w for n, w in weights.items() if isinstance(w, Quantized)}
    assert held.keys() == {name + part for name in read for part in ("", "_scale")}
    for name, weight in read.items():
        assert torch.equal(held[name].view(torch.uint8), weight.codes.view(torch.uint8)), name
        assert torch.equal(held[f"{name}_scale"], weight.scale.t()), name
    blocks = logits(whole(folders["blocks"], tmp_path / "blocks", torch.bfloat16), torch.bfloat16)
    assert error(theirs["blocks"], blocks) < 1e-6


CLIENT = """
    import json, sys
    from openai import OpenAI
    url, model, prompt = sys.argv[1:]
    client = OpenAI(base_url=url, api_key="none", timeout=100)
    options = dict(model=model, max_tokens=12, temperature=0)
    whole = client.completions.create(prompt=prompt, **options)
    parts = list(client.completions.create(prompt=prompt, stream=True, **options))
    message = [{"role": "user", "content": prompt}]
    chat = client.chat.completions.create(messages=message, **options)
    chunks = list(client.chat.completions.create(messages=message, stream=True, **options))
    print(json.dumps({
        "tokens": whole.usage.completion_tokens,
        "finish": whole.choices[0].finish_reason,
        "whole": whole.choices[0].text,
        "stream": "".join(part.choices[0].text for part in parts if part.choices),
        "parts": len(parts),
        "chat": chat.choices[0].message.content,
        "chat stream": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
    }))
"""


@contextmanager
def served(tools: Path, folder: Path, log: Path, *options: str) -> Iterator[str]:
    """The address of `transformers serve` with `folder`, while it runs."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [str(tools / "python"), "-m", "transformers.cli.transformers", "serve", str(folder)]
    command += ["--continuous-batching", "--port", str(port), *options]
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, env=offline())
        try:
            deadline = time.monotonic() + 120
            while True:
                assert server.poll() is None and time.monotonic() < deadline, log.read_text()
                try:
                    urllib.request.urlopen(f"http://localhost:{port}/health", timeout=5).close()
                    break
                except (urllib.error.URLError, OSError):
                    time.sleep(0.2)
            yield f"http://localhost:{port}/v1"
        finally:
            server.terminate()
            server.wait(60)


@pytest.mark.parametrize("name", ["hf", "rows", "blocks"])
def test_transformers_serve_answers_the_openai_client(
    tools: Path, folders: dict[str, Path], tmp_path: Path, name: str
) -> None:
    folder = folders[name]
    options = ["--dtype", "float32"] if name == "hf" else []
    with served(tools, folder, tmp_path / "log", *options) as url:
        answer: dict[str, Any] = json.loads(in_tools(tools, CLIENT, url, folder, PROMPT))
    assert answer["whole"] == answer["stream"] and answer["parts"] > 2
    assert answer["tokens"] == 12 and answer["finish"] == "length"
    assert answer["chat"] == answer["chat stream"] != ""
    if name == "hf":
        tokenizer = AutoTokenizer.from_pretrained(folder)
        inputs = tokenizer(PROMPT, return_tensors="pt")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        greedy = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs.input_ids.shape[1] :]
        assert answer["whole"] == tokenizer.decode(greedy, skip_special_tokens=True)


# In bf16. It ignores the sliding window of models with FP8 weights.
VLLM = """
from types import SimpleNamespace
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

class SamplingParams:
    def __init__(self, **options):
        self.tokens = options["max_tokens"]

class LLM:
    def __init__(self, model, **options):
        config = AutoConfig.from_pretrained(model)
        if hasattr(config, "quantization_config"):
            config.sliding_window = None
            config.quantization_config["dequantize"] = True
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_pretrained(model, config=config, dtype=torch.bfloat16)

    def generate(self, texts, params, use_tqdm):
        for text in texts:
            ids = self.tokenizer(text).input_ids
            inputs = torch.tensor([ids])
            with torch.no_grad():
                sequence = self.model.generate(
                    inputs, do_sample=False, max_new_tokens=params.tokens, eos_token_id=None
                )
                logprobs = self.model(sequence).logits[0].float().log_softmax(-1)
            found = [
                {token: SimpleNamespace(logprob=float(row[token]))}
                for token, row in zip(sequence[0, 1:].tolist(), logprobs)
            ]
            answer = SimpleNamespace(token_ids=sequence[0, len(ids):].tolist(), logprobs=found[len(ids) - 1:])
            yield SimpleNamespace(
                prompt_token_ids=ids, prompt_logprobs=[None, *found[: len(ids) - 1]], outputs=[answer]
            )
"""


def test_check_of_exports_finds_a_wrong_reader(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site,) = tools.parent.glob("lib/python*/site-packages")
    stand_in = install_stand_in(tmp_path / "site", VLLM)
    monkeypatch.setenv("VLLM_PYTHONPATH", os.pathsep.join(map(str, (stand_in, site))))
    report = report_of(EXPORTS, tmp_path, "--recipes", "block", status=1)
    right, wrong = report["results"]
    assert (right["format"], wrong["format"]) == ("hf", "hf-fp8")
    assert wrong["problems"] and not right["problems"]
    assert right["vllm"] < 0.01 < wrong["vllm"]
    assert report["readers"]["vllm"] == "1.2"


TASK = """
    task: held_out
    dataset_path: json
    dataset_kwargs: {{data_files: {{test: {texts}}}}}
    test_split: test
    output_type: loglikelihood_rolling
    doc_to_text: ""
    doc_to_target: "{{{{text}}}}"
    metric_list: [{{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}}]
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the task held_out and its texts."""
    folder = tmp_path_factory.mktemp("task")
    source = Path(textwrap.__file__).read_text()
    texts = [source[begin : begin + 300] for begin in range(0, 1500, 300)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "held_out.yaml").write_text(textwrap.dedent(TASK.format(texts=folder / "texts.jsonl")))
    return folder


@pytest.fixture(scope="module")
def bits(folders: dict[str, Path], task: Path) -> float:
    """The right result of the task, in bits per byte, of the model hf in float32."""
    texts = [json.loads(line)["text"] for line in (task / "texts.jsonl").read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(folders["hf"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folders["hf"])
    nats = 0.0
    for text in texts:
        ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False).input_ids]])
        with torch.no_grad():
            likelihoods = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        nats -= float(likelihoods.gather(1, ids[0, 1:, None]).sum())
    return nats / math.log(2) / sum(len(text.encode()) for text in texts)


def test_lm_eval_scores(
    tools: Path, folders: dict[str, Path], task: Path, bits: float, tmp_path: Path
) -> None:
    def measured(name: str) -> float:
        out = tmp_path / name
        model = f"pretrained={folders[name]},add_bos_token=False,dtype=float32"
        command = [str(tools / "lm_eval"), "--model", "hf", "--model_args", model, "--tasks", "held_out"]
        command += ["--include_path", str(task), "--device", "cpu", "--output_path", str(out)]
        environment = offline(HF_HOME=str(tmp_path / "cache"))
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        (results,) = out.rglob("results_*.json")
        return json.loads(results.read_text())["results"]["held_out"]["bits_per_byte,none"]

    assert measured("hf") == pytest.approx(bits, rel=1e-4)
    assert measured("rows") == pytest.approx(bits, rel=2e-2)


@pytest.mark.parametrize("has_export", [True, False])
def test_evaluate_runs_tasks(
    tools: Path, folders: dict[str, Path], task: Path, bits: float, tmp_path: Path, has_export: bool
) -> None:
    """The results of the newest checkpoint go to the JSON file, metrics.jsonl and TensorBoard."""
    run_folder = shutil.copytree(folders["hf"].parent / "delayed", tmp_path / "run")
    if not has_export:
        shutil.rmtree(run_folder / "hf")
    lines = (run_folder / "metrics.jsonl").read_text()
    command = [str(tools / "python"), str(ROOT / "train/evaluate.py"), str(run_folder), "--tasks", "held_out"]
    command += ["--task_path", str(task), "--output", str(tmp_path / "result.json")]
    environment = offline(HF_HOME=str(tmp_path / "cache"))
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())["results"]["held_out"]["bits_per_byte,none"]
    assert result == pytest.approx(bits, rel=5e-3)  # in bf16
    before, line = (run_folder / "metrics.jsonl").read_text().removesuffix("\n").rsplit("\n", 1)
    added = json.loads(line)
    assert before + "\n" == lines
    assert added.keys() == {"step", "tokens", "time", "tasks/held_out/bits_per_byte"}
    assert added["step"] == 60 and added["tasks/held_out/bits_per_byte"] == result
    assert list((run_folder / "tensorboard").glob("events*"))
