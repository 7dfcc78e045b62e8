"""LoRA adapters as the gateway serves them: which there are, loading and unloading them, and the endpoints for that.

directory    the adapters of all models as this gateway knows them, and changes of them
endpoints    `POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`
"""
