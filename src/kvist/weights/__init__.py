"""Model files in, packed weights out. Importing this room opens no library of model files."""

from kvist.weights.source import GGUFVocab, ModelSource, TokenizerSource, open_model

__all__ = ["GGUFVocab", "ModelSource", "TokenizerSource", "open_model"]
