"""The configuration of a run: `arguments` (every fact about a key at its field), `schema` (what each key takes, as JSON
schema and in words), `schedule` (phases of the precision), `ds_config` (what DeepSpeed gets), `differences` (what a
resume may change), `load` (file and command line to checked and resolved arguments).

May import: train.files, train.data, and the parts of model that need no torch. Others use TrainingArguments and
ConfigurationError of arguments, load_arguments, build_arguments and resolve_arguments of load, resolve_ds_config of
ds_config, and differences.
"""
