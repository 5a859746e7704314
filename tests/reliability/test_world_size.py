"""Tests of runs that resume with a different number of ranks or a different ZeRO stage.

State, samples and losses must stay the same.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.reliability.launching import run_cases, write_small_config
from tests.train.runs import metrics
from train.checkpoint import reshard
from train.checkpoint.files import CheckpointError, committed, problems, read_state

TOKENS = 32  # of a sample
SAVED, STEPS = 4, 6
# The scales of delayed scaling move after each micro-batch, of which a step has fewer on more ranks: 6e-5 measured.
SCALES_MOVE = 3e-4


@pytest.fixture(scope="module")
def base(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return {
        "model": {"config": write_small_config(tmp_path_factory.mktemp("config"), **sizes, **heads)},
        "data": {"sources": {"text": str(data)}},
        "max_seq_length": TOKENS,
        "per_device_train_batch_size": 1,
        "max_eval_samples": 1,
        "logging_steps": 1,
        "lr_scheduler_type": "constant",
        "learning_rate": 3e-3,
    }


class Runs:
    """Group of runs (see world_size_ranks.py) that are executed in the order in which they are added.

    saved: the step after which a checkpoint is saved. steps: the number of steps in each run.
    """

    def __init__(self, folder: Path, base: dict[str, Any], saved: int = SAVED, steps: int = STEPS):
        self.folder, self.base, self.cases = folder, base, dict[str, tuple[int, str, dict]]()
        self.saved, self.steps = saved, steps

    def whole(self, name: str, ranks: int, samples: int, **changes: Any) -> None:
        """Add a run from the first to the last step that saves a checkpoint. Each step uses `samples` samples."""
        tokens = samples * self.base["max_seq_length"]
        changes = {"save_steps": self.saved, "train_batch_size_tokens": tokens, **changes}
        self._add(name, ranks, {"max_steps": self.steps, **changes}, keep_after_step=self.saved)

    def resumed(self, name: str, ranks: int, of: str, **changes: Any) -> None:
        """Add a run that resumes from the checkpoint of the run `of`, with the same configuration."""
        settings = self.cases[of][2]["settings"]
        path = Path(settings["output_dir"]) / f"checkpoints/step-{self.saved:08d}"
        changes = {"resume_from_checkpoint": str(path), "save_strategy": "no", **changes}
        output_dir = str(self.folder / name / "run")
        self._add(name, ranks, {**settings, "output_dir": output_dir, **changes})

    def _add(self, name: str, ranks: int, settings: dict[str, Any], keep_after_step: int = 0) -> None:
        folder = str(self.folder / name)
        settings = {"output_dir": f"{folder}/run", **self.base, **settings}
        arguments = {"folder": folder, "settings": settings, "keep_after_step": keep_after_step}
        self.cases[name] = ranks, "watched_run", arguments

    def start(self) -> Runs:
        run_cases(self.folder / "results", list(self.cases.values()))
        return self

    def state(self, name: str, which: str) -> dict[str, torch.Tensor]:
        return torch.load(self.folder / name / f"{which}.pt", map_location="cpu")

    def computed(self, name: str) -> list[tuple[int, int, str, float]]:
        """Return (step of the process, micro-batch, sample hash, micro-batch loss) for each sample on each rank."""
        files = (self.folder / name).glob("samples_*.json")
        return [tuple(entry) for file in files for entry in json.loads(file.read_text())]

    def samples(self, name: str, steps_before: int) -> dict[int, list[str]]:
        """Return a dictionary from each step after the checkpoint to the samples of all ranks.

        steps_before: the number of steps before the process started.
        """
        found = defaultdict(list)
        for step, _, sample, _ in self.computed(name):
            found[step + steps_before].append(sample)
        return {step: sorted(samples) for step, samples in found.items() if step > self.saved}

    def first_losses(self, name: str, step: int) -> dict[str, float]:
        """Return the loss of each sample in the first micro-batch of a step.

        All ranks compute these losses with the same FP8 scales.
        """
        return {sample: loss for s, index, sample, loss in self.computed(name) if (s, index) == (step, 0)}

    def check_group_timeouts(self, name: str) -> None:
        """Check that no process group times out before the watchdog.

        This includes the process groups of torch and DeepSpeed, and those for votes and saves.
        """
        for file in (self.folder / name).glob("timeouts_*.json"):
            seconds = json.loads(file.read_text())
            assert len(seconds) >= 4 and set(seconds) == {86400.0}

    def losses(self, name: str) -> list[float]:
        """Return the losses of the steps after the checkpoint."""
        return [
            m["loss"] for m in metrics(self.folder / name / "run") if m["step"] > self.saved and "loss" in m
        ]

    def check_state_and_samples(self, whole: str, resumed: str, tolerance: float) -> None:
        """Check that a resumed run has the state and the samples of the run whose checkpoint it loads.

        The losses of the first micro-batches may differ by the relative `tolerance`.
        """
        for which in ("loaded", "again"):
            assert differing(self.state(resumed, which), self.state(whole, "kept")) == [], (resumed, which)
        assert self.samples(resumed, self.saved) == self.samples(whole, 0)
        before, after = self.first_losses(whole, self.saved + 1), self.first_losses(resumed, 1)
        both = before.keys() & after.keys()
        expected = {sample: before[sample] for sample in both}
        assert both and {sample: after[sample] for sample in both} == pytest.approx(expected, rel=tolerance)

    def check(self, whole: str, resumed: str, tolerance: float = 1e-5) -> None:
        """Check that a resumed run matches the run whose checkpoint it loads.

        The state and the samples must be identical, and the losses of the first micro-batches must agree closely. The
        loss of the first step may differ by the relative `tolerance`.
        """
        expected = self.state(whole, "kept")
        assert any("exp_avg_sq" in key for key in expected) and expected["step"].tolist() == [self.saved]
        self.check_state_and_samples(whole, resumed, 1e-5)
        uninterrupted, losses = self.losses(whole), self.losses(resumed)
        assert losses[0] == pytest.approx(uninterrupted[0], rel=tolerance), resumed
        assert losses[1] == pytest.approx(uninterrupted[1], rel=1e-3), resumed


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Return the keys of tensors that are not bit-identical in two states."""
    keys = found.keys() | expected.keys()
    return sorted(
        key
        for key in keys
        if not (key in found and key in expected and torch.equal(found[key], expected[key]))
    )


DELAYED, BF16, FP32 = {"recipe": "delayed"}, {"compute": "bf16"}, {"compute": "fp32"}
FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more.pop("zero_optimization", {})}, **more}


# ---------------------------------------------------------------- in every test run


@pytest.fixture(scope="module")
def short(base: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Resume from two ranks to one and from one rank to two, with delayed scaling and ZeRO 1.

    Gradients are accumulated in float32.
    """
    runs = Runs(tmp_path_factory.mktemp("short"), {**base, "precision": DELAYED})
    runs.whole("two", 2, 2)
    runs.resumed("two_to_one", 1, "two")
    runs.whole("one", 1, 2)
    runs.resumed("one_to_two", 2, "one", save_strategy="steps")
    return runs.start()


@pytest.mark.process
def test_resume_on_two_ranks_and_one(short: Runs) -> None:
    short.check("two", "two_to_one", SCALES_MOVE)
    short.check("one", "one_to_two", SCALES_MOVE)
    assert any(key.startswith("FP8") for key in short.state("two", "kept"))


@pytest.mark.process
def test_resharded_run_saves_and_resumes(short: Runs) -> None:
    """A run resumed on more ranks saves a valid checkpoint and an export.

    No process group times out before the watchdog.
    """
    folder = short.folder / "one_to_two/run"
    (path,) = committed(folder / "checkpoints")
    state = read_state(path)
    assert problems(path) == [] and (state.world_size, state.step) == (2, STEPS)
    assert state.consumed_samples == STEPS * 2
    assert (folder / "hf/model.safetensors").exists()
    short.check_group_timeouts("two")


@pytest.fixture
def written(short: Runs, tmp_path: Path) -> Path:
    """Return a copy of a checkpoint from two ranks that a test may damage."""
    return shutil.copytree(short.folder / f"two/run/checkpoints/step-{SAVED:08d}", tmp_path / "step")


SHARD = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.mark.parametrize(
    ("name", "key"),
    [
        (SHARD, "single_partition_of_fp32_groups"),
        ("mp_rank_00_model_states.pt", "param_shapes"),
        (SHARD, None),
    ],
)
@pytest.mark.process
def test_incomplete_checkpoint_files_raise(short: Runs, written: Path, name: str, key: str | None) -> None:
    """Files that are incomplete, empty or from a different model raise a CheckpointError."""
    weights = {k[7:]: t for k, t in short.state("two", "kept").items() if k.startswith("weight ")}
    sizes, state = {k: t.numel() for k, t in weights.items()}, read_state(written)
    reshard.check(reshard.read(written, state, []), sizes, written)
    with pytest.raises(CheckpointError):
        reshard.check(reshard.read(written, state, []), {**sizes, "model.norm.weight": 63}, written)
    content = torch.load(written / name, weights_only=False)
    if key:
        values = content.get("optimizer_state_dict", content)
        values[key] = values[key][:-1]
    torch.save(content if key else {}, written / name)
    with pytest.raises(CheckpointError):
        reshard.check(reshard.read(written, state, []), sizes, written)


@pytest.mark.process
def test_merge_fp8_states(written: Path) -> None:
    file = written / "rank_00001.pt"
    content = torch.load(file, weights_only=True)
    name = next(key for key in content["fp8"] if key.endswith("scaling_fwd.amax_history"))
    content["fp8"][name][0, 0] = 1e6  # not yet reduced
    torch.save(content, file)
    assert reshard.merge_fp8_states(written, 2)[name][0, 0] == 1e6
    content["fp8"][name.replace("amax_history", "scale")][0] *= 2
    torch.save(content, file)
    with pytest.raises(CheckpointError):
        reshard.merge_fp8_states(written, 2)


# ---------------------------------------------------------------- the full form

CONFIGURATIONS = [
    (BF16, zero(0)),
    (BF16, zero(1)),
    (BF16, zero(1, **FP32_GRADIENTS)),
    (BF16 | {"optimizer_states": "bf16_remainder"}, zero(1, **FP32_GRADIENTS)),
    (BF16, zero(2)),
    (BF16, zero(3)),
    (DELAYED, zero(0)),
    (DELAYED, zero(3)),
    (FP32, zero(0)),
    (FP32, zero(1)),
    (FP32, zero(2)),
    (FP32, zero(3)),
]


@pytest.mark.reliability
@pytest.mark.timeout(900)
@pytest.mark.parametrize("precision, deepspeed", CONFIGURATIONS)
@pytest.mark.process
def test_resume_with_any_number_of_ranks(
    base: dict[str, Any], tmp_path: Path, precision: dict, deepspeed: dict
) -> None:
    runs = Runs(tmp_path, {**base, "precision": precision, "deepspeed": deepspeed})
    runs.whole("two", 2, 4)
    runs.resumed("two_to_one", 1, "two")
    runs.resumed("two_to_four", 4, "two")
    runs.whole("four", 4, 12)
    runs.resumed("four_to_three", 3, "four")
    runs.whole("eight", 8, 8)
    runs.resumed("eight_to_four", 4, "eight")
    runs.start()
    tolerance = SCALES_MOVE if precision == DELAYED else 1e-5
    for name in runs.cases:
        if (whole := name.partition("_to_")[0]) != name:
            runs.check(whole, name, tolerance)


@pytest.mark.reliability
@pytest.mark.process
def test_resume_at_any_zero_stage(base: dict[str, Any], tmp_path: Path) -> None:
    runs = Runs(tmp_path, {**base, "precision": BF16})
    moves = [(0, 1, 2), (1, 0, 2), (1, 2, 2), (2, 1, 2), (1, 3, 2), (3, 1, 2), (3, 0, 1), (2, 3, 4)]
    for stage in range(4):
        runs.whole(f"zero{stage}", 2, 4, deepspeed=zero(stage))
    for old, new, ranks in moves:
        runs.resumed(f"zero{old}_to_{new}", ranks, f"zero{old}", deepspeed=zero(new))
    runs.start()
    for old, new, _ in moves:
        runs.check(f"zero{old}", f"zero{old}_to_{new}")
