"""Import and export of Hugging Face models, tensor by tensor.

What is special to a family (keys of config.json, names of tensors) stands in threefold/models/FAMILY/huggingface.py.
Here is what all have in common: `tensor_files` reads and `shards` writes safetensors, `weights` makes parameters of the
tensors, `config_mapping` finds the type of a config.json, `sidecar_files` are tokenizer and chat template, and
`import_hf` and `export_hf` do the work of the two commands.
"""
