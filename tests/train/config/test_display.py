"""How a configuration is shown on the console."""

import pytest

from tests.conftest import refused
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
    """On the console, in train.log and in what a resume refuses."""
    given, other = ({"data__sources": {name: f"data/{name}"}} for name in ("bücher", "книги"))
    one, two = (arguments(**sources).resolve(1) for sources in (given, other))
    assert '{"bücher": "data/bücher"}' in on_one_line(arguments(**given)) and "data/bücher" in table(one)
    (difference,) = resume_differences(one.to_dict(), two.to_dict())
    assert "bücher" in str(difference) and "книги" in str(difference)


@pytest.mark.parametrize(
    ("name", "what", "named", "unnamed"),
    [
        ("my_runn.json", "CONFIG", ["my_run.json", "train_config_tiny.json"], [".json.json", "ds_config"]),
        ("ds_config_zero_1", "deepspeed", ["ds_config_zero1.json"], ["train_config"]),
        ("nothing_alike", "CONFIG", ["nothing_alike.json", "train_config_tiny.json"], ["my_run"]),
    ],
)
def test_a_configuration_that_is_not_there_is_told_with_the_nearest(
    tmp_path, monkeypatch, name, what, named, unnamed
):
    """And a training's name with those of trainings alone."""
    (tmp_path / "my_run.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with refused(ConfigurationError, code="no_such_file", key=name) as found:
        find_config(name, what)
    assert all(each in str(found.value) for each in named)
    assert not any(each in str(found.value) for each in unnamed)
