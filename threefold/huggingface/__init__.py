"""Import and export of Hugging Face models, tensor by tensor; conversations, by their chat templates.

Each family's config.json keys and tensor names are in threefold/huggingface/FAMILY.py.
"""
