"""What a run is configured by: arguments (every key with its type, limit, help and resume rule), across_keys (what they
ask of each other), schema (what a key takes, as JSON schema and in words; problems of a file), command_line,
differences (of two configurations, and what of them a resume may have), ds_config (what DeepSpeed gets), msamp (a
section for another DeepSpeed, understood).

May import: train.files, train.data, and of model what needs no torch. Others use of it: TrainingArguments,
load_arguments and ConfigurationError of arguments, resolve_ds_config of ds_config, differences.
"""
