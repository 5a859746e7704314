"""How a configuration is shown on the console."""

import pytest

from tests.train.config.test_arguments import arguments
from train.config.arguments import ConfigurationError, TrainingArguments, find_config
from train.config.differences import resume_differences
from train.config.display import differing, table


def on_one_line(args: TrainingArguments) -> str:
    return " ".join(differing(args.resolve(1)).split())


def test_the_console_shows_what_is_not_the_default():
    plain = arguments().resolve(1)
    assert "seed" not in differing(plain) and "deepspeed" not in differing(plain)
    shown = differing(
        arguments(seed=7, output_dir="x", deepspeed="ds_config_zero3.json", speed__main_grad=False).resolve(1)
    )
    assert "seed 7" in shown and "speed.main_grad false" in shown and 'deepspeed {"' in shown
    assert "output_dir" not in shown and "per_device_eval_batch_size" not in shown
    assert all(len(line) <= 110 for line in shown.splitlines())
    for name, told in (("n" * 60, "n" * 60), ("n" * 61, "n" * 57 + "...")):  # long ones are cut off
        assert f"run_name {told}, " in on_one_line(arguments(run_name=name))
    assert "per_device_eval_batch_size 4, " in on_one_line(arguments(per_device_eval_batch_size=4))


def test_names_are_shown_in_their_own_letters() -> None:
    """On the console, in train.log, in what a resume refuses and in what is wrong with a value."""
    given, other = ({"data__sources": {name: f"data/{name}"}} for name in ("bücher", "книги"))
    one, two = (arguments(**sources).resolve(1) for sources in (given, other))
    assert '{"bücher": "data/bücher"}' in on_one_line(arguments(**given)) and "data/bücher" in table(one)
    assert [*map(str, resume_differences(one.to_dict(), two.to_dict()))] == [
        'data.sources: ["bücher"] -> ["книги"]'
    ]
    with pytest.raises(ValueError, match='max_steps: "hundert für" is given, an integer above 0'):
        arguments(max_steps="hundert für")


def test_a_configuration_that_is_not_there_is_told_with_the_nearest(tmp_path, monkeypatch):
    """And a training's name with those of trainings alone."""
    (tmp_path / "my_run.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError) as found:
        find_config("my_runn.json", "CONFIG")
    told = str(found.value)
    assert "did you mean my_run.json? train_args/" in told and "train_config_tiny.json" in told
    assert ".json.json" not in told and "ds_config" not in told
    with pytest.raises(
        ConfigurationError, match="did you mean ds_config_zero1.json.* has ds_config_zero0.json"
    ):
        find_config("ds_config_zero_1", "deepspeed")
    with pytest.raises(ConfigurationError, match="/nothing_alike.json; train_args/, of which"):
        find_config("nothing_alike", "CONFIG")
