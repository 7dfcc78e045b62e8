"""What a deployment keeps on the bus: its logs and stores, and its desired state in them.

| module           | what it does                                          |
|------------------|-------------------------------------------------------|
| `stores`         | the logs and stores, and how large they may be        |
| `store_keeper`   | makes them, and makes them again when they are lost   |
| `adapter_state`  | the adapters that every engine of a model should have |
| `model_versions` | the versions of the models                            |
"""
