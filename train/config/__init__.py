"""The configuration of a run.

Keys (`arguments`), loading and checks (`load`), allowed values as JSON schema or text (`schema`), phases of the
precision (`schedule`), the DeepSpeed configuration (`ds_config`), and changes on a resume (`differences`).

May import train.files, train.data, and the parts of model that do not need torch. Other packages use TrainingArguments
and ConfigurationError from arguments; load_arguments, build_arguments and resolve_arguments from load;
resolve_ds_config from ds_config; and differences.
"""
