"""AdamW's states in less memory (precision.optimizer_states): the same numbers in fewer bytes, in checkpoints too."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from model.fp8.recipes import FULL_STATES
from tests.train.runs import curve, run
from train.checkpoint.files import RunState, name_of
from train.checkpoint.load import load_checkpoint
from train.checkpoint.save import Saver
from train.config.arguments import TrainingArguments
from train.config.ds_config import resolve_ds_config
from train.data.stream import Batch
from train.engine import states, zero
from train.engine.states import MOMENTS, PackedAdamW, decoded, joined, split
from train.engine.step import MicroStep, build_engine, without_prints
from train.setup import model_for

FLOAT32 = {"compute": "bf16"}
REMAINDER = {"compute": "bf16", "optimizer_states": "bf16_remainder"}
EXACT = {**REMAINDER, "optimizer_moments": "fp32"}


def test_a_float32_number_is_a_bf16_one_and_16_bits() -> None:
    """Every bf16 number with what lies about it: ties, signs of zero, the smallest and the largest."""
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    bits = (torch.arange(-(2**15), 2**15, dtype=torch.int32)[:, None] * 2**16 + low).flatten()
    master = bits.view(torch.float32)
    weight, remainder = (
        torch.empty_like(master, dtype=torch.bfloat16),
        torch.empty(len(bits), dtype=torch.int16),
    )
    split(master, weight, remainder)
    assert torch.equal(joined(weight, remainder).view(torch.int32), bits)
    cast = master.bfloat16()
    finite = master.isfinite() & cast.isfinite()
    apart, least = ((master.double() - w.double()).abs()[finite] for w in (weight, cast))
    assert torch.equal(apart, least), "a weight is the nearest"


@pytest.mark.parametrize(("moments", "tolerance"), [("fp32", 0.0), ("bf16", 2e-2)])
def test_a_step_is_that_of_float32(monkeypatch: pytest.MonkeyPatch, moments: str, tolerance: float) -> None:
    """With float32 moments to the last bit, however the weights are cut into chunks."""
    monkeypatch.setattr(states, "CHUNK", 256)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(3 * 256 + 77, generator=generator).bfloat16()
    whole, half = torch.nn.Parameter(start.float()), start.clone()
    plain = torch.optim.AdamW([whole], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    gradient = torch.zeros_like(whole)
    packed = PackedAdamW([{**plain.param_groups[0], "params": [half]}], [gradient], moments)
    for step in range(30):
        gradient.copy_(torch.randn(whole.shape, generator=generator) * 10.0 ** (step % 5 - 3))
        whole.grad = gradient.clone()
        plain.param_groups[0]["lr"] = packed.param_groups[0]["lr"] = 1e-2 / (step + 1)
        plain.step()
        packed.step()
    state = packed.state[half]
    master = joined(half, state["remainder"])
    assert float(state["step"]) == 30 and not torch.equal(master, start.float())
    for found, expected in (
        (master, whole.detach()),
        *((decoded(state, m, 0, len(half)), plain.state[whole][m]) for m in MOMENTS),
    ):
        if tolerance:
            assert 0 < float((found - expected).norm() / expected.norm()) < tolerance
        else:
            assert torch.equal(found, expected)


# ---------------------------------------------------------------- an engine


class Trained:
    """An engine of the run of `settings`, and steps of it on random tokens."""

    def __init__(self, settings: dict, precision: dict[str, str], **changes: Any):
        self.args = TrainingArguments.from_dict({**settings, "precision": precision, **changes}).resolve(1)
        model, self.precision = model_for(self.args)
        self.engine = build_engine(model, self.args, resolve_ds_config(self.args, 1))
        self.micro_step = MicroStep(self.engine, self.precision, self.args)

    def steps(self, count: int) -> "Trained":
        for step in range(count):
            for index in range(2):
                ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(2 * step + index))
                self.micro_step(Batch(ids, ids), index)
        return self

    def saved(self, folder: Path) -> Path:
        saver = Saver(self.engine, folder, self.precision, 0, print)
        saver.begin(RunState(3, 12, 12, 1, 1, self.args.to_dict(), {}), background=True)
        saver.finish()
        return folder / name_of(3)

    def loaded(self, path: Path, cut_otherwise: bool) -> "Trained":
        with without_prints():
            load_checkpoint(self.engine, path, self.precision, cut_otherwise)
        return self

    def whole(self) -> list[torch.Tensor]:
        """Float32 weights and moments, of each group, and the number of steps."""
        adamw, found = zero.base_optimizer(self.engine), []
        for master in zero.masters(self.engine):
            state = adamw.state[master.tensor]
            weight = master.tensor.detach()
            found.append(joined(weight, state["remainder"]) if "remainder" in state else weight)
            found += [decoded(state, moment, 0, len(weight)) for moment in MOMENTS] if state else []
            found += [state["step"]] if state else []
        return [tensor.clone() for tensor in found]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def storages_alive() -> dict[int, torch.UntypedStorage]:
    """Of all tensors of this process, by address."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)]
    return {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}


@pytest.mark.parametrize(("precision", "most"), [(FLOAT32, 1.0), (EXACT, 10 / 12), (REMAINDER, 0.75)])
def test_what_states_take(settings: dict, precision: dict[str, str], most: float) -> None:
    """Of all that an engine holds after a step, what is neither a bf16 weight nor its float32 gradient nor what stays
    of a bf16 one: to 1 % what the plan counts, and DeepSpeed's float32 weights are gone."""
    before = storages_alive()  # kept, so that no address comes again
    trained = Trained(settings, precision).steps(1)
    trained.engine.zero_grad()
    parameters = sum(p.numel() for p in trained.engine.module.parameters())
    for parameter in trained.engine.module.parameters():
        parameter.grad = None
    new = sum(storage.nbytes() for at, storage in storages_alive().items() if at not in before)
    held, planned = new / parameters - 2 - 4, trained.args.precision.optimizer_bytes
    assert planned <= most * FULL_STATES
    assert held == pytest.approx(planned, rel=0.01)


def test_float32_becomes_packed_and_packed_float32_to_the_last_bit(settings: dict, tmp_path: Path) -> None:
    first = Trained(settings, FLOAT32).steps(3)
    state = first.whole()
    path = first.saved(tmp_path / "float32")
    packed = Trained(settings, EXACT).steps(1).loaded(path, True)
    assert equal(packed.whole(), state)
    path = packed.saved(tmp_path / "packed")
    assert equal(Trained(settings, EXACT).steps(1).loaded(path, False).whole(), state), "as it was written"
    back = Trained(settings, FLOAT32).steps(1).loaded(path, True)
    assert equal(back.whole(), state)


def test_before_the_first_step_there_is_nothing_to_pack(settings: dict, tmp_path: Path) -> None:
    first = Trained(settings, FLOAT32)
    path = first.saved(tmp_path / "float32")
    packed = Trained(settings, REMAINDER, seed=7).loaded(path, True)
    assert equal(packed.whole(), first.whole())
    again = Trained(settings, REMAINDER, seed=8).loaded(packed.saved(tmp_path / "packed"), False)
    assert equal(again.whole(), first.whole())


def test_a_run_goes_on_with_the_same_bits(settings: dict, capsys: pytest.CaptureFixture) -> None:
    folder = run(settings, precision=REMAINDER, save_steps=3)
    whole = curve(folder)
    said = "moments in bf16: 6 bytes a parameter instead of 12"
    assert said in capsys.readouterr().out
    (folder / "checkpoints/step-00000006/manifest.json").unlink()
    assert curve(run(settings, precision=REMAINDER, save_steps=3)) == whole
