"""Import and export of Hugging Face models, tensor by tensor.

Each family's config.json keys and tensor names are in threefold/models/FAMILY/huggingface.py. Shared by all families:
`files` reads safetensors and the files about the tokenizer and converts config.json, and `import_hf` and `export_hf`
implement the two commands.
"""
