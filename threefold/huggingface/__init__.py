"""Import and export of Hugging Face models; each family's keys and names are in models/FAMILY/huggingface.py."""
