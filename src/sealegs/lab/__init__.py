"""The reference model, its data, tokenizer and trainer. Start at ``train.py``."""
