"""Models of Hugging Face: read into a run's checkpoint, and written from one, tensor by tensor.

`families` names the kinds of models; `config_in` and `config_out` translate their config.json; `tables` says which of
their tensors make up which of ours, in the terms of `weights`; `files` reads and `shards` writes safetensors; `bring`
and `give` do the two commands' work.
"""
