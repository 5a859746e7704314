"""train/export.py: which checkpoint it takes, what is in the folder, and that the folder is whole or as it was."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MistralForCausalLM

from fp8_inference_demo.engine import Engine
from model import serving
from model.build import build_model
from model.config import load_config, load_sizes, rope_parameters
from model.fp8.precision import Precision, PrecisionError
from model.fp8.recipes import PrecisionConfig
from model.hf_folder import check_init_from, read_hf_folder
from model.te_reference.quantize import Quantized
from tests.conftest import numbers, random_ids, refused
from tests.published import small_model
from tests.train.runs import curve, run
from train import export
from train.checkpoint.files import (
    MANIFEST,
    RUN_STATE,
    CheckpointError,
    RunState,
    checkpoint_name,
    committed,
    describe_file,
    trained_tokenizer,
    write_manifest,
)
from train.data.format import DataError
from train.evaluation.models import plan_model
from train.files import sha256_file
from train.record.provenance import read_starts
from train.record.run_folder import RunFolder

STEP_6 = "checkpoints/step-00000006"


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("run", 6),
        ("run/checkpoints", 6),
        ("run/checkpoints/step-00000003", 3),
        ("run/checkpoints/step-00000007", None),
        ("run/checkpoints/step-00000008", None),
        ("run/checkpoints/step-00000011", None),
        ("run/step-00000003", None),
        ("", None),
    ],
)
def test_select_checkpoint(tmp_path: Path, given: str, taken: int | None) -> None:
    """Of the checkpoints of steps 3 to 8 of a run. Step 8 is not committed, and step 7 is damaged."""
    root = tmp_path / "run/checkpoints"
    for step in range(3, 9):
        (root / checkpoint_name(step)).mkdir(parents=True)
        (root / checkpoint_name(step) / RUN_STATE).write_text("{}")
        write_manifest(
            root / checkpoint_name(step), [describe_file(root / checkpoint_name(step) / RUN_STATE)]
        )
    (root / checkpoint_name(8) / MANIFEST).unlink()
    (root / checkpoint_name(7) / RUN_STATE).write_text("{ ")
    if taken:
        assert export.select_checkpoint(tmp_path / given) == root / checkpoint_name(taken)
        return
    with refused(CheckpointError, code="no_checkpoint", key=str(tmp_path / given)):
        export.select_checkpoint(tmp_path / given)


def test_export_files(trained: Path, data: Path, tmp_path: Path) -> None:
    """Weights in the dtype of training, each once; of the tokenizer's folder, which may be a model's, the tokenizer."""
    model = shutil.copytree(data / "tokenizer", tmp_path / "model")
    for name in ("model.safetensors", "exported_from.json", "README.md", "onnx"):
        (model / name).write_text("theirs")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    export.export(trained / STEP_6, tmp_path / "out", model)
    names = {path.name for path in (trained / "hf").iterdir()}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names | {"chat_template.jinja"}
    assert not any(path.read_bytes() == b"theirs" for path in (tmp_path / "out").iterdir())
    weights = load_file(tmp_path / "out/model.safetensors")
    with torch.device("meta"):
        expected = MistralForCausalLM(load_config(str(tmp_path / "out"))).state_dict()
    assert weights.keys() == expected.keys()
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"


def test_repeated_export_keeps_other_files(
    trained: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards and a tokenizer of an earlier export would be loaded with the new ones."""
    out, tokenizer = tmp_path / "out", data / "tokenizer"
    export.export(trained / STEP_6, out, tokenizer)
    written = {file.name for file in out.iterdir()}
    earlier = ["model.safetensors.index.json", "model-00001-of-00002.safetensors", "added_tokens.json"]
    kept = {"LICENSE", "README.md", "model.gguf", "chat_template.jinja", ".git/HEAD", "onnx/a.onnx"}
    for name in (*earlier, *kept):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text(f"the former {name}")
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}

    def fails(self: Path, to: Path) -> Path:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(self))

    with monkeypatch.context() as busy, pytest.raises(OSError) as error:  # as a mount point
        busy.setattr(Path, "rename", fails)
        export.export(trained / STEP_6, out, tokenizer)
    assert error.value.errno == errno.EBUSY
    assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    export.export(trained / STEP_6, out, tokenizer)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    left = {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()}
    assert left == written | kept
    assert {name for name in left if (out / name).read_bytes() == f"the former {name}".encode()} == kept


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), 1),
        (SafetensorError("I/O error: No space left on device (os error 28)"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_incomplete_export_is_removed(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int
) -> None:
    """A full disk needs the room; and the export that was there before stays."""

    def write_model(path: Path, out: Path, *_: object) -> list[str]:
        out.mkdir()
        (out / "model.safetensors").write_text("a part")
        raise error

    monkeypatch.setattr(export, "_write_model", write_model)
    monkeypatch.setattr(export, "select_checkpoint", lambda given: given)
    state = RunState(0, 0, 0, 1, 0, {"data": {"sources": {}}}, {})
    monkeypatch.setattr(export, "read_state", lambda path: state)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/exported_from.json").write_text("before")
    words = [str(tmp_path), str(tmp_path / "out"), "--tokenizer", str(data / "tokenizer")]
    assert export.main(words) == status
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out/exported_from.json").read_text() == "before"


@pytest.mark.process
def test_export_to_a_file_system_that_refuses_chmod(
    trained: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(path: Any, *_: Any, **__: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))

    monkeypatch.setattr(os, "chmod", refuses)
    out = tmp_path / "out"
    for _ in range(2):
        export.export(trained / STEP_6, out, data / "tokenizer")
        assert {path.name for path in out.iterdir()} == {path.name for path in (trained / "hf").iterdir()}
        (out / "README.md").write_text("of the user")
    for path in (data / "tokenizer").iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes()


def test_foreign_folder_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "there").mkdir()
    (tmp_path / "there/exported_from.json").touch()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    before = sorted(tmp_path.rglob("*"))
    for name in ("run", "link"):
        with refused(CheckpointError, code="not_exportable", key=str(tmp_path / name)):
            export.export(tmp_path, tmp_path / name, tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_export_has_bos_and_eos_of_the_tokenizer(trained: Path, data: Path, tmp_path: Path) -> None:
    """A configuration may be written for another one: a text would not end at its EOS."""
    path, out = tmp_path / "run" / STEP_6, tmp_path / "out"
    shutil.copytree(trained / STEP_6, path)
    state = json.loads((path / RUN_STATE).read_text())

    def exported(bos: int, eos: int | list[int]) -> set[tuple]:
        state["model_config"] |= {"bos_token_id": bos, "eos_token_id": eos}
        (path / RUN_STATE).write_text(json.dumps(state))
        export.export(path, out, data / "tokenizer")
        files = [json.loads((out / f"{name}config.json").read_text()) for name in ("", "generation_")]
        return {(file["bos_token_id"], str(file["eos_token_id"])) for file in files}

    assert exported(1, [7, 2]) == {(1, "[7, 2]")} and exported(5, 7) == {(1, "2")}
    for source in state["data_fingerprint"]["sources"].values():  # the given one is not that of training
        source["tokenizer_sha256"] = "another"
    assert exported(5, 7) == {(5, "7")}


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("name", "rope_scaling"),
    [
        ("Llama-3.2-1B", None),
        pytest.param("Llama-3.2-1B", YARN, marks=pytest.mark.slow),
        ("Qwen3-0.6B", None),
    ],
)
def test_a_published_model_is_trained_exported_decoded_and_trained_on(
    settings: dict, data: Path, tmp_path: Path, name: str, rope_scaling: dict | None
) -> None:
    """The export records the sequence length of the training, because the model has more positions."""
    values = small_model(name) | {"rope_scaling": rope_scaling}
    (tmp_path / "config.json").write_text(json.dumps(values))
    hf = run(settings, model={"config": str(tmp_path)}, max_steps=2) / "hf"
    theirs = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32)
    assert (theirs.config.trained_sequence_length, theirs.config.max_position_embeddings) == (64, 512)
    assert load_sizes(str(hf)).trained_sequence_length == 64 == plan_model(hf, None).max_seq_length
    assert [type(theirs).__name__] == values["architectures"]
    card = (hf / "README.md").read_text()
    assert f"- {values['model_type']}" in card and "| sequence length | 64 |" in card
    assert rope_parameters(theirs.config) == rope_parameters(load_config(str(tmp_path)))
    written = json.loads(
        (hf / "config.json").read_text()
    )  # transformers 4 and converters to GGUF read these keys
    assert written["rope_theta"] == values["rope_theta"]
    assert written.get("rope_scaling") == values["rope_scaling"]
    ids = random_ids(theirs.config, 1, 96)
    precision = Precision(PrecisionConfig(compute="fp32", backend="reference"))
    ours = build_model(load_config(str(hf)), "te_layer", precision, init_from=str(hf))
    with torch.no_grad():
        logits = theirs(ids).logits
        torch.testing.assert_close(ours(ids).logits, logits, rtol=1e-4, atol=1e-5)
        engine = Engine.load(hf, "fp32", max_length=100)
        torch.testing.assert_close(
            engine.forward.logits(engine.forward.prefill(ids)[0]), logits[0], rtol=1e-4, atol=1e-5
        )
    model = {"config": str(hf), "init_from": str(hf), "variant": "hf"}
    again = run(
        settings, model=model, precision={"compute": "bf16"}, output_dir=str(tmp_path / "again"), max_steps=2
    )
    for trained_run in (hf.parent, again):  # with the codes of training, and with a scale per row
        out = trained_run / "fp8"
        export.export(committed(trained_run / "checkpoints")[-1], out, data / "tokenizer", "hf-fp8")
        assert json.loads((out / "config.json").read_text())["architectures"] == values["architectures"]
        assert Engine.load(out, "bf16", max_length=100).forward.prefill(ids).isfinite().all()


def test_trained_tokenizer_is_found_by_its_hash(tmp_path: Path, data: Path, shards: Path) -> None:
    """The data may have been made anew or removed since; then the export may have the tokenizer."""
    path = tmp_path / "run/checkpoints/step-00000001"
    hf = shutil.copytree(data / "tokenizer", tmp_path / "run/hf")
    source = {"tokenizer_sha256": sha256_file(data / "tokenizer/tokenizer.model")}
    state = RunState(0, 0, 0, 1, 0, {}, {}, data_fingerprint={"sources": {"text": source}})

    def found(*folders: Path) -> Path:
        state.train_config["data"] = {"sources": {str(i): str(folder) for i, folder in enumerate(folders)}}
        return trained_tokenizer(path, state)

    assert found(data) == found(shards, data) == data / "tokenizer"
    assert found(shards) == found(tmp_path / "gone") == hf
    source["tokenizer_sha256"] = "1234"
    with refused(DataError, code="no_tokenizer", key=str(data / "tokenizer")):
        found(data)


def test_inconsistent_tokenizer_raises(trained: Path, data: Path, tmp_path: Path) -> None:
    """Its tokenizer.json has another EOS than tokenizer.model."""
    folder = shutil.copytree(data / "tokenizer", tmp_path / "tokenizer")
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"eos_token": "</s>"', '"eos_token": "<unk>"'))
    with refused(DataError, code="tokenizer_ids_differ", key=str(folder)):
        export.export(trained / STEP_6, tmp_path / "out", folder)
    # the tokenizer that transformers converts from tokenizer.model adds no space before a text
    (folder / "tokenizer.json").unlink(), config.unlink()
    with refused(DataError, code="tokenizer_ids_differ", key=str(folder)):
        export.export(trained / STEP_6, tmp_path / "out", folder)
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------- exports that fail at the end of a run


def ended(output_dir: Path) -> list[dict[str, Any]]:
    return [start["ended"] for start in read_starts(RunFolder(output_dir))]


def test_failed_export_is_repeated(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not "done", which nobody would look into; and not only "failed", as if there were nothing to export."""
    output_dir, fault = Path(settings["output_dir"]), OSError(errno.EIO, "Input/output error", "hf.partial")
    with monkeypatch.context() as broken:
        broken.setattr(export, "_write_model", lambda *_: (_ for _ in ()).throw(fault))
        with pytest.raises(OSError):
            run(settings, resume_from_checkpoint="never")
    (first,) = ended(output_dir)
    assert (first["how"], first["step"]) == ("export failed", 6)
    assert first["why"] == "OSError: [Errno 5] Input/output error: 'hf.partial'"

    before = curve(output_dir)
    run(settings)
    assert json.loads((output_dir / "hf/exported_from.json").read_text())["checkpoint"] == "step-00000006"
    assert [each["how"] for each in ended(output_dir)] == ["export failed", "done"]
    assert curve(output_dir) == before


# ---------------------------------------------------------------- --format hf-fp8


def export_fp8(settings: dict, checkpoint: Path, out: Path) -> list[str]:
    return export.export(checkpoint, out, Path(settings["data"]["sources"]["text"]) / "tokenizer", "hf-fp8")


def weights_of(folder: Path) -> dict[str, Any]:
    return read_hf_folder(folder, load_config(str(folder)), torch.float32)


def upside_down(weights: dict[str, Any]) -> dict[str, Any]:
    """The rows of each FP8 matrix in reverse order, without their scales."""
    return {
        name: Quantized(w.codes.view(torch.uint8).flip(0).view(w.codes.dtype), w.scale)
        if isinstance(w, Quantized)
        else w
        for name, w in weights.items()
    }


def layers_of(folder: Path) -> dict[str, Quantized]:
    return {name: w for name, w in weights_of(folder).items() if isinstance(w, Quantized)}


def logits(folder: Path, dequantized: bool) -> torch.Tensor:
    """Of the folder's model in float32, its FP8 weights multiplied out."""
    weights = weights_of(folder)
    model = MistralForCausalLM(load_config(str(folder)))
    plain = {n: w.dequantize(torch.float32) if isinstance(w, Quantized) else w for n, w in weights.items()}
    assert dequantized == any(isinstance(w, Quantized) for w in weights.values())
    model.load_state_dict(plain)
    return model(input_ids=random_ids(model.config, 1, 48)).logits.detach()


def test_export_with_delayed_scaling(settings: dict, tmp_path: Path) -> None:
    output_dir = run(settings, precision={"recipe": "delayed", "bf16_modules": ["lm_head", "*.0.*mlp"]})
    checkpoint, out = output_dir / "checkpoints/step-00000006", tmp_path / "fp8"
    remarks = export_fp8(settings, checkpoint, out)
    sizes = [128 * 128 + 2 * 64 * 128 + 128 * 128] * 2 + [3 * 128 * 256]
    assert numbers(remarks[0])[0] == 11 and f" {sum(sizes):,} " in remarks[0]
    assert any("compressed-tensors" in remark for remark in remarks), "what transformers needs"
    written, whole = weights_of(out), weights_of(output_dir / "hf")
    assert written.keys() == whole.keys() and len(layers_of(out)) == 11
    for name, weight in written.items():
        if not isinstance(weight, Quantized):
            assert torch.equal(weight, whole[name]) and weight.dtype == torch.bfloat16
    # the rest of the folder is that of hf/
    ours, theirs = ({path.name: path for path in folder.iterdir()} for folder in (out, output_dir / "hf"))
    assert ours.keys() == theirs.keys()
    modes = {path.stat().st_mode & 0o777 for path in (*ours.values(), *theirs.values())}
    tmp_path.joinpath("a file").touch()
    assert modes == {tmp_path.joinpath("a file").stat().st_mode & 0o777}, "others may read it, as any file"
    assert "| quantization |" in ours["README.md"].read_text()
    for name in ours.keys() - {"config.json", "model.safetensors", "README.md"}:
        assert ours[name].read_bytes() == theirs[name].read_bytes()
    config, plain = (json.loads(files["config.json"].read_text()) for files in (ours, theirs))
    quantization = config.pop("quantization_config")
    assert config == plain and config["sliding_window"] is None and config["dtype"] == "bfloat16"
    assert quantization == {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "type": "float",
                    "num_bits": 8,
                    "symmetric": True,
                    "strategy": "channel",
                    "dynamic": False,
                },
                "input_activations": {
                    "type": "float",
                    "num_bits": 8,
                    "symmetric": True,
                    "strategy": "token",
                    "dynamic": True,
                },
            }
        },
        "ignore": [*(f"model.layers.0.mlp.{n}_proj" for n in ("gate", "up", "down")), "lm_head"],
    }
    reference = logits(output_dir / "hf", dequantized=False)
    error = (logits(out, dequantized=True) - reference).norm() / reference.norm()
    assert 1e-3 < error < 0.05, "that of rounding to FP8"

    with pytest.raises(ValueError):
        check_init_from(str(out), load_config(str(out)))
    assert not hasattr(load_config(str(out)), "quantization_config"), "a run that takes it is another model"

    # again, over the old one; and where other codes are written, nothing is left
    with pytest.MonkeyPatch.context() as patch:
        flat = serving.to_stored_tensors
        patch.setattr(serving, "to_stored_tensors", lambda weights: flat(upside_down(weights)))
        with pytest.raises(AssertionError):
            export_fp8(settings, checkpoint, tmp_path / "other")
        assert not (tmp_path / "other").exists()
    assert export_fp8(settings, checkpoint, out) == remarks
    with pytest.MonkeyPatch.context() as patch:  # as if precision.on_trouble had taken a module up
        name = "model.layers.1.self_attention.proj"
        patch.setattr(export.RunState, "fallbacks", {name: "current"})
        assert "delayed and current" in export_fp8(settings, checkpoint, out)[0]


@pytest.mark.slow
def test_export_with_block_scaling(settings: dict, tmp_path: Path, small_model: Path) -> None:
    """Sizes that blocks do not divide are refused; those that they do have the format of blocks."""
    settings |= {"max_steps": 2, "precision": {"recipe": "block"}}
    out = tmp_path / "fp8"
    with refused(PrecisionError, code="block_dimensions"):
        export_fp8(settings, run(settings) / "checkpoints/step-00000002", out)
    assert not out.exists()
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(small_model.read_text()) | {"num_key_value_heads": 4}))
    output_dir = run(settings, model={"config": str(config)}, output_dir=str(tmp_path / "even"))
    remarks = export_fp8(settings, output_dir / "checkpoints/step-00000002", out)
    assert numbers(remarks[0])[0] == 14
    quantization = json.loads((out / "config.json").read_text())["quantization_config"]
    assert quantization == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }
    down = layers_of(out)["model.layers.0.mlp.down_proj.weight"]
    assert down.scale.shape == (1, 2) and (down.scale.frexp().mantissa == 0.5).all(), "powers of two"


@pytest.mark.parametrize(
    ("model", "precision", "count"),
    [
        ({"variant": "te_layer"}, {"compute": "fp32"}, 14),
        pytest.param(
            {"variant": "torchao"},
            {"recipe": "rowwise", "bf16_modules": ["lm_head", "*.k_proj"]},
            12,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_fp8_export_with_a_scale_for_each_row(
    settings: dict, tmp_path: Path, model: dict, precision: dict, count: int
) -> None:
    settings["model"] |= model
    output_dir = run(settings, max_steps=2, precision=precision)
    export_fp8(settings, output_dir / "checkpoints/step-00000002", tmp_path / "fp8")
    written, whole = weights_of(tmp_path / "fp8"), weights_of(output_dir / "hf")
    assert len(layers_of(tmp_path / "fp8")) == count
    for name, weight in written.items():
        if isinstance(weight, Quantized):
            exact = whole[name].float()
            torch.testing.assert_close(weight.dequantize(torch.float32), exact, rtol=0.07, atol=1e-4)
            largest = exact.abs().amax(dim=1, keepdim=True)
            torch.testing.assert_close(weight.scale, largest / 448, rtol=1e-6, atol=0)
        else:
            assert torch.equal(weight, whole[name].bfloat16()) and weight.dtype == torch.bfloat16
    assert json.loads((tmp_path / "fp8/config.json").read_text())["dtype"] == "bfloat16"
