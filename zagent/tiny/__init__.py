"""The tiny tool model: its questions, its tokenizer, its training, and the trained weights (`final/`, `early/`)."""
