"""The DeepSpeed configuration: what is filled in, what is refused, and that DeepSpeed itself accepts the result."""

import json
import os
import socket
import sys

import pytest

from tests import programs
from tests.conftest import numbers, refused
from train.config import msamp
from train.config.arguments import (
    CONFIG_FOLDER,
    REPOSITORY,
    ConfigurationError,
    TrainingArguments,
    load_deepspeed,
)
from train.config.differences import resume_differences
from train.config.ds_config import INSTEAD, KEYS, resolve_ds_config


def arguments(deepspeed=None, compute="bf16", **changes):
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
    return TrainingArguments.from_dict(raw)


def refusal(deepspeed, *keys, **changes) -> str:
    """Return the message of the error; it has a problem with each of `keys` and no other."""
    with refused(ConfigurationError) as error:
        resolve_ds_config(arguments(deepspeed, **changes), 2)
    assert error.value.keys == list(keys)
    return str(error.value)


def test_nothing_given_is_zero_1_with_float32_accumulation():
    config = resolve_ds_config(arguments(), 2)
    assert config["zero_optimization"] == {"stage": 1}
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}
    assert config["train_micro_batch_size_per_gpu"] == 4
    assert config["gradient_accumulation_steps"] == 2
    assert config["train_batch_size"] == 16
    assert config["gradient_clipping"] == 1.0
    assert config["timers"] == {"throughput": {"enabled": False}}
    assert config["wall_clock_breakdown"] is False


def test_an_empty_configuration_gets_everything_and_clipping_can_be_off():
    config = resolve_ds_config(arguments({}, max_grad_norm=0.0), 1)
    assert config["train_batch_size"] == 8
    assert config["zero_optimization"] == {"stage": 0}
    assert config["gradient_clipping"] == 0.0  # left out, DeepSpeed would clip at 1.0


@pytest.mark.parametrize(
    ("compute", "bf16", "fp16"),
    [("fp8", True, False), ("bf16", True, False), ("fp16", False, True), ("fp32", False, False)],
)
def test_precision_selects_deepspeeds_section(compute, bf16, fp16):
    config = resolve_ds_config(arguments(compute=compute), 1)
    assert (config["bf16"]["enabled"], config["fp16"]["enabled"]) == (bf16, fp16)


def test_accumulation_comes_from_tokens_per_step():
    a = arguments(gradient_accumulation_steps=None, train_batch_size_tokens=4 * 32 * 2 * 5)
    assert resolve_ds_config(a, 2)["gradient_accumulation_steps"] == 5


def test_ranks_add_gradients_up_in_the_type_that_is_asked_for():
    for asked in ("fp32", "bf16"):
        precision = {"compute": "bf16", "gradient_communication": asked}
        for given in ({}, {"communication_data_type": "auto"}, {"communication_data_type": asked}):
            config = resolve_ds_config(arguments(precision=precision, deepspeed=given), 2)
            assert config["communication_data_type"] == asked
    assert "communication_data_type" not in resolve_ds_config(arguments(), 2)
    precision = {"compute": "bf16", "gradient_communication": "fp32"}
    for changes in ({"precision": precision}, {}):
        refusal({"communication_data_type": "bf16"}, "communication_data_type", **changes)


def with_msamp(level, precision=(), **section):
    """Resolved, of a configuration that is otherwise the shipped one."""
    deepspeed = load_deepspeed("ds_config_zero1.json")
    deepspeed["msamp"] = {"enabled": True, "opt_level": level, **section}
    return arguments(deepspeed, precision={"compute": "bf16", **dict(precision)})


@pytest.mark.parametrize(("level", "states"), [("O1", "fp32"), ("O2", "fp8"), ("O3", "fp8")])
def test_a_section_for_ms_amp_becomes_the_nearest_here_and_says_so(level, states):
    given = with_msamp(level, use_te=True)
    resolved = given.resolve(2)
    assert (resolved.precision.optimizer_states, resolved.precision.gradient_communication) == (
        states,
        "bf16",
    )
    assert given.precision.optimizer_states == "fp32" and resolved.resolve(2) == resolved
    assert f"msamp {level}" in msamp.described(resolved.deepspeed)
    config = resolve_ds_config(given, 2)
    assert config["communication_data_type"] == "bf16" and "msamp" not in config
    # the same in this configuration's own keys goes on from it
    own = {"optimizer_states": states, "gradient_communication": "bf16"}
    same = arguments("ds_config_zero1.json", precision={"compute": "bf16", **own}).resolve(2)
    assert resume_differences(resolved.to_dict(), same.to_dict()) == []


def test_a_section_for_ms_amp_that_is_off_does_nothing():
    off = with_msamp("O2", enabled=False)
    assert off.resolve(2).precision == off.precision and msamp.described(off.resolve(2).deepspeed) is None
    assert resolve_ds_config(off, 2) == resolve_ds_config(arguments(), 2)


@pytest.mark.parametrize(
    ("changes", "key", "named"),
    [
        ({"level": "O4"}, "msamp.opt_level", '"O4" O1 O2 O3'),
        ({"level": ["O1"]}, "msamp.opt_level", '["O1"] O1 O2 O3'),
        ({"level": "O1", "enabled": "yes"}, "msamp.enabled", '"yes"'),
        ({"level": "O1", "optlevel": "O2"}, "msamp.optlevel", "opt_level"),
        (
            {"level": "O1", "precision": {"gradient_communication": "fp32"}},
            "msamp.opt_level",
            "precision.gradient_communication bf16 fp32",
        ),
        ({"level": "O2", "precision": {"compute": "fp32"}}, "msamp.opt_level", "precision.optimizer_states"),
    ],
)
def test_a_section_for_ms_amp_that_cannot_be_is_an_error(changes, key, named):
    with refused(ConfigurationError, key=key) as error:
        with_msamp(**changes).resolve(1)
    assert all(name in str(error.value) for name in named.split())


PACKED = {"compute": "bf16", "optimizer_states": "bf16_remainder"}


@pytest.mark.parametrize(
    "deepspeed",
    [
        {"zero_optimization": {"stage": 0}},
        {"zero_optimization": {"stage": 1}},
        "ds_config_zero2.json",
        "ds_config_zero3.json",
    ],
)
def test_packed_states_are_refused_where_they_cannot_be(deepspeed):
    refusal(deepspeed, "precision.optimizer_states", precision=PACKED)
    resolve_ds_config(arguments(precision=PACKED, deepspeed="ds_config_zero1.json"), 1)


@pytest.mark.parametrize(
    ("precision", "changes", "key"),
    [
        ({**PACKED, "compute": "fp32"}, {}, "precision.optimizer_states"),
        ({"compute": "fp32", "gradient_communication": "bf16"}, {}, "precision.gradient_communication"),
        ({"optimizer_moments": "fp32"}, {}, "precision.optimizer_moments"),
        (PACKED, {"adam_beta2": 0.99}, "precision.optimizer_states"),
    ],
)
def test_states_that_cannot_be_are_refused(precision, changes, key):
    with refused(ConfigurationError, key=key):
        arguments(precision=precision, **changes)
    arguments(precision={**PACKED, "optimizer_moments": "fp32"}, adam_beta2=0.99)
    arguments(precision=PACKED, adam_beta2=0.98)


@pytest.mark.parametrize(
    ("config", "key", "named"),
    [
        ({"train_batch_size": 8}, "train_batch_size", "8 2 16"),
        ({"train_micro_batch_size_per_gpu": 1}, "train_micro_batch_size_per_gpu", "1 4"),
        ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps", "1 2 train_batch_size_tokens"),
        ({"gradient_clipping": 1.001}, "gradient_clipping", "1.001 max_grad_norm 1.0"),
        ({"bf16": {"enabled": False}}, "bf16.enabled", "false precision.compute"),
        ({"fp16": {"enabled": True}}, "fp16.enabled", "true precision.compute"),
        ({"optimizer": {"type": "Lion", "params": {}}}, "optimizer.type", '"Lion" AdamW'),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}},
            "optimizer.params.lr",
            "1e-05 learning_rate",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.9]}}},
            "optimizer.params.betas",
            "adam_beta1",
        ),
        (
            {"zero_optimization": {"stage": 0}, "data_types": {"grad_accum_dtype": "fp32"}},
            "data_types.grad_accum_dtype",
            "fp32",
        ),
        ({"steps_per_print": "auto"}, "steps_per_print", '"auto"'),
    ],
)
def test_contradictions_are_refused(config, key, named):
    message = refusal(config, key)
    assert all(name in message for name in named.split())


ZERO_VALUES = {
    "zero_optimization": [True, 2, None, []],
    "zero_optimization.stage": [4, True, 1.0, "2", None],
    "zero_optimization.overlap_comm": [1, "true", None],
    "zero_optimization.reduce_bucket_size": [0, -1, 1.5, "5e8", True, float("inf")],
    "zero_optimization.stage3_param_persistence_threshold": [-1, None],
    "zero_optimization.load_from_fp32_weights": [False],
    "zero_optimization.elastic_checkpoint": [True],
    "zero_optimization.offload_optimizer": [True, {"device": "cpu"}, {"device": "nvme"}],
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
    **dict.fromkeys(INSTEAD),
}


def at(path: str, value: object) -> dict:
    for name in reversed(path.split(".")):
        value = {name: value}
    if path.startswith("optimizer."):
        value["optimizer"]["type"] = "AdamW"
    return value


@pytest.mark.parametrize(("path", "values"), ZERO_VALUES.items())
def test_a_value_that_is_not_supported_is_named_with_its_key(path, values):
    for value in values:
        assert json.dumps(value) in refusal(at(path, value), path)


@pytest.mark.parametrize(("path", "near"), NEAREST.items())
def test_a_key_that_is_not_supported_is_named_with_the_nearest(path, near):
    message = refusal(at(path, {"type": "auto"} if path == "scheduler" else "auto"), path)
    assert (near or "") in message and INSTEAD.get(path, "") in message


def test_problems_name_the_file_that_has_them(tmp_path):
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2, "overlap_com": True}}))
    assert str(path) in refusal(str(path), "zero_optimization.overlap_com")


def test_every_key_is_accepted_with_each_value_that_it_takes():
    given = {"leaf_module": {"classes": "A", "names": ["b"], "name_suffixes": []}}
    for key, (allowed, _) in KEYS["zero_optimization"].items():
        values = allowed if isinstance(allowed, tuple) and not hasattr(allowed, "holds") else [7, True]
        for value in values:
            if not hasattr(allowed, "holds") or allowed.holds(value):
                zero = {"stage": 3, **given, key: value}
                assert (
                    resolve_ds_config(arguments({"zero_optimization": zero}), 2)["zero_optimization"] == zero
                )


@pytest.mark.parametrize(("compute", "dtype"), [("fp8", "bf16"), ("bf16", "bf16"), ("fp32", "fp32")])
def test_without_zero_gradients_are_added_up_in_the_parameters_type(compute, dtype):
    stage_0 = {"zero_optimization": {"stage": 0}}
    precision = {"compute": compute}
    config = arguments({**stage_0, "data_types": {"grad_accum_dtype": dtype}}, precision=precision)
    assert resolve_ds_config(config, 1)["data_types"] == {"grad_accum_dtype": dtype}
    other = "fp32" if dtype == "bf16" else "bf16"
    config = arguments({**stage_0, "data_types": {"grad_accum_dtype": other}}, precision=precision)
    with refused(ConfigurationError, key="data_types.grad_accum_dtype"):
        resolve_ds_config(config, 1)


def test_fp16_excludes_zero_0():
    """DeepSpeed 0.19.8 would divide its gradients by a loss scale that it has not multiplied by."""
    for config in ({}, "ds_config_zero0.json"):
        assert {1, 2, 3} <= set(numbers(refusal(config, "zero_optimization.stage", compute="fp16")))
    for stage in (1, 2, 3):
        resolve_ds_config(arguments(f"ds_config_zero{stage}.json", compute="fp16"), 2)


@pytest.mark.parametrize(
    ("deepspeed", "compute", "key"),
    [
        ("ds_config_zero2.json", "bf16", "zero_optimization.stage"),
        ("ds_config_zero3.json", "fp8", "zero_optimization.stage"),
        ({"zero_optimization": {"stage": 1}}, "bf16", "zero_optimization.stage"),
        (None, "fp32", "zero_optimization.stage"),
        (None, "fp16", "precision.compute"),
        ({"optimizer": {"type": "AdamW"}}, "bf16", "optimizer"),
    ],
)
def test_muon_is_refused_where_deepspeeds_is_none(deepspeed, compute, key):
    refusal(deepspeed, key, compute=compute, optim="muon")
    if key != "optimizer":
        resolve_ds_config(arguments(deepspeed, compute=compute), 2)


@pytest.mark.parametrize(
    ("deepspeed", "compute"), [(None, "fp8"), (None, "bf16"), ({}, "fp32"), ({}, "bf16")]
)
def test_muon_runs_at_zero_1_and_0(deepspeed, compute):
    resolve_ds_config(arguments(deepspeed, compute=compute, optim="muon"), 2)


def test_what_packs_adamws_states_does_not_pack_muons():
    refusal(None, "precision.optimizer_states", precision=PACKED, optim="muon")


def test_deepspeeds_own_muon_is_named_by_its_key():
    refusal({"optimizer": {"type": "Muon"}}, "optimizer")


def test_all_problems_come_at_once():
    config = {"gradient_clipping": 2, "zero": 1, "optimizer": {"type": "SGD"}}
    refusal(config, "zero", "gradient_clipping", "optimizer.type")


def test_a_matching_optimizer_section_is_removed():
    section = {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": "auto"},
    }
    assert "optimizer" not in resolve_ds_config(arguments({"optimizer": section}), 1)


def test_zero_3_sizes_follow_the_hidden_size():
    sizes = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    zero = {"stage": 3, **dict.fromkeys(sizes, "auto")}
    found = resolve_ds_config(arguments({"zero_optimization": zero}), 1)["zero_optimization"]
    assert [found[name] for name in sizes] == [128 * 128, int(0.9 * 128 * 128), 10 * 128]


def test_when_zero_3_gathers_weights_does_not_matter_to_a_resume():
    now = load_deepspeed("ds_config_zero3.json")
    before = {**now, "zero_optimization": {**now["zero_optimization"], "reduce_bucket_size": 1000}}
    for key in ("leaf_module", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"):
        del before["zero_optimization"][key]
    old, new = (arguments(config).resolve(2).to_dict() for config in (before, now))
    assert [d.key for d in resume_differences(old, new)] == ["deepspeed.zero_optimization.reduce_bucket_size"]


def test_what_the_user_turned_on_stays_on():
    timers = {"throughput": {"enabled": True}}
    given = {"wall_clock_breakdown": True, "steps_per_print": 5, "timers": timers}
    config = resolve_ds_config(arguments(given), 1)
    assert config["wall_clock_breakdown"] is True and config["steps_per_print"] == 5
    assert config["timers"] == timers


def test_the_arguments_are_not_modified():
    given = {"gradient_clipping": "auto"}
    resolve_ds_config(arguments(given), 1)
    assert given == {"gradient_clipping": "auto"}


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
        f"{path.stem}-{compute}": resolve_ds_config(arguments(path.name, compute), 1)
        for path in sorted(CONFIG_FOLDER.glob("ds_config_*.json"))
        for compute in (("bf16", "fp32") if "zero1" in path.name else ("bf16",))
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": ""}
    env |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu"}
    done = programs.run(
        [sys.executable, "-c", DEEPSPEED_SCRIPT],
        input=json.dumps(configs), env=env, cwd=REPOSITORY, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("RESULT"))


@pytest.mark.process
def test_supported_keys_are_read_by_deepspeed(deepspeed_result):
    read = set(deepspeed_result["read"])
    assert {key for key in (*KEYS[""], *KEYS) if key and "." not in key} <= read
    assert {key for key in INSTEAD if "." not in key} <= read


@pytest.mark.process
def test_every_shipped_configuration_trains_in_deepspeed(deepspeed_result):
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
