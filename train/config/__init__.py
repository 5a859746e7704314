"""The training configuration.

- `arguments` declares the configuration keys.
- `load` loads and checks the configuration. It also opens the other files that a run reads.
- `schema` describes the allowed values as a JSON schema and in words.
- `schedule` resolves the phases of precision.schedule.
- `ds_config` creates the DeepSpeed configuration.

This package may import train.files, train.data, and the parts of model that do not need torch. Other packages import
TrainingArguments and ConfigurationError from arguments; load_arguments, build_arguments, resolve_arguments and
open_inputs from load; and resolve_ds_config from ds_config.
"""
