"""GGUF files made of small models, by the package `gguf` of llama.cpp."""
