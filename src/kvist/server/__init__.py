"""The HTTP room: an OpenAI-compatible API over an engine that it knows only as an `EngineClient`.

Nothing else of kvist but `cli` imports this package, so that using the engine as a library costs no web framework.
"""
