"""Import and export of Hugging Face models, tensor by tensor.

Each family's keys of config.json and names of tensors are in threefold/models/FAMILY/huggingface.py. Common to all:
`tensor_files` reads and `shards` writes safetensors, `weights` makes parameters of the tensors, `config_mapping` finds
the type of a config.json, `sidecar_files` are tokenizer and chat template, and `import_hf` and `export_hf` are the two
commands.
"""
