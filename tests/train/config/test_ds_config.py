"""train/config/ds_config.py: what is filled in, what is refused with which key; DeepSpeed accepts the result."""

import json
import os
import sys

import pytest

from model.config import load_sizes
from tests import programs
from tests.conftest import refused
from train.config import ds_config
from train.config.arguments import CONFIG_FOLDER, ConfigurationError, TrainingArguments
from train.config.ds_config import KEYS, REPLACEMENTS, SECTIONS
from train.config.load import build_arguments, load_deepspeed, resolve_arguments
from train.files import REPOSITORY
from train.launch import free_port

SIZES = load_sizes("tiny")


def arguments(deepspeed=None, compute="bf16", **changes) -> TrainingArguments:
    raw = {
        "model": {"config": "tiny"},
        "data": {"sources": {"a": "a"}},
        "precision": {"compute": compute},
        "max_steps": 10,
        "max_seq_length": 32,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "deepspeed": deepspeed,
        **changes,
    }
    return build_arguments(raw)


def resolved(deepspeed=None, compute="bf16", ranks=2, **changes) -> dict:
    """The configuration for DeepSpeed on `ranks` ranks."""
    given = resolve_arguments(arguments(deepspeed, compute, **changes), ranks)
    return ds_config.resolve_ds_config(given, SIZES, ranks)


def refusal(deepspeed, *keys, **changes) -> str:
    """Return the message of the error; it has a problem with each of `keys` and no other."""
    with refused(ConfigurationError) as error:
        resolved(deepspeed, **changes)
    assert error.value.keys == list(keys)
    return str(error.value)


# ---------------------------------------------------------------- what is filled in


def test_defaults():
    config = resolved()
    assert config["zero_optimization"] == {"stage": 1} and config["data_types"] == {
        "grad_accum_dtype": "fp32"
    }
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (4, 2)
    assert (config["train_batch_size"], config["gradient_clipping"]) == (16, 1.0)
    # both wait for the device in every micro-batch
    assert config["timers"] == {"throughput": {"enabled": False}} and config["wall_clock_breakdown"] is False
    config = resolved({}, ranks=1, max_grad_norm=0.0)
    assert config["train_batch_size"] == 8 and config["zero_optimization"] == {"stage": 0}
    assert config["gradient_clipping"] == 0.0  # DeepSpeed's own default is 1.0


def test_user_values_are_kept():
    timers = {"throughput": {"enabled": True}}
    given = {
        "wall_clock_breakdown": True,
        "steps_per_print": 5,
        "timers": timers,
        "gradient_clipping": "auto",
    }
    config = resolved(given)
    assert config["wall_clock_breakdown"] is True and config["steps_per_print"] == 5
    assert config["timers"] == timers and config["gradient_clipping"] == 1.0
    assert given["gradient_clipping"] == "auto"
    params = {"lr": "auto", "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": "auto"}
    assert "optimizer" not in resolved({"optimizer": {"type": "AdamW", "params": params}})


@pytest.mark.parametrize(
    ("compute", "bf16", "fp16"),
    [("fp8", True, False), ("bf16", True, False), ("fp16", False, True), ("fp32", False, False)],
)
def test_precision_section(compute, bf16, fp16):
    config = resolved(compute=compute)
    assert (config["bf16"]["enabled"], config["fp16"]["enabled"]) == (bf16, fp16)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_gradient_communication_type(dtype):
    precision = {"compute": "bf16", "gradient_communication": dtype}
    for given in ({}, {"communication_data_type": "auto"}, {"communication_data_type": dtype}):
        assert resolved(given, precision=precision)["communication_data_type"] == dtype
    assert "communication_data_type" not in resolved()
    other = {"fp32": "bf16", "bf16": "fp32"}[dtype]
    refusal({"communication_data_type": other}, "communication_data_type", precision=precision)
    refusal({"communication_data_type": other}, "communication_data_type")


def test_zero_3_sizes():
    sizes = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    found = resolved({"zero_optimization": {"stage": 3, **dict.fromkeys(sizes, "auto")}})["zero_optimization"]
    assert [found[name] for name in sizes] == [128 * 128, int(0.9 * 128 * 128), 10 * 128]


# ---------------------------------------------------------------- what is refused

PACKED = {"compute": "bf16", "optimizer_states": "bf16_remainder"}
MUON = {"optim": "muon"}
HF = {"model": {"config": "tiny", "variant": "hf"}}
COMPILED = {"model": {"config": "tiny", "variant": "hf", "compile": True}}
ZERO_0, ZERO_1 = ({"zero_optimization": {"stage": stage}} for stage in (0, 1))
IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}
OFFLOAD = "zero_optimization.offload_optimizer"


def offloaded(stage, **more):
    return {"zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu", **more}}}


STAGE = "zero_optimization.stage"


@pytest.mark.parametrize(
    ("deepspeed", "changes", "key", "named"),
    [
        # what contradicts the training configuration
        ({"train_batch_size": 8}, {}, "train_batch_size", "8 2 16"),
        ({"train_micro_batch_size_per_gpu": 1}, {}, "train_micro_batch_size_per_gpu", "1 4"),
        ({"gradient_accumulation_steps": 1}, {}, "gradient_accumulation_steps", "1 2"),
        ({"gradient_clipping": 1.001}, {}, "gradient_clipping", "1.001 max_grad_norm 1.0"),
        ({"bf16": {"enabled": False}}, {}, "bf16.enabled", "precision.compute"),
        ({"fp16": {"enabled": True}}, {}, "fp16.enabled", "precision.compute"),
        ({"optimizer": {"type": "Lion", "params": {}}}, {}, "optimizer.type", '"Lion"'),
        ({"optimizer": {"type": "Muon"}}, {}, "optimizer.type", "AdamW"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}, {}, "optimizer.params.lr", "learning_rate"),
        ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.9]}}}, {}, "optimizer.params.betas", "adam_beta1"),
        ({"steps_per_print": "auto"}, {}, "steps_per_print", '"auto"'),
        ({"zero_optimization.stage": 1}, {}, "zero_optimization.stage", ""),
        # types in which gradients accumulate
        (ZERO_0 | IN_FP32, {}, "data_types.grad_accum_dtype", "fp32"),
        (ZERO_0 | {"data_types": {"grad_accum_dtype": "bf16"}}, {"compute": "fp32"}, "data_types.grad_accum_dtype", ""),
        # fp16: DeepSpeed 0.19.8 divides by a loss scale that it has not multiplied by
        ({}, {"compute": "fp16"}, STAGE, "1 2 3"),
        # packed states
        (ZERO_0, {"precision": PACKED}, "precision.optimizer_states", ""),
        (ZERO_1, {"precision": PACKED}, "precision.optimizer_states", ""),
        ("ds_config_zero2.json", {"precision": PACKED}, "precision.optimizer_states", ""),
        ("ds_config_zero3.json", {"precision": PACKED}, "precision.optimizer_states", ""),
        (None, {"precision": PACKED, **MUON}, "precision.optimizer_states", "muon"),
        # offloading
        (offloaded(0), {}, OFFLOAD, "ZeRO 0 2 3"),
        (offloaded(1) | IN_FP32, {}, OFFLOAD, "ZeRO 1 BF16_Optimizer"),
        (offloaded(2), {}, OFFLOAD, "grad_accum_dtype fp32"),
        (offloaded(3) | IN_FP32, {"compute": "fp16"}, OFFLOAD, "fp16"),
        (offloaded(2) | IN_FP32, {"compute": "fp32"}, OFFLOAD, "compute fp32"),
        (offloaded(2) | IN_FP32, MUON, OFFLOAD, "muon"),
        (offloaded(2) | IN_FP32, {"precision": PACKED}, "precision.optimizer_states", "ZeRO 1"),
        # Muon
        ({"zero_optimization": {"stage": 2}}, MUON, STAGE, ""),
        (ZERO_1, MUON, STAGE, ""),
        (None, {"compute": "fp32", **MUON}, STAGE, ""),
        (None, {"compute": "fp16", **MUON}, "precision.compute", ""),
        ({"optimizer": {"type": "AdamW"}}, MUON, "optimizer", ""),
        # ZeRO 3
        ("ds_config_zero3.json", COMPILED, STAGE, "model.compile"),
        ("ds_config_zero3.json", {"speed": {"cuda_graphs": True}}, STAGE, ""),
        ("ds_config_zero2.json", {"precision": {"fp8_weight_gather": True}}, STAGE, "fp8_weight_gather"),
    ],
)  # fmt: skip
def test_incompatible_keys_raise(deepspeed, changes, key, named):
    message = refusal(deepspeed, key, **changes)
    assert all(name in message for name in named.split())


@pytest.mark.parametrize(
    ("deepspeed", "changes"),
    [
        (ZERO_0 | {"data_types": {"grad_accum_dtype": "bf16"}}, {"compute": "fp8"}),
        (ZERO_0 | IN_FP32, {"compute": "fp32"}),
        *((f"ds_config_zero{stage}.json", {"compute": "fp16"}) for stage in (1, 2, 3)),
        ("ds_config_zero1.json", {"precision": PACKED}),
        ("ds_config_zero1.json", {"precision": PACKED, "adam_beta2": 0.98}),
        ("ds_config_zero1.json", {"precision": {**PACKED, "optimizer_moments": "fp32"}, "adam_beta2": 0.99}),
        (None, {"compute": "fp8", **MUON}),
        (None, MUON),
        ({}, {"compute": "fp32", **MUON}),
        ({}, MUON),
        ("ds_config_zero2.json", COMPILED),
        ("ds_config_zero3.json", HF),
        ({"zero_optimization": {"stage": 3}}, {"gradient_checkpointing": True, **HF}),
        ({"zero_optimization": {"stage": 2}}, {"gradient_checkpointing": True}),
        (offloaded(2, pin_memory=False) | IN_FP32, {}),
        (offloaded(3) | IN_FP32, {"compute": "fp8", "precision": {"fp8_weight_gather": True}}),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none"}}}, {}),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": None}}, {}),
    ],
)
def test_compatible_keys(deepspeed, changes):
    resolved(deepspeed, **changes)


@pytest.mark.parametrize(
    ("variant", "layer"), [("te_linear", "MistralDecoderLayer"), ("te_layer", "FusedTransformerLayer")]
)
def test_zero_3_recomputation_needs_leaf_modules(variant, layer):
    """Without it the backward pass finds a weight of no elements (seen on two H200s)."""
    shipped = load_deepspeed("ds_config_zero3.json")
    zero = shipped["zero_optimization"]
    changes = dict(model={"config": "tiny", "variant": variant})

    def with_leaf(leaf):
        return shipped | {"zero_optimization": zero | {"leaf_module": leaf}}

    for leaf in ({}, {"classes": ["Other"]}, {"classes": "MistralAttention"}):
        message = refusal(
            with_leaf(leaf), "zero_optimization.leaf_module", gradient_checkpointing=True, **changes
        )
        assert f'["{layer}"]' in message
        resolved(with_leaf(leaf), **changes)
    for leaf in (zero["leaf_module"], {"classes": f"model.somewhere.{layer}"}, {"name_suffixes": ["layers"]}):
        resolved(with_leaf(leaf), gradient_checkpointing=True, **changes)


WRONG_VALUES = {
    "zero_optimization": [True, 2, None, []],
    "zero_optimization.stage": [4, True, 1.0, "2", None],
    "zero_optimization.overlap_comm": [1, "true", None],
    "zero_optimization.reduce_bucket_size": [0, -1, 1.5, "5e8", True, float("inf")],
    "zero_optimization.stage3_param_persistence_threshold": [-1, None],
    "zero_optimization.load_from_fp32_weights": [False],
    "zero_optimization.elastic_checkpoint": [True],
    "zero_optimization.offload_optimizer": [True, "cpu"],
    "zero_optimization.offload_optimizer.device": ["nvme", None],
    "zero_optimization.offload_optimizer.pin_memory": ["true"],
    "zero_optimization.offload_param": [{"device": "cpu"}],
    "zero_optimization.leaf_module": [None, "A", ["A"]],
    "zero_optimization.leaf_module.classes": [None, [None], 1],
    "gradient_allreduce_op": ["sum", "SUM"],
    "prescale_gradients": [True],
    "gradient_predivide_factor": [2.0, 0.5],
    "checkpoint.load_universal": [True],
    "optimizer": ["AdamW"],
    "optimizer.params": [1],
    "optimizer.params.adam_w_mode": [False],
    "data_types.grad_accum_dtype": ["float32", "fp16", 32],
    "fp16.loss_scale": [-1, "dynamic"],
    "timers.throughput": [False],
    "steps_per_print": [0, "often"],
}
# None: no key is near, or it is another one that is to be used
NEAREST = {
    "zero_optimisation": "zero_optimization",
    "zero_optimization.overlap_com": "overlap_comm",
    "zero_optimization.gradient_clipping": "gradient_clipping",
    "zero_optimization.leaf_module.class": "classes",
    "data_types.grad_acum_dtype": "grad_accum_dtype",
    "timers.troughput": "throughput",
    "stage": "zero_optimization.stage",
    "optimizer.params.weight_decy": "weight_decay",
    **dict.fromkeys(
        """zero_optimization.zero_quantized_weights zero_optimization.zero_hpz_partition_size
        zero_optimization.mics_shard_size zero_optimization.legacy_stage1 zero_optimization.compute_grad_norm
        data_types.param_dtype data_types.buffer_dtype data_types.keep_in_fp32_modules bf16.check_grad_overflow
        bf16.bf16_master_weights_and_grads bf16.immediate_grad_update fp16.auto_cast flops_profiler comms_logger
        checkpoint.use_node_local_storage sequence_parallel_size pipeline disable_allgather log_level""".split()
    ),
    **dict.fromkeys(REPLACEMENTS),
}


def at(path: str, value: object) -> dict:
    for name in reversed(path.split(".")):
        value = {name: value}
    if path.startswith("optimizer."):
        value["optimizer"]["type"] = "AdamW"
    return value


@pytest.mark.parametrize(("path", "values"), WRONG_VALUES.items())
def test_unsupported_value_names_the_key(path, values):
    for value in values:
        assert json.dumps(value) in refusal(at(path, value), path)


@pytest.mark.parametrize(("path", "near"), NEAREST.items())
def test_unsupported_key_suggests_the_nearest(path, near):
    message = refusal(at(path, {"type": "auto"} if path == "scheduler" else "auto"), path)
    assert (near or "") in message and REPLACEMENTS.get(path, "") in message


def test_all_problems_are_reported_together():
    given = resolve_arguments(arguments({"gradient_clipping": 2, "zero": 1, "optimizer": {"type": "SGD"}}), 2)
    with refused(ConfigurationError, key="zero") as error:
        ds_config.resolve_ds_config(given, SIZES, 2, "own.json")
    assert error.value.keys == ["zero", "optimizer.type", "gradient_clipping"]
    assert "own.json" in str(error.value)


def test_every_supported_key_and_value():
    given = {"leaf_module": {"classes": "A", "names": ["b"], "name_suffixes": []}}
    for path, (allowed, _) in KEYS.items():
        section, _, key = path.rpartition(".")
        for value in (7, 1, True, False, None, {"device": "none"}) if section == "zero_optimization" else ():
            if allowed.accepts(value):
                zero = {"stage": 3, **given, key: value}
                assert resolved({"zero_optimization": zero})["zero_optimization"] == zero


DEEPSPEED_SCRIPT = """
import json, sys
import torch, deepspeed
from deepspeed.runtime import config as ds

torch.set_num_threads(1)

class Recorder(dict):
    read = set()
    class Keys:
        def __contains__(self, key): Recorder.read.add(key); return False
        def __iter__(self): return iter(())
    def get(self, key, default=None): Recorder.read.add(key); return dict.get(self, key, default)
    def __contains__(self, key): Recorder.read.add(key); return dict.__contains__(self, key)
    def __getitem__(self, key): Recorder.read.add(key); return dict.__getitem__(self, key)
    def keys(self): return Recorder.Keys()

ds.DeepSpeedConfig(Recorder(train_batch_size=1))
result = {"read": sorted(Recorder.read), "runs": {}}
for name, config in json.load(sys.stdin).items():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    # the exact class that train.optimizer builds
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    losses = []
    for _ in range(6):
        loss = engine(torch.ones(4, 8, dtype=next(engine.module.parameters()).dtype)).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    result["runs"][name] = {
        "steps": engine.global_steps, "losses": losses, "optimizer": type(engine.optimizer).__name__,
        "clip": engine.gradient_clipping(),
    }
print("RESULT" + json.dumps(result))
"""


@pytest.fixture(scope="module")
def deepspeed_result():
    """One process for all that needs DeepSpeed itself: the keys it reads, and each shipped file in a real engine."""
    configs = {
        f"{path.stem}-{compute}": resolved(path.name, compute, 1)
        for path in sorted(CONFIG_FOLDER.glob("ds_config_*.json"))
        for compute in (("bf16", "fp32") if "zero1" in path.name else ("bf16",))
    }
    env = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "CUDA_VISIBLE_DEVICES": "",
    }
    env |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu"}
    done = programs.run(
        [sys.executable, "-c", DEEPSPEED_SCRIPT],
        input=json.dumps(configs), env=env, cwd=REPOSITORY, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("RESULT"))


@pytest.mark.process
def test_deepspeed_reads_supported_keys(deepspeed_result):
    read = set(deepspeed_result["read"])
    assert {key for key in (*KEYS, *SECTIONS) if "." not in key} <= read
    assert {key for key in REPLACEMENTS if "." not in key} <= read


@pytest.mark.process
def test_shipped_configurations_train(deepspeed_result):
    runs = deepspeed_result["runs"]
    assert {name.removeprefix("ds_config_") for name in runs} == {
        "zero0-bf16", "zero1-bf16", "zero1-fp32", "zero2-bf16", "zero3-bf16",
    }  # fmt: skip
    for name, run in runs.items():
        assert run["steps"] == 3, name  # accumulation 2
        assert run["losses"][4] < run["losses"][0], name
        assert run["clip"] == 1.0, name
    # float32 gradients between micro-batches
    assert runs["ds_config_zero1-bf16"]["optimizer"] == "BF16_Optimizer"
