"""LoRA adapters in the gateway: the list of adapters, loading and unloading, and the endpoints for it.

guest    the adapters of all models that this gateway knows; loads and unloads adapters
api      `POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`
"""
