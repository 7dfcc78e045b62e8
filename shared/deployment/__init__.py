"""The desired state of a deployment, in a key-value store on the bus.

| module           | what it does                                          |
|------------------|-------------------------------------------------------|
| `adapter_state`  | the adapters that every engine of a model should have |
| `model_versions` | the versions of the models                            |
"""
