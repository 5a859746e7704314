"""What a resumed run may not have otherwise, by itself."""

from tests.train.config.test_arguments import arguments
from train.config.arguments import TrainingArguments
from train.config.differences import Difference, resume_differences


def test_resume_names_what_changes_the_numbers():
    old = arguments().resolve(1).to_dict()
    assert resume_differences(old, old) == []
    new = arguments(learning_rate=1e-3, precision__recipe="current", data__sources={"b": "data/a"}).resolve(1)
    assert sorted(map(str, resume_differences(old, new.to_dict()))) == [
        'data.sources: ["a"] -> ["b"]',
        "learning_rate: 0.0003 -> 0.001",
        'precision.recipe: "delayed" -> "current"',
    ]
    backend = arguments(precision__backend="reference").resolve(1).to_dict()
    assert resume_differences(old, backend) == [Difference("precision.backend", "auto", "reference")]
    staged = arguments(deepspeed="ds_config_zero2.json").resolve(1).to_dict()
    assert Difference("deepspeed.zero_optimization.stage", 1, 2) in resume_differences(old, staged)


def test_what_deepspeed_tells_and_measures_may_change() -> None:
    """A file that does not name it, as one of the user's own, is no other run, nor is one that is to be profiled."""
    old = arguments().resolve(1).to_dict()
    own = {key: old["deepspeed"][key] for key in ("zero_optimization", "data_types")}
    assert "wall_clock_breakdown" in old["deepspeed"].keys() - own
    for told in (
        {},
        {"wall_clock_breakdown": True, "steps_per_print": 5, "flops_profiler": {"enabled": True}},
    ):
        new = arguments(deepspeed=own | told).resolve(1).to_dict()
        assert resume_differences(old, new) == []
    new = arguments(deepspeed=own | {"prescale_gradients": True}).resolve(1).to_dict()
    assert resume_differences(old, new) == [Difference("deepspeed.prescale_gradients", None, True)]


def test_a_key_that_is_new_counts_as_what_was_done_before_it() -> None:
    key, new = "fp8_head_gradients", arguments().resolve(1).to_dict()
    old = {**new, "precision": {k: v for k, v in new["precision"].items() if k != key}}
    assert resume_differences(old, new) == [Difference(f"precision.{key}", False, True)]
    for own in ({"compute": "bf16"}, {"recipe": "tensorwise"}):  # which do not read it
        precision = {**new["precision"], **own}
        before = {k: v for k, v in precision.items() if k != key}
        assert resume_differences({**new, "precision": before}, {**new, "precision": precision}) == []


def test_it_counts_where_a_stage_has_such_gradients() -> None:
    """As the stages are, not as the section is; an lm_head in FP8 has none that are new."""
    key, later = "fp8_head_gradients", [{"until_step": 5}, {"compute": "fp8"}]
    for own, counts in (
        ({"precision__compute": "bf16", "precision__schedule": later}, True),
        ({"precision__bf16_modules": []}, False),
        ({"precision__bf16_modules": ["lm_*"]}, True),
    ):
        new = arguments(**own).resolve(1).to_dict()
        old = {**new, "precision": {k: v for k, v in new["precision"].items() if k != key}}
        expected = [Difference(f"precision.{key}", False, True)] if counts else []
        assert resume_differences(old, new) == expected, own


def test_what_no_stage_reads_says_nothing() -> None:
    """The default of a key of delayed scaling has changed: runs of an earlier version without it go on."""
    for own, counts in (
        ({}, True),
        ({"precision__recipe": "current"}, False),
        ({"precision__compute": "bf16"}, False),
        (
            {"precision__compute": "bf16", "precision__schedule": [{"until_step": 5}, {"compute": "fp8"}]},
            True,
        ),
        ({"precision__schedule": [{"until_step": 5, "recipe": "block"}, {"recipe": "current"}]}, False),
    ):
        new = arguments(**own).resolve(1).to_dict()
        old = {**new, "precision": {**new["precision"], "amax_history_len": 1024}}
        TrainingArguments.from_dict(old)
        expected = [Difference("precision.amax_history_len", 1024, 16)] if counts else []
        assert resume_differences(old, new) == expected, own
    # a run that goes on in FP8 is asked about that alone
    old = arguments(precision__compute="bf16").resolve(1).to_dict()
    old["precision"]["amax_history_len"] = 1024
    new = arguments().resolve(1).to_dict()
    assert resume_differences(old, new) == [Difference("precision.compute", "bf16", "fp8")]
    # a module of current scaling may have gone up to block, which reads what current does
    new = arguments(precision__recipe="delayed", precision__on_trouble="escalate").resolve(1).to_dict()
    old = {**new, "precision": {**new["precision"], "amax_epsilon": 1e-3}}
    assert resume_differences(old, new) == [Difference("precision.amax_epsilon", 1e-3, 0.0)]


def test_calibration_counts_where_a_later_stage_begins_by_it() -> None:
    """A run without a schedule has begun, as has its first stage; one with its own passes does not look at these."""
    later = {"compute": "fp8"}
    for stages, compute, counts in (
        (None, "fp8", False),
        ([{"until_step": 5}, {"compute": "bf16"}], "fp8", False),
        ([{"until_step": 5}, {"recipe": "current"}], "fp8", False),
        ([{"until_step": 5}, later], "bf16", True),
        ([{"until_step": 5}, {**later, "until_step": 9}, {"compute": "bf16"}], "bf16", True),
        ([{"until_step": 5, "recipe": "current"}, {}], "fp8", True),
        ([{"until_step": 5}, {**later, "calibration_passes": 2}], "bf16", False),
    ):
        old, new = (
            arguments(
                precision__schedule=stages, precision__compute=compute, precision__calibration_passes=passes
            )
            .resolve(1)
            .to_dict()
            for passes in (4, 0)
        )
        expected = [Difference("precision.calibration_passes", 4, 0)] if counts else []
        assert resume_differences(old, new) == expected, stages


def test_a_mixture_beside_stages_is_told_as_a_whole() -> None:
    """By source, those of the mixture would be told as null in the run that has stages, and its stages in the other."""
    of_two = {"data__sources": {"a": "data/a", "b": "data/b"}}
    mixture, stages = (
        {"a": 0.7, "b": 0.3},
        [{"weights": {"a": 1.0}, "until_tokens": 4096}, {"weights": {"b": 1.0}}],
    )
    one, staged, by_size = (
        arguments(**of_two, data__weights=weights).resolve(1).to_dict() for weights in (mixture, stages, None)
    )
    as_resolved = staged["data"]["weights"]
    assert resume_differences(one, staged) == [Difference("data.weights", mixture, as_resolved)]
    assert resume_differences(staged, one) == [Difference("data.weights", as_resolved, mixture)]
    assert resume_differences(staged, by_size) == [Difference("data.weights", as_resolved, None)]
    assert resume_differences(staged, staged) == []
    other = arguments(**of_two, data__weights=mixture | {"a": 0.5}).resolve(1).to_dict()
    assert resume_differences(one, other) == [Difference("data.weights.a", 0.7, 0.5)]
