"""AdamW's states in less memory (precision.optimizer_states): the same numbers in fewer bytes, in checkpoints too."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from model.config import load_config
from model.fp8.recipes import FULL_STATES
from tests.train.runs import curve, run
from train.checkpoint.files import RunState, checkpoint_name
from train.checkpoint.load import load_checkpoint
from train.checkpoint.save import Ranks, Saver
from train.config.ds_config import resolve_ds_config
from train.config.load import build_arguments, resolve_arguments
from train.data.stream import Batch
from train.engine import packed_adamw, zero
from train.engine.packed_adamw import MOMENTS, PackedAdamW, decode_moment, join_float32, split_float32
from train.engine.process_group import suppress_prints
from train.engine.step import MicroStep, build_engine
from train.phase import build_model_and_precision

FLOAT32 = {"compute": "bf16"}
REMAINDER = {"compute": "bf16", "optimizer_states": "bf16_remainder"}
INT8, FP8 = ({"compute": "bf16", "optimizer_states": states} for states in ("int8", "fp8"))
EXACT = {**REMAINDER, "optimizer_moments": "fp32"}


def test_split_and_join_float32() -> None:
    """Every bf16 number with what lies about it: ties, signs of zero, the smallest and the largest."""
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    bits = (torch.arange(-(2**15), 2**15, dtype=torch.int32)[:, None] * 2**16 + low).flatten()
    master = bits.view(torch.float32)
    weight, remainder = (
        torch.empty_like(master, dtype=torch.bfloat16),
        torch.empty(len(bits), dtype=torch.int16),
    )
    split_float32(master, weight, remainder)
    assert torch.equal(join_float32(weight, remainder).view(torch.int32), bits)
    cast = master.bfloat16()
    finite = master.isfinite() & cast.isfinite()
    apart, least = ((master.double() - w.double()).abs()[finite] for w in (weight, cast))
    assert torch.equal(apart, least), "a weight is the nearest"


@pytest.mark.parametrize(
    ("moments", "tolerance"), [("fp32", 0.0), ("bf16", 2e-2), ("int8", 0.1), ("fp8", 0.1)]
)
def test_step_equals_float32(monkeypatch: pytest.MonkeyPatch, moments: str, tolerance: float) -> None:
    """With float32 moments to the last bit, however the weights are cut into chunks."""
    monkeypatch.setattr(packed_adamw, "STATE_CHUNK", 256)
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
    master = join_float32(half, state["remainder"])
    assert float(state["step"]) == 30 and not torch.equal(master, start.float())
    for found, expected in (
        (master, whole.detach()),
        *((decode_moment(state, m, 0, len(half)), plain.state[whole][m]) for m in MOMENTS),
    ):
        if tolerance:
            assert 0 < float((found - expected).norm() / expected.norm()) < tolerance
        else:
            assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_eight_bit_moments_equal_torchao(kind: str) -> None:
    """Cut anywhere, and but for second moments that torchao rounds to 0."""
    from torchao.optim.subclass_8bit import OptimState8bit
    from torchao.optim.subclass_fp8 import OptimStateFp8

    generator = torch.Generator().manual_seed(0)
    values = torch.randn(8 * 256, generator=generator) * 10.0 ** torch.arange(-6, 2).repeat(256)
    for moment, numbers in zip(MOMENTS, (values, values.square()), strict=True):
        signed = moment == "exp_avg"
        theirs = (
            OptimState8bit.zeros((8 * 256,), signed) if kind == "int8" else OptimStateFp8.zeros((8 * 256,))
        )
        theirs.copy_(numbers)
        state = packed_adamw.new_moment(moment, 8 * 256, kind, numbers.device)
        packed_adamw.encode_moment(numbers, state, moment, 0)
        found, expected = decode_moment(state, moment, 0, 8 * 256), theirs.dequantize().view(-1)
        kept = torch.ones_like(expected, dtype=torch.bool) if signed else expected != 0
        assert torch.equal(found[kept], expected[kept]) and (signed or 0 < kept.float().mean() < 1)
        assert signed or found.min() > 0
        assert torch.equal(decode_moment(state, moment, 300, 1000), found[300:1000])
        packed_adamw.encode_moment(numbers[512:], state, moment, 512)
        assert torch.equal(decode_moment(state, moment, 0, 8 * 256), found)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_weights_without_gradient_are_stable(kind: str) -> None:
    """Gradients that are small beside others of their block have second moments that 8 bits would make 0; without a
    gradient to make them more again, a step would be the first moment divided by epsilon."""
    sizes = 10.0 ** -torch.linspace(0, 4, 256)
    weight, gradient = torch.zeros(256).bfloat16(), torch.zeros(256)
    whole = torch.nn.Parameter(weight.float())
    plain = torch.optim.AdamW([whole], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    packed = PackedAdamW([{**plain.param_groups[0], "params": [weight]}], [gradient], kind)
    for step in range(20):
        gradient.copy_(sizes if step < 5 else 0 * sizes)
        whole.grad = gradient.clone()
        plain.step()
        packed.step()
    assert float(weight.float().abs().max()) < 2 * float(whole.abs().max())


# ---------------------------------------------------------------- an engine


class Trained:
    """An engine of the run of `settings`, and steps of it on random tokens."""

    def __init__(self, settings: dict, precision: dict[str, str], **changes: Any):
        self.args = resolve_arguments(build_arguments({**settings, "precision": precision, **changes}), 1)
        config = load_config(self.args.model.config)
        model, self.precision = build_model_and_precision(self.args, config)
        self.engine = build_engine(model, self.args, resolve_ds_config(self.args, config, 1))
        self.micro_step = MicroStep(self.engine, self.precision, self.args)

    def steps(self, count: int) -> "Trained":
        for step in range(count):
            for index in range(2):
                ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(2 * step + index))
                self.micro_step(Batch(ids, ids), index)
        return self

    def saved(self, folder: Path) -> Path:
        saver = Saver(self.engine, folder, self.precision, Ranks(), 0)
        stage = self.engine.zero_optimization_stage()
        saver.begin(RunState(3, 12, 12, 1, stage, self.args.to_dict(), {}), background=True)
        saver.finish()
        return folder / checkpoint_name(3)

    def loaded(self, path: Path, reshard: bool) -> "Trained":
        with suppress_prints():
            load_checkpoint(self.engine, path, self.precision, reshard)
        return self

    def whole(self) -> list[torch.Tensor]:
        """Float32 weights and moments, of each group, and the number of steps."""
        adamw, found = zero.base_optimizer(self.engine), []
        for master in zero.masters(self.engine):
            state = adamw.state[master.tensor]
            weight = master.tensor.detach()
            found.append(join_float32(weight, state["remainder"]) if "remainder" in state else weight)
            found += [decode_moment(state, moment, 0, len(weight)) for moment in MOMENTS] if state else []
            found += [state["step"]] if state else []
        return [tensor.clone() for tensor in found]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def storages_alive() -> dict[int, torch.UntypedStorage]:
    """Of all tensors of this process, by address."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)]
    return {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}


@pytest.mark.parametrize(
    ("precision", "most"), [(FLOAT32, 1.0), (EXACT, 10 / 12), (REMAINDER, 0.75), (INT8, 0.4), (FP8, 0.4)]
)
def test_state_bytes(settings: dict, precision: dict[str, str], most: float) -> None:
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


def test_conversion_between_float32_and_packed_states(settings: dict, tmp_path: Path) -> None:
    first = Trained(settings, FLOAT32).steps(3)
    state = first.whole()
    path = first.saved(tmp_path / "float32")
    packed = Trained(settings, EXACT).steps(1).loaded(path, True)
    assert equal(packed.whole(), state)
    weights = {master.tensor.data_ptr() for master in zero.masters(packed.engine)}
    parts = packed.engine.optimizer.state_dict()["single_partition_of_fp32_groups"]
    assert weights.isdisjoint(part.data_ptr() for part in parts), (
        "each rank's file would have those of all ranks"
    )
    path = packed.saved(tmp_path / "packed")
    assert equal(Trained(settings, EXACT).steps(1).loaded(path, False).whole(), state), "as it was written"
    back = Trained(settings, FLOAT32).steps(1).loaded(path, True)
    assert equal(back.whole(), state)


def test_packing_before_the_first_step(settings: dict, tmp_path: Path) -> None:
    first = Trained(settings, FLOAT32)
    path = first.saved(tmp_path / "float32")
    packed = Trained(settings, REMAINDER, seed=7).loaded(path, True)
    assert equal(packed.whole(), first.whole())
    again = Trained(settings, REMAINDER, seed=8).loaded(packed.saved(tmp_path / "packed"), False)
    assert equal(again.whole(), first.whole())


def test_resume_is_bit_exact(settings: dict) -> None:
    changes = {"precision": {**FP8, "gradient_communication": "bf16"}, "save_steps": 3}
    folder = run(settings, **changes)
    whole = curve(folder)
    (folder / "checkpoints/step-00000006/manifest.json").unlink()
    assert curve(run(settings, **changes)) == whole
